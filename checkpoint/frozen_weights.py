"""Loading the frozen weights under adapters (LoRA)."""

from collections.abc import Mapping
from typing import Any

import torch

from torchtitan_lite.checkpoint.adapters import FrozenBase, MergedSnapshot, recorded_base
from torchtitan_lite.checkpoint.loading import load, open_snapshot
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot
from torchtitan_lite.checkpoint.storage.base import open_parent_storage
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.core.log import logger, warn_on_rank_0
from torchtitan_lite.core.urls import local_path
from torchtitan_lite.distributed.host_collectives import broadcast_bytes
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.on_all_ranks import run_on_all_ranks
from torchtitan_lite.nn.spec import ModelSpec, differing_dims


def load_base(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    mesh: Mesh,
    *,
    dims: Mapping[str, Any],
    scale: float,
) -> FrozenBase:
    """Load the frozen weights `tensors`, this rank's, from a checkpoint or Hugging Face folder of
    `spec`, whose dimensions are recorded as `dims`. Every rank must call it. Raises CheckpointError
    as `loading.load` does."""
    storage, name = open_parent_storage(path)
    try:
        snapshot = run_on_all_ranks(
            lambda: open_snapshot(storage, name, spec, num_ranks=mesh.world_size)
        )
        if differing := differing_dims(snapshot.saved.dims, dims):
            warn_on_rank_0(
                "%s has other model dimensions than [model], which are used: %s.",
                snapshot.where,
                "; ".join(differing),
            )
        load(snapshot, tensors, {"model"}, mesh)
        actual = run_on_all_ranks(lambda: snapshot.fingerprint() if mesh.is_leader else "")
    finally:
        storage.close()
    fingerprint = broadcast_bytes(actual.encode()).decode()
    logger.info("Frozen weights loaded from %s (fingerprint %s)", snapshot.where, fingerprint)
    return FrozenBase(path=_absolute(path), fingerprint=fingerprint, scale=scale)


def open_merged(
    adapters: StoredSnapshot, spec: ModelSpec, base_path: str | None
) -> "MergedSnapshot":
    """Open a checkpoint of adapters of `spec` as merged weights. `base_path` is where the frozen
    weights are now, by default where they were. Raises CheckpointError if they are missing or
    others."""
    recorded = recorded_base(adapters)
    assert recorded is not None
    path = base_path or recorded.path
    storage, name = open_parent_storage(path)
    try:
        base = open_snapshot(storage, name, spec)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"{adapters.where} holds adapters of the weights in {path}, which cannot be opened: "
            f"{error} If they were moved, merge them where they are: torchtitan-lite convert to-hf "
            f"{adapters.where} OUT_DIR --merge --base DIR."
        ) from None
    if (fingerprint := base.fingerprint()) != recorded.fingerprint:
        raise CheckpointError(
            f"{adapters.where} holds adapters of the weights that were in {recorded.path} "
            f"(fingerprint {recorded.fingerprint}), and {path} holds others ({fingerprint})."
        )
    return MergedSnapshot(base, adapters, recorded.scale)


def _absolute(path: str) -> str:
    folder = local_path(path)
    return path if folder is None else str(folder.expanduser().absolute())
