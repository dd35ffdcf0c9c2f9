"""A trained model with its tokenizer, ready for inference in this process or on a mesh.

Invariant: loading leaves no process group, handler or setting behind.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lite.config import Config
from torchtitan_lite.core.errors import MeshError, UserError
from torchtitan_lite.data.tokenizer import Tokenizer, check_vocab_size
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, start_mesh
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.serving.inference.weights import Weights, open_weights, serve, tokenizer_of

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model in files, with its tokenizer. The weights are not loaded."""

    weights: Weights
    tokenizer: Tokenizer
    tokenizer_folder: Path
    """Has the chat template, and the tokens that end a text."""

    @property
    def spec(self) -> ModelSpec:
        """The model: its family, sizes and vocabulary."""
        return self.weights.spec

    @property
    def config(self) -> Config:
        """Configuration of the run that wrote the weights; for a Hugging Face folder, of a run that
        would train it."""
        return self.weights.config

    @property
    def where(self) -> str:
        """Folder or URL of the weights."""
        return self.weights.snapshot.where


@dataclass(frozen=True, kw_only=True)
class LoadedModel(ModelFiles):
    """A model with its weights, made by `load_model`."""

    model: nn.Module
    """Model in eval mode, without gradients. Parameters are DTensors if ranks share the model."""
    mesh: Mesh
    """Axes of inference: `tp`, and `dp_replicate` for copies. In a process without a mesh, one of a
    single rank, whose process group is gone."""

    @torch.no_grad()
    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Map tokens [B, S], int64, to logits [B, S, V] in the dtype of the model and on its
        device: at each position, those of the next token. Sequences begin at position 0. The ranks
        that share the model must call it together, with the same tokens."""
        batch_size, length = tokens_BS.shape
        if length > self.spec.max_seq_len:
            raise UserError(
                f"The sequences have {length} tokens, but {self.spec.name} {self.spec.flavor} "
                f"reads {self.spec.max_seq_len} positions. Give shorter sequences."
            )
        device = self.mesh.device.torch_device
        return self.model(
            tokens_BS.to(device),
            positions_BS=torch.arange(length, device=device).expand(batch_size, -1),
            # Only dropout uses it, which is disabled here.
            rng_keys_B=torch.zeros(batch_size, dtype=torch.int64, device=device),
        )


def load_model(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    device: str = "auto",
    tokenizer: str | os.PathLike[str] | None = None,
    ema: bool = False,
    tensor_parallel: int | None = None,
) -> LoadedModel:
    """Load a trained model for inference.

    `path` is the output folder of a run or the folder or URL of its checkpoints, of which the
    newest is loaded, the folder of one step, or a Hugging Face folder. Adapters are merged into
    their frozen weights.

    Without `mesh`, the model is loaded into this process, on `device` ("auto", "cpu" or "cuda").
    With the `mesh` of `start_mesh`, every rank must call it: `tensor_parallel` ranks share a copy
    of the model, by default the mesh's `tp`, or if that is 1, as many ranks as can share it. The
    others hold further copies. Inference has neither pipeline, context nor expert parallelism.

    `dtype` is that of the weights and of the computation: float64, float32, bfloat16 or float16,
    by default that of the files. `tokenizer` is a folder with tokenizer.json, by default that of
    the run. With `ema`, the moving average of the weights is loaded.

    Raises CheckpointError if `path` holds no readable checkpoint or no tokenizer is found,
    DataError for a tokenizer that does not fit the model, MeshError for a mesh that inference does
    not support, and UserError for other arguments.
    """
    if dtype is not None and dtype not in _DTYPES:
        known = ", ".join(str(choice) for choice in _DTYPES)
        raise UserError(f"dtype = {dtype} is not a dtype of a computation. Use one of {known}.")
    with _world(mesh, device) as world:
        files = open_model(path, world, tokenizer=tokenizer, ema=ema)
        return load_weights(files, world, dtype=dtype, tensor_parallel=tensor_parallel)


def open_model(
    path: str | os.PathLike[str],
    mesh: Mesh,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    ema: bool = False,
) -> ModelFiles:
    """Open the model of `load_model` and its tokenizer, without reading the weights. Every rank
    must call it. Raises as `load_model`."""
    weights = open_weights(os.fspath(path), mesh, ema=ema)
    files = tokenizer_of(weights, None if tokenizer is None else os.fspath(tokenizer))
    loaded = files.load()
    check_vocab_size(files.folder, loaded.vocab_size, weights.spec.vocab_size)
    return ModelFiles(weights=weights, tokenizer=loaded, tokenizer_folder=files.folder)


def load_weights(
    files: ModelFiles, mesh: Mesh, *, dtype: torch.dtype | None, tensor_parallel: int | None
) -> LoadedModel:
    """Load the model of `files` onto the ranks of `mesh`, as `load_model` does. Every rank must
    call it."""
    degrees = mesh.degrees
    other_degrees = {"pipeline": degrees.pp, "context": degrees.cp, "expert": degrees.ep}
    if unsupported := [
        f"{name} ({degree})" for name, degree in other_degrees.items() if degree > 1
    ]:
        raise MeshError(
            f"The mesh has {' and '.join(unsupported)} parallelism, which inference does not have. "
            f"Start its {mesh.world_size} ranks with tensor and data parallelism alone: "
            "start_mesh(ParallelismConfig(tensor_parallel_degree=...))."
        )
    if tensor_parallel is None and degrees.tp > 1:
        tensor_parallel = degrees.tp
    model, own = serve(files.weights, mesh, dtype=dtype, tensor_parallel=tensor_parallel)
    return LoadedModel(**vars(files), model=model, mesh=own)


@contextmanager
def _world(mesh: Mesh | None, device: str) -> Iterator[Mesh]:
    """Yield `mesh`, or one of this process alone, which leaves no process group behind."""
    if mesh is not None:
        if device not in ("auto", mesh.device.kind):
            raise UserError(
                f'device = "{device}", but the mesh is on {mesh.device.kind}. Leave device out, or '
                f'start the mesh on it: start_mesh(device=detect_device("{device}")).'
            )
        yield mesh
        return
    started = dist.get_world_size() if dist.is_initialized() else os.environ.get("WORLD_SIZE", "1")
    if int(started) > 1:
        raise MeshError(
            f"load_model without a mesh loads into one process, but there are {started}. Share "
            "the model: with start_mesh() as mesh: load_model(path, mesh=mesh)."
        )
    with start_mesh(device=detect_device(device)) as alone:
        yield alone
