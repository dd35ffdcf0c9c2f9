"""Conversion to torchtitan's DCP checkpoints.

DCP plans the files from meta tensors; each tensor is assembled when it is written.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from torchtitan_lite.checkpoint.convert.conversion import tied_weight_names
from torchtitan_lite.checkpoint.convert.dcp.dcp_folder import METADATA, MODEL
from torchtitan_lite.checkpoint.convert.dcp.keys import KeyMap, Release, pairs_from_halves
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot, model_dims, read_tensor
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.nn.spec import ModelSpec


@dataclass(frozen=True)
class _TensorSource:
    """Source of an exported tensor."""

    name: str
    rope_heads: int


def convert_to_dcp(
    source: StoredSnapshot,
    folder: Path,
    spec: ModelSpec,
    *,
    release: Release,
    param_group: Mapping[str, Any],
) -> int:
    """Write `source` into `folder` in the format of torchtitan's `release`, and return the number
    of tensors. `param_group` has the optimizer settings to record per parameter; used if the
    checkpoint has optimizer state.

    Raises CheckpointError if the folder holds a DCP checkpoint, or the checkpoint has tensors that
    the model does not; DamagedCheckpoint if a checksum does not match.
    """
    if (folder / METADATA).exists():
        raise CheckpointError(
            f"{folder} holds a DCP checkpoint. Specify another folder, or delete it."
        )
    keys, tied = KeyMap(spec), tied_weight_names(spec)
    sources: dict[str, _TensorSource] = {}
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    for name, placed in source.tensors.items():
        stands_for = torch.empty(placed.shape, dtype=placed.dtype, device="meta")
        for used in (name, *_copies(name, tied)):
            key, rope_heads = keys.to_torchtitan(used, release)
            sources[key] = _TensorSource(name, rope_heads)
            part, part_key = (model, key)
            if key.startswith("optimizer."):
                part, part_key = (optimizer, key.removeprefix("optimizer."))
            part[part_key] = stands_for
    parameters = {key.split(".", 1)[1].rpartition(".")[0] for key in optimizer}
    for parameter in sorted(parameters):
        for option, value in param_group.items():
            optimizer[f"param_groups.{parameter}.{option}"] = value
    state: dict[str, Any] = dict(model)
    saved = source.saved
    if not saved.model_only:
        progress = saved.values.get("train_state", {})
        state["optimizer"] = optimizer
        state["lr_scheduler"] = {"last_epoch": saved.step}
        state["train_state"] = {"step": saved.step, "ntokens_seen": progress.get("tokens", 0)}
    writer = FileSystemWriter(folder)
    with warnings.catch_warnings():
        # Saving from a single process is intended.
        warnings.simplefilter("ignore", UserWarning)
        save(state, storage_writer=writer, planner=_Planner(source, sources), no_dist=True)
    dims = model_dims(source.manifest.config)
    model = {"name": spec.name, "flavor": spec.flavor, "dims": dims}
    (folder / MODEL).write_text(json.dumps(model, indent=2) + "\n", encoding="utf-8")
    return len(sources)


def _copies(name: str, tied: tuple[str, str] | None) -> tuple[str, ...]:
    """Return the second name of a tied weight; its optimizer state has one name."""
    return (f"model.{tied[1]}",) if tied is not None and name == f"model.{tied[0]}" else ()


class _Planner(DefaultSavePlanner):
    """Save planner that assembles a tensor when it is written."""

    def __init__(self, source: StoredSnapshot, sources: Mapping[str, _TensorSource]) -> None:
        super().__init__()
        self._source, self._sources = source, sources

    def resolve_data(self, write_item: WriteItem) -> Any:
        wanted = self._sources.get(write_item.index.fqn)
        if wanted is None:
            return super().resolve_data(write_item)
        tensor = read_tensor(self._source, wanted.name)
        if wanted.rope_heads and tensor.ndim:
            tensor = pairs_from_halves(tensor, wanted.rope_heads).contiguous()
        return tensor
