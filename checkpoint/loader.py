"""Fills live state from a snapshot that lies on any mesh. Layer: above snapshots.

Each saved byte is read once, by one rank, which verifies it: into its own live memory, where that
is all that is wanted; else the planner's exchange brings it to the ranks that need it. Only some
tensors are under way at a time, so that little memory is needed beside the state.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod

import torch

from torchtitan_lite.checkpoint.agreement import agree
from torchtitan_lite.checkpoint.damage import is_damage
from torchtitan_lite.checkpoint.inventory import local_parts, put_back
from torchtitan_lite.checkpoint.snapshots import Snapshot
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.redistribute import Layout, Placed, describe
from torchtitan_lite.redistribute.acting import Taking, choose_actors, take
from torchtitan_lite.redistribute.holder_mesh import Holder

_BATCH_BYTES = 32 << 20
"""Of a batch, per rank."""
_SHOWN = 20
_MOST_READERS = 8


def load(
    snapshot: Snapshot, tensors: Mapping[str, torch.Tensor], parts: set[str], mesh: Mesh
) -> None:
    """Give `tensors`, this rank's of those `parts`, the values of `snapshot`; the dtype is
    converted where it differs. Every rank must call it.

    Raises, on all ranks, CheckpointError that lists every tensor that is missing, extra or
    misshapen, before anything is changed; and with some tensors changed already, DamagedCheckpoint
    where a part is not what was saved, and CheckpointError where it cannot be read now.
    """
    wanted = describe({name: mesh.placed(tensor) for name, tensor in tensors.items()})
    _check_fit(snapshot, wanted, parts)
    lives = local_parts(tensors)
    takings = _takings(snapshot, wanted, mesh)
    stay = {name: taking for name, taking in takings.items() if taking.stays}
    move = {name: taking for name, taking in takings.items() if name not in stay}
    with ThreadPoolExecutor(_num_readers(), "checkpoint-reader") as readers:
        _read_own(snapshot, stay, lives, mesh, readers)
        _exchange(snapshot, move, lives, mesh, readers)
    put_back(tensors, lives)


def _num_readers() -> int:
    """As many as find a core, since each computes checksums."""
    here = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(here, _MOST_READERS))


def _read_own(
    snapshot: Snapshot,
    takings: Mapping[str, Taking],
    lives: Mapping[str, torch.Tensor],
    mesh: Mesh,
    readers: ThreadPoolExecutor,
) -> None:
    """Read what each rank wants just as one holder has it, which is the whole state where the mesh
    is the one that saved: into the live memory, and nothing travels."""

    @torch.no_grad()
    def read(names: Sequence[str]) -> None:
        for name in names:
            live, taking = lives[name], takings[name]
            holder = next(h for h, actor in taking.actors.items() if actor == mesh.rank)
            if _takes(live, taking.dtype):
                snapshot.read_part(name, holder, live)
            else:
                beside = torch.empty(live.shape, dtype=taking.dtype)
                snapshot.read_part(name, holder, beside)
                live.copy_(beside)

    own = {name: taking for name, taking in takings.items() if mesh.rank in taking.actors.values()}
    # Many at a time, since handing over to a thread costs as much as reading a small one.
    reading = [readers.submit(read, names) for names in _batches(own, 1)]
    agree(_worst(error for future in reading if (error := future.exception())))


def _exchange(
    snapshot: Snapshot,
    takings: Mapping[str, Taking],
    lives: Mapping[str, torch.Tensor],
    mesh: Mesh,
    readers: ThreadPoolExecutor,
) -> None:
    """Read the rest, and bring it to those who want it, some tensors at a time."""

    def read(batch: Sequence[str]) -> list[dict[Holder, Future[torch.Tensor]]]:
        return [
            {
                holder: readers.submit(snapshot.part, name, holder)
                for holder, actor in takings[name].actors.items()
                if actor == mesh.rank
            }
            for name in batch
        ]

    batches = list(_batches(takings, mesh.world_size))
    reading = read(batches[0]) if batches else []
    for number, batch in enumerate(batches):
        parts = [part for read in reading for part in read.values()]
        agree(_worst(error for part in parts if (error := part.exception())))
        given = [{holder: one.result() for holder, one in read.items()} for read in reading]
        # The next is read and verified while this one travels.
        reading = read(batches[number + 1]) if number + 1 < len(batches) else []
        _fill([takings[name] for name in batch], given, [lives.get(name) for name in batch])


def _worst(errors: Iterable[BaseException]) -> BaseException | None:
    """One that is no damage, if there is such."""
    return min(errors, key=is_damage, default=None)


def _takes(live: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether what was saved can be read straight into memory of this rank."""
    return live.device.type == "cpu" and live.dtype == dtype


def _check_fit(snapshot: Snapshot, wanted: Mapping[str, Placed], parts: set[str]) -> None:
    saved = {
        name: placed for name, placed in snapshot.tensors.items() if name.split(".", 1)[0] in parts
    }
    problems = [f"{name} is not in it" for name in sorted(wanted.keys() - saved.keys())]
    problems += [f"{name} has no place here" for name in sorted(saved.keys() - wanted.keys())]
    problems += [
        f"{name} has shape {list(saved[name].shape)} in it, and {list(placed.shape)} here"
        for name, placed in wanted.items()
        if name in saved and saved[name].shape != placed.shape
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"{snapshot.where} does not fit this run ({len(problems)} tensors): "
            + "; ".join(problems[:_SHOWN])
            + f"{more}. Use the [model] and [optimizer] sections that it was saved with (`config` "
            "in its manifest.json), or name in checkpoint.exclude_from_loading what shall not be "
            "loaded."
        )


def _takings(snapshot: Snapshot, wanted: Mapping[str, Placed], mesh: Mesh) -> dict[str, Taking]:
    everyone = range(mesh.world_size)
    found: dict[str, Taking] = {}
    chosen: dict[tuple[Layout, Layout, int], dict[Holder, int]] = {}
    for number, (name, placed) in enumerate(wanted.items()):
        saved = snapshot.tensors[name]
        # Many tensors lie alike.
        turn = number % mesh.world_size
        alike = (saved.layout, placed.layout, turn)
        if alike not in chosen:
            reach = {
                holder: everyone if able is None else able
                for holder, able in (
                    (holder, snapshot.reach(holder)) for holder in saved.layout.mesh.holders
                )
            }
            # The holders of another stage are not asked first.
            ranks = [rank for rank in placed.layout.mesh.holders if isinstance(rank, int)]
            chosen[alike] = choose_actors(saved.layout, ranks, turn, reach)
        found[name] = Taking(saved.layout, placed.layout, saved.shape, saved.dtype, chosen[alike])
    return found


def _batches(takings: Mapping[str, Taking], world_size: int) -> Iterator[list[str]]:
    """Names of tensors that are so many bytes together, over all ranks."""
    batch: list[str] = []
    size = 0
    for name, taking in takings.items():
        batch.append(name)
        size += prod(taking.shape) * taking.dtype.itemsize
        if size >= _BATCH_BYTES * world_size:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@torch.no_grad()
def _fill(
    takings: Sequence[Taking],
    given: Sequence[Mapping[Holder, torch.Tensor]],
    lives: Sequence[torch.Tensor | None],
) -> None:
    """Into the live memory where that can be: on the CPU and of the saved dtype."""
    outs = []
    for taking, live in zip(takings, lives, strict=True):
        beside = live is not None and not _takes(live, taking.dtype)
        outs.append(
            torch.empty(live.shape, dtype=taking.dtype) if live is not None and beside else live
        )
    take(takings, given, outs)
    for out, live in zip(outs, lives, strict=True):
        if live is not None and out is not None and out is not live:
            live.copy_(out)
