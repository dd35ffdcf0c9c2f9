"""Trained weights in files, with their model and tokenizer."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from torchtitan_lite.checkpoint import (
    WAYS,
    Snapshot,
    StoredSnapshot,
    adapted_layers,
    load,
    model_tensors,
    newest_step,
    open_merged,
    recorded_config,
    reject_external,
)
from torchtitan_lite.checkpoint.convert.hugging_face import (
    CONFIG,
    GENERATION,
    HuggingFaceFolder,
    HuggingFaceSnapshot,
    is_hugging_face,
    saved_assets,
)
from torchtitan_lite.checkpoint.storage import (
    MANIFEST,
    exists,
    open_parent_storage,
)
from torchtitan_lite.config import Config
from torchtitan_lite.config.tables.lora import LoRAConfig
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import CheckpointError, DataError, UserError
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.tokenizer import (
    Tokenizer,
    TokenizerFiles,
    open_tokenizer,
    trained_tokenizer,
)
from torchtitan_lite.data.tokenizer_folder import read_object
from torchtitan_lite.distributed.host_collectives import broadcast_bytes
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.on_all_ranks import run_on_all_ranks
from torchtitan_lite.models import hugging_face_model, model_spec
from torchtitan_lite.nn.initialize import allocate_memory, on_meta
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel import inference as parallel_inference
from torchtitan_lite.parallel.pipeline_stages import keep_only


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model in files."""

    snapshot: Snapshot
    spec: ModelSpec
    config: Config
    """Config of the run that wrote the weights; its tokenizer is that of the weights."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most weights."""
        sizes: dict[torch.dtype, int] = {}
        for name, placed in self.snapshot.tensors.items():
            if name.startswith("model.") and placed.dtype.is_floating_point:
                size = torch.Size(placed.shape).numel()
                sizes[placed.dtype] = sizes.get(placed.dtype, 0) + size
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def open_weights(path: str, mesh: Mesh, *, ema: bool = False) -> Weights:
    """Open the weights in `path`: of the newest checkpoint that it names (`newest_step`), or of a
    Hugging Face folder. With `ema`, their moving average is in their place. All ranks open the
    leader's choice, because a run may save another step meanwhile. Every rank must call it. Raises
    CheckpointError."""
    chosen, problem = path, ""
    if mesh.is_leader:
        try:
            chosen = newest_step(path)
        except (UserError, OSError) as error:
            problem = f"{path} cannot be read: {error}"
    problem = broadcast_bytes(problem.encode()).decode()
    if problem:
        raise CheckpointError(problem)
    folder = broadcast_bytes(chosen.encode()).decode()
    return run_on_all_ranks(lambda: _opened(folder, ema=ema))


def tokenizer_of(weights: Weights, folder: str | None) -> TokenizerFiles:
    """Open the tokenizer in `folder`, or by default the one the weights were trained with. Every
    rank must call it. Raises CheckpointError if it cannot be found."""
    return run_on_all_ranks(lambda: find_tokenizer(weights, folder))


def find_tokenizer(weights: Weights, folder: str | None) -> TokenizerFiles:
    """`tokenizer_of` for a single process. Raises DataError if it cannot be found."""
    config = weights.config
    tokenizer_folder = folder or config.model.hf_assets_path
    if tokenizer_folder is not None:
        if not (Path(tokenizer_folder).expanduser() / "tokenizer.json").is_file():
            whose = "" if folder else f", with which {weights.snapshot.where} was trained,"
            raise DataError(
                f"The tokenizer folder {tokenizer_folder}{whose} has no tokenizer.json. Give "
                "--tokenizer DIR (in Python tokenizer=DIR), a folder with the tokenizer files of "
                "the model."
            )
        return open_tokenizer(tokenizer_folder, (), weights.spec.vocab_size, Path())
    cache_folder = Path(config.training.cache_folder).expanduser().absolute()
    files, why = None, f"it is not in {cache_folder}/tokenizers, or the corpora have changed"
    try:
        corpora = [
            open_corpus(resolved_corpus) for resolved_corpus in config.training.resolved_corpora()
        ]
        files = trained_tokenizer(corpora, weights.spec.vocab_size, cache_folder)
    except DataError as error:
        why = str(error)
    if files is None:
        raise DataError(
            f"{weights.snapshot.where} was trained with a tokenizer made from its corpora, which "
            f"is not accessible: {why}. Give --tokenizer DIR (in Python tokenizer=DIR), the folder "
            "of its tokenizer.json."
        )
    return files


def open_saved(folder: str, *, ema: bool = False) -> StoredSnapshot | HuggingFaceSnapshot:
    """Open one folder of weights, as they are stored. Raises CheckpointError."""
    storage, name = open_parent_storage(folder)
    if exists(storage, f"{name}/{MANIFEST}"):
        return StoredSnapshot(storage, name, ema=ema)
    if is_hugging_face(storage, name):
        if ema:
            raise CheckpointError(
                f"{folder} is a Hugging Face folder, which has no moving average of the weights. "
                "Leave out --ema (in Python ema=True), or give the folder of a step."
            )
        opened = HuggingFaceFolder(storage, name)
        return HuggingFaceSnapshot(opened, model_spec(_model_of(opened)))
    reject_external(storage, name)
    raise CheckpointError(
        f"{folder} contains no checkpoint. Give {WAYS}; or a Hugging Face folder."
    )


def _opened(folder: str, *, ema: bool) -> Weights:
    """Open one folder of weights, with the config of their run."""
    snapshot = open_saved(folder, ema=ema)
    if isinstance(snapshot, HuggingFaceSnapshot):
        return _hugging_face(snapshot)
    config = config_of_snapshot(snapshot)
    spec = model_spec(config.model)
    if adapted_layers(snapshot):
        return merged_weights(snapshot, config)
    return Weights(snapshot=snapshot, spec=spec, config=config)


def merged_weights(
    snapshot: StoredSnapshot, config: Config, *, base_path: str | None = None
) -> "Weights":
    """Return the merged weights of a checkpoint of adapters, with the config of a run without
    adapters. `base_path` and errors are those of `open_merged`."""
    kept = [converter for converter in config.model.converters if converter != "lora"]
    model = config.model.model_copy(update={"converters": kept})
    config = config.model_copy(update={"model": model, "lora": LoRAConfig()})
    spec = model_spec(model)
    merged = open_merged(snapshot, spec, base_path)
    return Weights(snapshot=merged, spec=spec, config=config)


def config_of_snapshot(snapshot: StoredSnapshot, *, needs_flavor: bool = False) -> Config:
    """Return the config of the run that wrote a checkpoint, with the tokenizer files beside its
    checkpoints. Raises CheckpointError as `recorded_config` does."""
    config = recorded_config(snapshot.manifest.config, snapshot.where, needs_flavor=needs_flavor)
    kept = saved_assets(snapshot.where)
    if kept is None:
        return config
    model = config.model.model_copy(update={"hf_assets_path": str(kept)})
    return config.model_copy(update={"model": model})


def _hugging_face(snapshot: HuggingFaceSnapshot) -> Weights:
    """Return a Hugging Face folder with the config of a run that would train it."""
    model = _model_of(snapshot.folder)
    weights = Weights(snapshot=snapshot, spec=model_spec(model), config=Config(model=model))
    dtype = str(weights.dtype).removeprefix("torch.")
    # Computing in float16 is not supported.
    training = {} if dtype == "float16" else {"dtype": dtype}
    tables = {"model": model.model_dump(), "training": training}
    return replace(weights, config=Config.model_validate(tables))


def _model_of(folder: HuggingFaceFolder) -> ModelConfig:
    return hugging_face_model(folder.config, folder.where, f"{folder.where}/{CONFIG}")


def stop_ids(tokenizer: Tokenizer, folder: Path) -> set[int]:
    """Return the ids that end a text: the end-of-document token of the tokenizer in `folder`, and
    those in `generation_config.json` beside it (a chat model has several). Raises DataError if that
    is damaged."""
    stops = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
    named = read_object(folder / GENERATION).get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    return stops | {id_ for id_ in ids if type(id_) is int}


def serve(
    weights: Weights, mesh: Mesh, *, dtype: torch.dtype | None, tensor_parallel: int | None
) -> tuple[nn.Module, Mesh]:
    """Build the model and its mesh, in `dtype` or that of the files: replicas, each sharded over
    `tensor_parallel` ranks or as many as can share it. Every rank must call it.

    Raises MeshError if so many ranks cannot share it, and CheckpointError if the files do not fit.
    """
    spec = weights.spec
    degrees = parallel_inference.inference_degrees(spec, mesh.world_size, tensor_parallel)
    inference_mesh = mesh.with_degrees(degrees)
    model = on_meta(spec.build, dtype or weights.dtype)
    parallel_inference.apply(model, spec, inference_mesh)
    allocate_memory(model, mesh.device.torch_device)
    load(weights.snapshot, model_tensors(model), {"model"}, inference_mesh)
    # Only training predicts further tokens.
    keep_only(model, spec, [u for u in spec.stage_units if u not in spec.prediction_units])
    return model.requires_grad_(False).eval(), inference_mesh
