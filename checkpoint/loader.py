"""Fills live state from a snapshot that lies on any mesh. Layer: above snapshots.

Each saved byte is read once, by one rank, which verifies it; the planner's exchange brings it to
the ranks that need it. Only some tensors are under way at a time, so that little memory is needed
beside the state.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.inventory import local_parts
from torchtitan_lite.checkpoint.snapshots import Snapshot
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint, UserError
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.messages import gather_texts
from torchtitan_lite.redistribute import Placed, describe
from torchtitan_lite.redistribute.acting import Taking, choose_actors, take
from torchtitan_lite.redistribute.holder_mesh import Holder

_BATCH_BYTES = 32 << 20
"""Of a batch, per rank."""
_SHOWN = 20


def load(
    snapshot: Snapshot, tensors: Mapping[str, torch.Tensor], parts: set[str], mesh: Mesh
) -> None:
    """Give `tensors`, this rank's of those `parts`, the values of `snapshot`; the dtype is
    converted where it differs. Every rank must call it.

    Raises, on all ranks, CheckpointError that lists every tensor that is missing, extra or
    misshapen, before anything is changed; and DamagedCheckpoint where a part is not what was saved,
    with some tensors changed already.
    """
    wanted = describe({name: mesh.placed(tensor) for name, tensor in tensors.items()})
    _check_fit(snapshot, wanted, parts)
    lives = local_parts(tensors, mesh)
    takings = _takings(snapshot, wanted, mesh)
    batches = list(_batches(takings, mesh.world_size))

    def read(batch: Sequence[str]) -> list[dict[Holder, torch.Tensor]]:
        return [
            {
                holder: snapshot.part(name, holder)
                for holder, actor in takings[name].actors.items()
                if actor == mesh.rank
            }
            for name in batch
        ]

    with ThreadPoolExecutor(1, "checkpoint-reader") as reader:
        reading = [reader.submit(read, batch) for batch in batches[:1]]
        for number, batch in enumerate(batches):
            problem, given = "", []
            try:
                given = reading[number].result()
            except Exception as error:
                # Whatever it is, all ranks must come to know of it.
                problem = str(error) if isinstance(error, UserError) else repr(error)
            problems = [text.decode() for text in gather_texts(problem.encode()) if text]
            if problems:
                raise DamagedCheckpoint(" ".join(problems))
            if number + 1 < len(batches):
                # The next is read and verified while this one travels.
                reading.append(reader.submit(read, batches[number + 1]))
            _fill([takings[name] for name in batch], given, [lives.get(name) for name in batch])
    with torch.no_grad():
        for name, tensor in tensors.items():
            # Memory that is not contiguous, or on another device than the mesh, was filled beside
            # it.
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if own.data_ptr() != lives[name].data_ptr():
                own.copy_(lives[name])


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
    found = {}
    for number, (name, placed) in enumerate(wanted.items()):
        saved = snapshot.tensors[name]
        holders = saved.layout.mesh.holders
        reach = {
            holder: everyone if able is None else able
            for holder, able in ((holder, snapshot.reach(holder)) for holder in holders)
        }
        # The holders of another stage are not asked first.
        ranks = [rank for rank in placed.layout.mesh.holders if isinstance(rank, int)]
        actors = choose_actors(saved.layout, ranks, number, reach)
        found[name] = Taking(saved.layout, placed.layout, saved.shape, saved.dtype, actors)
    return found


def _batches(takings: Mapping[str, Taking], world_size: int) -> Iterator[list[str]]:
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
        direct = live is None or (live.device.type == "cpu" and live.dtype == taking.dtype)
        outs.append(live if direct or live is None else torch.empty(live.shape, dtype=taking.dtype))
    take(takings, given, outs)
    for out, live in zip(outs, lives, strict=True):
        if live is not None and out is not None and out is not live:
            live.copy_(out)
