"""Conversion of torchtitan's DCP checkpoints.

One tensor is assembled at a time; files are written as soon as they are large enough.
"""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torchtitan_lite import __version__
from torchtitan_lite.checkpoint.convert.conversion import (
    expected_shapes,
    tied_weight_names,
    unsharded_part,
)
from torchtitan_lite.checkpoint.convert.dcp.dcp_folder import DcpFolder
from torchtitan_lite.checkpoint.convert.dcp.keys import (
    KeyMap,
    KeyMatch,
    halves_from_pairs,
    shape_mismatches,
)
from torchtitan_lite.checkpoint.format import step_name, tensor_file_name
from torchtitan_lite.checkpoint.snapshots import model_dims
from torchtitan_lite.checkpoint.storage import attempts
from torchtitan_lite.checkpoint.storage.base import Storage
from torchtitan_lite.checkpoint.storage.safetensors_file import PartBox
from torchtitan_lite.checkpoint.tensors import DTYPE_NAMES, tensor_bytes
from torchtitan_lite.core.errors import CheckpointError, DamagedCheckpoint
from torchtitan_lite.distributed.mesh import ParallelDims
from torchtitan_lite.nn.spec import ModelSpec, differing_dims

_FILE_BYTES = 1 << 30
_SHOWN = 40
_SKIPPED = ("lr_scheduler.", "dataloader.", "optimizer.param_groups.")
"""torchtitan's keys of what the configuration sets here, and of its own data order."""
_STEP, _TOKENS = "train_state.step", "train_state.ntokens_seen"
_COUNT = "step"


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """Summary of a conversion."""

    where: str
    step: int
    num_tensors: int
    model_only: bool
    skipped: tuple[str, ...]
    """Prefixes of keys that are not converted."""


def convert_from_dcp(
    source: DcpFolder,
    storage: Storage,
    spec: ModelSpec,
    *,
    run_config: Mapping[str, Any],
    file_bytes: int = _FILE_BYTES,
) -> ConversionResult:
    """Write `source` as a checkpoint of `spec`'s model into `storage`, under its own step (0 if it
    has none). Without optimizer state the result is model-only.

    Raises CheckpointError before anything is written, listing all model dimensions that differ, or
    all unexpected, missing and misshapen keys, and if the step already exists; DamagedCheckpoint
    for files that contradict their metadata.
    """
    _check_dims(source, spec, run_config)
    matches, skipped = _matches(source, spec)
    step, tokens = _progress(source)
    if step in storage.steps():
        raise CheckpointError(
            f"{storage.root}/{step_name(step)} already exists. Delete it, or use another folder."
        )
    token = secrets.token_hex(6)
    try:
        batches = enumerate(_batches(source, matches, file_bytes))
        parts = [_write(storage, step, token, number, batch) for number, batch in batches]
        # Training can resume only with optimizer state.
        model_only = not any(match.name.startswith("optimizer.") for match in matches.values())
        base = {
            "mesh": asdict(ParallelDims()),
            "config": dict(run_config),
            "versions": {"torchtitan_lite": __version__, "torch": torch.__version__},
            "values": {} if model_only else {"train_state": {"step": step, "tokens": tokens}},
            "model_only": model_only,
        }
        attempts.commit(storage, step, token, parts, base)
    except BaseException:
        attempts.abandon(storage, step, token)
        raise
    return ConversionResult(
        where=f"{storage.root}/{step_name(step)}",
        step=step,
        num_tensors=len(matches),
        model_only=model_only,
        skipped=skipped,
    )


def _check_dims(source: DcpFolder, spec: ModelSpec, run_config: Mapping[str, Any]) -> None:
    """Compare model dimensions: shapes do not determine the number of heads or the RoPE scaling."""
    exported = model_dims({"model": source.exported_model()})
    if differing := differing_dims(exported, model_dims(run_config)):
        raise CheckpointError(
            f"{source.path} has other model dimensions than {spec.name} {spec.flavor}: "
            f"{'; '.join(differing)}. Pass the configuration of its model with --config, "
            "--model.name and --model.flavor."
        )


def _matches(source: DcpFolder, spec: ModelSpec) -> tuple[dict[str, KeyMatch], tuple[str, ...]]:
    """Return DCP key -> match, and the prefixes of the keys that are not converted."""
    keys, tied = KeyMap(spec), tied_weight_names(spec)
    parameters, buffers = expected_shapes(spec)
    wanted = parameters | buffers
    matches: dict[str, KeyMatch] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    problems: list[str] = []
    skipped: list[str] = []
    for key in (*source.contents.tensors, *source.contents.objects):
        if key in (_STEP, _TOKENS):
            continue
        start = next((start for start in _SKIPPED if key.startswith(start)), None)
        if start is not None:
            skipped.append(start.rstrip("."))
            continue
        match = keys.from_torchtitan(key) if key in source.contents.tensors else None
        if match is None:
            problems.append(f"{key} is unexpected")
            continue
        about = source.contents.tensors[key]
        if about.dtype not in DTYPE_NAMES:
            problems.append(f"{key}: safetensors does not support {about.dtype}")
        if tied is not None and match.parameter == tied[1]:
            if match.name.startswith("model."):
                _check_tied(source, key, keys, tied[0])
                continue
            match = match.of(tied[0])
        if match.parameter not in wanted:
            problems.append(f"{key} is unexpected")
            continue
        if match.name in shapes:
            problems.append(f"{key} is stored twice, under different names")
        matches[key], shapes[match.name] = match, about.shape
    problems += shape_mismatches(
        {f"model.{n}": s for n, s in wanted.items()}, _only(shapes, "model.")
    )
    problems += shape_mismatches(_slots(shapes, parameters), _only(shapes, "optimizer."))
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"{source.path} does not fit {spec.name} {spec.flavor} ({len(problems)} problems): "
            + "; ".join(problems[:_SHOWN])
            + f"{more}. Pass the configuration of its model with --config, --model.name and "
            "--model.flavor."
        )
    return matches, tuple(dict.fromkeys(skipped))


def _slots(
    shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the expected optimizer state: all parameters have the slots that any of them has."""
    slots = {name.rpartition(".")[2] for name in _only(shapes, "optimizer.")}
    return {
        f"optimizer.{name}.{slot}": () if slot == _COUNT else shape
        for name, shape in parameters.items()
        for slot in sorted(slots)
    }


def _only(shapes: Mapping[str, tuple[int, ...]], start: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if name.startswith(start)}


def _check_tied(source: DcpFolder, key: str, keys: KeyMap, first: str) -> None:
    """Check that a tied weight, which DCP stores twice, is equal in both places."""
    for other in source.contents.tensors:
        match = keys.from_torchtitan(other)
        if match is None or match.name != f"model.{first}":
            continue
        if not torch.equal(source.tensor(key), source.tensor(other)):
            raise CheckpointError(
                f"{source.path}: {key} and {other} differ, and the model of the configuration has "
                "one weight for both. Pass the configuration of a model without tied embeddings."
            )


def _progress(source: DcpFolder) -> tuple[int, int]:
    """Return the step and the number of tokens; 0 if not recorded."""
    progress = []
    for key in (_STEP, _TOKENS):
        value: Any = 0
        if key in source.contents.objects:
            value = source.value(key)
        elif key in source.contents.tensors:
            value = source.tensor(key).item()
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise DamagedCheckpoint(f"{source.path} is damaged: {key} is {value!r:.100}.")
        progress.append(value)
    return progress[0], progress[1]


def _batches(
    source: DcpFolder, matches: Mapping[str, KeyMatch], file_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each file by name."""
    batch: dict[str, torch.Tensor] = {}
    size = 0
    for key, match in matches.items():
        tensor = source.tensor(key)
        if match.rope_heads and tensor.ndim:
            tensor = halves_from_pairs(tensor, match.rope_heads).contiguous()
        batch[match.name] = tensor
        size += tensor.nbytes
        if size >= file_bytes:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def _write(
    storage: Storage, step: int, token: str, number: int, batch: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Write one file, and announce its part of the manifest, which is returned."""
    file = tensor_file_name(number)
    boxes, views = [], []
    for name, tensor in batch.items():
        size = tuple(tensor.shape)
        boxes.append(PartBox(name, DTYPE_NAMES[tensor.dtype], size, 0, tensor.nbytes))
        views.append(tensor_bytes(tensor))
    written = storage.write(step, token, file, boxes, views)
    part = unsharded_part(step, number, file, boxes, written)
    return attempts.put_part(storage, step, token, number, part)
