"""State held by files, or by the shared memory of processes that ended.

For reads, each such holder is assigned to a rank, which opens it and sends its data in the holder's
place. For writes, each element gets one writer among its replicas.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from torchtitan_lite.core.errors import LayoutError
from torchtitan_lite.distributed.redistribute.execution.execute import (
    FusedExchange,
    process_group_of,
)
from torchtitan_lite.distributed.redistribute.execution.program import TensorTask, raw_itemsize
from torchtitan_lite.distributed.redistribute.planning.cost import DEFAULT_OPTIONS, ExchangeOptions
from torchtitan_lite.distributed.redistribute.planning.intersections import Intersections
from torchtitan_lite.distributed.redistribute.planning.layout import Layout
from torchtitan_lite.distributed.redistribute.planning.placements import Holder, HolderMesh
from torchtitan_lite.distributed.redistribute.planning.plan import plan
from torchtitan_lite.distributed.torch_compat import is_strided_shard

_ROWS_TO_SHARE = 8
"""Minimum rows per holder of a shared shard, so that shares differ little."""


@dataclass(frozen=True)
class ReadPlan:
    """A tensor that is read from holders that are not ranks."""

    src: Layout
    dst: Layout
    """Destination on ranks."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    readers: Mapping[Holder, int]
    """Reader of each holder of `src`."""

    @property
    def stays(self) -> bool:
        """Whether each rank reads one holder, whose shard is its own shard of `dst`."""
        return _stays(self.src, self.dst, tuple(self.readers[h] for h in self.src.mesh.holders))

    @property
    def dst_ranks(self) -> list[int]:
        return [holder for holder in self.dst.mesh.holders if isinstance(holder, int)]

    def __post_init__(self) -> None:
        missing = [holder for holder in self.src.mesh.holders if holder not in self.readers]
        if missing:
            raise LayoutError(f"No rank acts for {missing[0]!r} of {self.src}.")
        if self.src.reduce_op or self.dst.reduce_op:
            raise LayoutError(f"Contributions cannot be taken out of files: {self.src}.")


def assign_readers(
    src: Layout,
    ranks: Sequence[int],
    index: int,
    reachable_by: Mapping[Holder, Sequence[int]] | None = None,
) -> dict[Holder, int]:
    """Assign a reader to each holder of a tensor: the k-th of `ranks` to the k-th if there are
    equally many; else spread evenly, starting elsewhere for each `index` of a tensor, so that many
    tensors keep all ranks busy. `reachable_by` returns the ranks that can open a holder, by
    default all. Raises LayoutError for a holder that no rank can open."""
    holders = src.mesh.holders
    readers: dict[Holder, int] = {}
    for place, holder in enumerate(holders):
        position = place * len(ranks) // len(holders)
        if len(holders) < len(ranks):
            position += index % (len(ranks) // len(holders))
        wanted = ranks[position]
        able = ranks if reachable_by is None else reachable_by.get(holder, ())
        if not able:
            raise LayoutError(f"{holder!r} of {src} is not accessible from any rank.")
        readers[holder] = wanted if wanted in able else able[(place + index) % len(able)]
    return readers


class HeldBlock(NamedTuple):
    """A block of a destination's shard, and where it is in the shards of its holders."""

    holders: tuple[Holder, ...]
    """Replicas."""
    source: tuple[slice, ...]
    target: tuple[slice, ...]


@lru_cache(maxsize=16384)
def held_blocks(
    src: Layout, dst: Layout, shape: tuple[int, ...], holder: Holder
) -> tuple[HeldBlock, ...]:
    """Return the blocks of `holder`'s shard in `dst`, for a reader that copies each by itself from
    one of its holders in `src`. Raises LayoutError if a layout does not fit the shape."""
    src, dst = src.with_num_dims(len(shape)), dst.with_num_dims(len(shape))
    parts = Intersections(src, dst, shape)
    position = parts.dst.position(holder)
    if position is None:
        return ()
    return tuple(
        HeldBlock(
            tuple(parts.src.holders(intersection.src_part)),
            tuple(slice(start, start + length) for start, _, length in ranges),
            tuple(slice(start, start + length) for _, start, length in ranges),
        )
        for intersection in parts.of_destination(position)
        for ranges in itertools.product(*intersection.block)
    )


@torch.no_grad()
def distribute_reads(
    reads: Sequence[ReadPlan],
    sources: Sequence[Mapping[Holder, torch.Tensor]],
    outs: Sequence[torch.Tensor | None],
    options: ExchangeOptions = DEFAULT_OPTIONS,
) -> None:
    """Fill `outs`, this rank's shards of the destinations, in one exchange: all on the CPU, and
    contiguous. `sources` has, per read, the data of the holders that this rank reads. Every rank
    must call it, with the same `reads`. Without a process group this process is alone, and rank
    0."""
    if not reads:
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
    cpu = torch.device("cpu")
    width = raw_itemsize(read.dtype for read in reads)
    near: list[tuple[TensorTask, int]] = []
    far: list[tuple[TensorTask, int]] = []
    ranks: set[int] = set()
    for index, read in enumerate(reads):
        tasks, moves = _tasks(read, rank, width, options)
        (far if moves else near).extend((task, index) for task in tasks)
        if moves:
            ranks.update(read.readers.values(), read.dst_ranks)
    for some, participants in ((near, (rank,)), (far, tuple(sorted(ranks)))):
        if some and rank in participants:
            group = process_group_of(participants) if len(participants) > 1 else None
            FusedExchange([task for task, _ in some], participants, group, cpu, options).run(
                [_given(task, sources[index]) for task, index in some],
                [outs[index] for _, index in some],
            )


def deduplicate(layout: Layout, shape: Sequence[int], index: int) -> Layout:
    """Return a layout in which every element has one holder, and each holder a contiguous range of
    its shard in `layout`: replicas of a shard share its rows, or, with few rows, one of them has
    all; another one for each `index` of a tensor. Raises LayoutError if the layout does not fit
    the shape."""
    layout.check(shape)
    mesh = layout.mesh
    copied = [
        axis
        for axis, (size, placement) in enumerate(zip(mesh.shape, layout.placements, strict=True))
        if isinstance(placement, Replicate) and size > 1
    ]
    if not copied:
        return layout
    copies = prod(mesh.shape[axis] for axis in copied)
    first, *_ = mesh.holders
    rows = layout.local_shape(shape, first)[0] if len(shape) else 0
    if rows >= copies * _ROWS_TO_SHARE and not any(map(is_strided_shard, layout.placements)):
        before = dict(layout.shard_order).get(0) or tuple(
            axis for axis, p in enumerate(layout.placements) if isinstance(p, Shard) and p.dim == 0
        )
        placements = [Shard(0) if a in copied else p for a, p in enumerate(layout.placements)]
        return Layout(mesh, placements, {**dict(layout.shard_order), 0: (*before, *copied)})
    return _of_one_copy(layout, copied, index % copies)


def element_range(
    layout: Layout, once: Layout, shape: Sequence[int], holder: Holder
) -> tuple[int, int]:
    """Return the range [start, stop) of a holder's shard in `layout`, in memory order, that it has
    in `once`, made by `deduplicate`."""
    (part,) = plan(layout, once, tuple(shape), torch.uint8).transfers(holder)
    for piece in part.copies:
        row = prod(layout.local_shape(shape, holder)[1:])
        start = piece.ranges[0][0][0] * row if piece.ranges else 0
        return start, start + piece.stop - piece.start
    return 0, 0


@lru_cache(maxsize=1024)
def _stays(src: Layout, dst: Layout, reader_of: tuple[int, ...]) -> bool:
    if len(set(reader_of)) < len(reader_of) or src.mesh.shape != dst.mesh.shape:
        return False
    # Axis names of files have no meaning here.
    mesh = HolderMesh(src.mesh.shape, reader_of, dst.mesh.axes)
    return Layout(mesh, src.placements, src.shard_order) == dst


def _given(task: TensorTask, parts: Mapping[Holder, torch.Tensor]) -> torch.Tensor | None:
    holders = task.readers or parts
    return next((parts[holder] for holder in holders if holder in parts), None)


def _tasks(
    read: ReadPlan, rank: int, width: int, options: ExchangeOptions
) -> tuple[list[TensorTask], bool]:
    """Return this rank's task, and whether anything is sent between ranks."""
    src, readers = read.src, read.readers
    reader_of = tuple(readers[holder] for holder in src.mesh.holders)
    if len(set(reader_of)) == len(reader_of):
        # Each acts for one at most: it is as if the ranks themselves held the tensor.
        live = src.with_holders(reader_of)
        costs = options.costs_on(torch.device("cpu"))
        tensor_plan = plan(live, read.dst, read.shape, read.dtype, costs=costs)
        return [TensorTask(tensor_plan, rank, width)], tensor_plan.moved_bytes > 0
    # To a file all ranks are equally near, so that no relay is asked for.
    tensor_plan = plan(src, read.dst, read.shape, read.dtype)
    turns: list[dict[Holder, Holder]] = []
    taken: dict[int, int] = {}
    for holder in src.mesh.holders:
        turn = taken.get(readers[holder], 0)
        taken[readers[holder]] = turn + 1
        if turn == len(turns):
            turns.append({})
        turns[turn][holder] = readers[holder]
    return [TensorTask(tensor_plan, rank, width, turn) for turn in turns], True


def _of_one_copy(layout: Layout, copied: Sequence[int], index: int) -> Layout:
    """Return the layout on the holders of one replica only."""
    mesh, left = layout.mesh, index
    at = {}
    for axis in reversed(copied):
        left, at[axis] = divmod(left, mesh.shape[axis])
    kept = [axis for axis in range(len(mesh.shape)) if axis not in at]
    coordinate = [at.get(axis, 0) for axis in range(len(mesh.shape))]
    renumbered = {axis: place for place, axis in enumerate(kept)}
    return Layout(
        HolderMesh(
            tuple(mesh.shape[axis] for axis in kept),
            tuple(mesh.group_along(kept, coordinate)),
            tuple(mesh.axes[axis] for axis in kept),
        ),
        [layout.placements[axis] for axis in kept],
        {dim: tuple(renumbered[axis] for axis in axes) for dim, axes in layout.shard_order},
    )
