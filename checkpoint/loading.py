"""Opening a saved state, and loading it into live tensors on any mesh.

Each saved byte is read and verified once, by one rank: directly into its own live memory if no
other rank needs it, or else sent to the ranks that do by a planned exchange. Tensors are processed
in batches, which bounds the extra memory.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.convert.hugging_face.folder import (
    HuggingFaceFolder,
    is_hugging_face,
)
from torchtitan_lite.checkpoint.convert.hugging_face.snapshot import HuggingFaceSnapshot
from torchtitan_lite.checkpoint.format import MANIFEST
from torchtitan_lite.checkpoint.snapshots import Snapshot, StoredSnapshot, WeightsSnapshot
from torchtitan_lite.checkpoint.storage.base import Storage, exists
from torchtitan_lite.checkpoint.tensors import copy_back, local_tensors
from torchtitan_lite.core.errors import CheckpointError, is_permanent
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.on_all_ranks import raise_on_all_ranks
from torchtitan_lite.distributed.redistribute import Layout, TensorSpec, gather_specs
from torchtitan_lite.distributed.redistribute.execution.read_plan import (
    ReadPlan,
    assign_readers,
    distribute_reads,
)
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.nn.lora import LORA_A
from torchtitan_lite.nn.spec import ModelSpec

_BATCH_BYTES = 32 << 20
"""Bytes per batch and rank."""
_SHOWN = 20
_MOST_READERS = 8
_DCP = ".metadata"


def open_snapshot(
    storage: Storage, name: str, spec: ModelSpec | None, *, num_ranks: int = 1
) -> WeightsSnapshot:
    """Open a checkpoint, or a Hugging Face folder of `spec`'s model, of which `num_ranks` ranks
    each read a part.

    Raises CheckpointError for a folder of another format, with the command that converts it, and
    DamagedCheckpoint if it is incomplete.
    """
    is_ours = exists(storage, f"{name}/{MANIFEST}")
    if spec is not None and not is_ours and is_hugging_face(storage, name):
        return HuggingFaceSnapshot(HuggingFaceFolder(storage, name), spec, num_blocks=num_ranks)
    reject_external(storage, name)
    return StoredSnapshot(storage, name)


def load(
    snapshot: Snapshot, tensors: Mapping[str, torch.Tensor], parts: set[str], mesh: Mesh
) -> None:
    """Load the values of `snapshot` into `tensors`, this rank's tensors of `parts`, converting
    dtypes where they differ. Every rank must call it.

    Raises on all ranks: CheckpointError that lists all missing, unexpected and misshapen tensors
    before anything is changed; with some tensors overwritten, DamagedCheckpoint for a failed
    checksum and CheckpointError for a transient read error.
    """
    wanted = gather_specs({name: mesh.to_dtensor(tensor) for name, tensor in tensors.items()})
    _check_fit(snapshot, wanted, parts)
    _load(snapshot, wanted, tensors)


def load_some(snapshot: Snapshot, tensors: Mapping[str, DTensor]) -> None:
    """Load some tensors of `snapshot`, which have its names and shapes, on any mesh of all ranks,
    as `load` does. Every rank must call it."""
    _load(snapshot, gather_specs(tensors), tensors)


def reject_external(storage: Storage, folder: str) -> None:
    """Raise CheckpointError, with the command that converts it, if `folder` is an external
    checkpoint: torch DCP, or Hugging Face where a checkpoint of torchtitan_lite is needed."""
    if exists(storage, f"{folder}/{MANIFEST}"):
        return
    where = f"{storage.root}/{folder}"
    if exists(storage, f"{folder}/{_DCP}"):
        raise CheckpointError(
            f"{where} is a torch DCP checkpoint, as written by torchtitan. Convert it: "
            f"torchtitan-lite convert from-dcp {where} OUT_DIR --config CONFIG; then set "
            "checkpoint.initial_load_path to the step's folder in OUT_DIR."
        )
    if is_hugging_face(storage, folder):
        raise CheckpointError(
            f"{where} is a Hugging Face folder, but a torchtitan_lite checkpoint is required. "
            f"Convert it: torchtitan-lite convert from-hf {where} OUT_DIR."
        )


def _load(
    snapshot: Snapshot, wanted: Mapping[str, TensorSpec], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Load `wanted`, the tensors of all ranks, of which `tensors` are this rank's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local = local_tensors(tensors)
    plans = _read_plans(snapshot, wanted, world_size)
    stay = {name: plan for name, plan in plans.items() if plan.stays}
    move = {name: plan for name, plan in plans.items() if name not in stay}
    with ThreadPoolExecutor(_num_readers(), "checkpoint-reader") as readers:
        _read_own(snapshot, stay, local, rank, readers)
        _exchange(snapshot, move, local, rank, world_size, readers)
    copy_back(tensors, local)


def _num_readers() -> int:
    """One reader per free core, because each computes checksums."""
    here = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(here, _MOST_READERS))


def _read_own(
    snapshot: Snapshot,
    plans: Mapping[str, ReadPlan],
    local: Mapping[str, torch.Tensor],
    rank: int,
    readers: ThreadPoolExecutor,
) -> None:
    """Read tensors that one holder stores exactly as this rank needs them into live memory, without
    communication. On the mesh that saved, these are all tensors."""

    @torch.no_grad()
    def read(names: Sequence[str]) -> None:
        for name in names:
            live, plan = local[name], plans[name]
            holder = next(h for h, reader in plan.readers.items() if reader == rank)
            if _can_read_into(live, plan.dtype):
                snapshot.read_part(name, holder, live)
            else:
                staging = torch.empty(live.shape, dtype=plan.dtype)
                snapshot.read_part(name, holder, staging)
                live.copy_(staging)

    own = {name: plan for name, plan in plans.items() if rank in plan.readers.values()}
    # Batched, because a thread handover costs as much as reading a small tensor.
    reading = [readers.submit(read, names) for names in _batches(own, 1)]
    raise_on_all_ranks(_most_severe(error for future in reading if (error := future.exception())))


def _exchange(
    snapshot: Snapshot,
    plans: Mapping[str, ReadPlan],
    local: Mapping[str, torch.Tensor],
    rank: int,
    world_size: int,
    readers: ThreadPoolExecutor,
) -> None:
    """Read the remaining tensors and exchange them between ranks, batch by batch."""

    def read(batch: Sequence[str]) -> list[dict[Holder, Future[torch.Tensor]]]:
        return [
            {
                holder: readers.submit(snapshot.part, name, holder)
                for holder, reader in plans[name].readers.items()
                if reader == rank
            }
            for name in batch
        ]

    batches = list(_batches(plans, world_size))
    reading = read(batches[0]) if batches else []
    for number, batch in enumerate(batches):
        parts = [part for read in reading for part in read.values()]
        raise_on_all_ranks(_most_severe(error for part in parts if (error := part.exception())))
        sources = [{holder: future.result() for holder, future in read.items()} for read in reading]
        # Read and verify the next batch while this one is exchanged.
        reading = read(batches[number + 1]) if number + 1 < len(batches) else []
        _fill([plans[name] for name in batch], sources, [local.get(name) for name in batch])


def _most_severe(errors: Iterable[BaseException]) -> BaseException | None:
    """Return an error that is not permanent, if there is one."""
    return min(errors, key=is_permanent, default=None)


def _can_read_into(live: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether saved bytes can be read directly into `live`."""
    return live.device.type == "cpu" and live.dtype == dtype


def _check_fit(snapshot: Snapshot, wanted: Mapping[str, TensorSpec], parts: set[str]) -> None:
    saved = {
        name: placed for name, placed in snapshot.tensors.items() if name.split(".", 1)[0] in parts
    }
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - saved.keys())]
    problems += [f"{name} is unexpected" for name in sorted(saved.keys() - wanted.keys())]
    problems += [
        f"{name} has shape {list(saved[name].shape)}; expected {list(placed.shape)}"
        for name, placed in wanted.items()
        if name in saved and saved[name].shape != placed.shape
    ]
    adapters = [name for name in saved.keys() - wanted.keys() if name.endswith(f".{LORA_A}")]
    if adapters and not any(name.endswith(f".{LORA_A}") for name in wanted):
        raise CheckpointError(
            f"{snapshot.where} holds adapters alone, without the weights that they belong to. "
            f"Merge both, torchtitan-lite convert to-hf {snapshot.where} OUT_DIR --merge, and load "
            "OUT_DIR."
        )
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"{snapshot.where} does not fit this run ({len(problems)} tensors): "
            + "; ".join(problems[:_SHOWN])
            + f"{more}. Use the [model] and [optimizer] sections that it was saved with (`config` "
            "in its manifest.json), or list parts to skip in checkpoint.exclude_from_loading."
        )


def _read_plans(
    snapshot: Snapshot, wanted: Mapping[str, TensorSpec], world_size: int
) -> dict[str, ReadPlan]:
    everyone = range(world_size)
    read_plans: dict[str, ReadPlan] = {}
    chosen: dict[tuple[Layout, Layout, int], dict[Holder, int]] = {}
    for number, (name, placed) in enumerate(wanted.items()):
        saved = snapshot.tensors[name]
        # Many tensors share their layouts.
        turn = number % world_size
        key = (saved.layout, placed.layout, turn)
        if key not in chosen:
            reach = {
                holder: everyone if able is None else able
                for holder, able in (
                    (holder, snapshot.reach(holder)) for holder in saved.layout.mesh.holders
                )
            }
            # Prefer readers of the tensor's own pipeline stage.
            ranks = [rank for rank in placed.layout.mesh.holders if isinstance(rank, int)]
            chosen[key] = assign_readers(saved.layout, ranks, turn, reach)
        read_plans[name] = ReadPlan(
            saved.layout, placed.layout, saved.shape, saved.dtype, chosen[key]
        )
    return read_plans


def _batches(plans: Mapping[str, ReadPlan], world_size: int) -> Iterator[list[str]]:
    """Yield names of tensors of about `_BATCH_BYTES` per rank."""
    batch: list[str] = []
    size = 0
    for name, plan in plans.items():
        batch.append(name)
        size += prod(plan.shape) * plan.dtype.itemsize
        if size >= _BATCH_BYTES * world_size:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@torch.no_grad()
def _fill(
    plans: Sequence[ReadPlan],
    sources: Sequence[Mapping[Holder, torch.Tensor]],
    local: Sequence[torch.Tensor | None],
) -> None:
    """Exchange a batch, directly into live memory if it is on the CPU and of the saved dtype."""
    outs = []
    for plan, live in zip(plans, local, strict=True):
        staging = live is not None and not _can_read_into(live, plan.dtype)
        outs.append(
            torch.empty(live.shape, dtype=plan.dtype) if live is not None and staging else live
        )
    distribute_reads(plans, sources, outs)
    for out, live in zip(outs, local, strict=True):
        if live is not None and out is not None and out is not live:
            live.copy_(out)
