"""A round of an exchange through shared memory: one copy in, one copy out.

A sender writes its data into its slot in the shape of its own shard, so that a receiver computes
the position by arithmetic, and data that several receivers need is written once. If that needs
fewer buckets, slots omit the indices of each dim that are not sent.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from torchtitan_lite.core.errors import RedistributionError
from torchtitan_lite.distributed.redistribute.execution.program import (
    LINE_BYTES,
    BucketRange,
    LocalReduction,
    RawArray,
    Slices,
    TensorTask,
    assign_buckets,
    group_by_region,
    intersect_span,
    local_reduction,
    raw_numpy_dtype,
    sent_arrays,
    slices,
    spans,
)
from torchtitan_lite.distributed.redistribute.execution.shared_memory import SharedMemory
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.redistribute.planning.plan import Plan
from torchtitan_lite.distributed.redistribute.planning.transfers import Transfer


class _SlotCopy(NamedTuple):
    """A rectangle written to, or read from, the slot of a rank."""

    rank: int
    tensor: int
    region: Slices
    """Rectangle in the tensor."""
    offset: int
    """Start, in the slot, of the contiguous run that the rectangle is part of."""
    run: tuple[int, ...]
    """Shape of that run."""
    inside: Slices


class _SentPart(NamedTuple):
    """The part of a sender's shard that its slot holds."""

    intervals: tuple[tuple[tuple[int, int, int], ...], ...]
    """Per dim: (start and stop in the shard, start in the part), in order."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop, _ in dim) for dim in self.intervals)

    def position(self, first: Sequence[int]) -> list[int]:
        """Return the position in the part of the element `first` of the shard."""
        position = []
        for index, dim in zip(first, self.intervals, strict=True):
            start, _, at = dim[bisect_right(dim, index, key=itemgetter(0)) - 1]
            position.append(at + index - start)
        return position


_SentParts = dict[tuple[Plan, Holder], _SentPart]
"""Sent parts by plan, which tensors may share, and sender."""


class _SharedBucket(NamedTuple):
    writes: list[_SlotCopy]
    reads: list[_SlotCopy]
    joins: list[_SlotCopy]
    """Copies read and reduced into existing values."""
    joined: list[list[int]]
    """Indices of `joins` with the same position."""
    senders: list[int]
    receivers: list[int]


class SharedMemoryTransport:
    """Round `index` of an exchange between peers, ready for any tensors."""

    def __init__(
        self,
        tasks: Sequence[TensorTask],
        index: int,
        ranks: Sequence[int],
        memory: SharedMemory,
        bucket_bytes: int,
        near: frozenset[int],
        *,
        scales: bool,
    ) -> None:
        """`ranks` are the global ranks of the memory's group, in its order; ranks whose group
        rank is not in `near` are skipped. `scales`: as `local_reduction`."""
        self._near = near
        self._tasks, self._index, self._memory = tasks, index, memory
        self._kinds = [task.kind(index) for task in tasks]
        self._reductions = [local_reduction(task, scales) for task in tasks]
        self._width = tasks[0].width
        group_ranks: dict[Holder, int] = {rank: group_rank for group_rank, rank in enumerate(ranks)}
        line = LINE_BYTES // self._width
        capacity = min(bucket_bytes, memory.slot_bytes) // self._width // line * line
        self._parts: _SentParts = {}
        """Parts of shards in a slot; a slot holds a shard that is not listed entirely."""
        buckets = assign_buckets([task.max_local_raw(index) for task in tasks], capacity, line)
        if len(buckets) > 1:
            # All peers must count the same buckets, near or not.
            parts, weights = _sent_parts(tasks, index, [ranks[n] for n in memory.peers])
            fewer = assign_buckets(weights, capacity, line)
            if len(fewer) < len(buckets):
                self._parts, buckets = parts, fewer
        self._buckets = [self._bucket(ranges, group_ranks) for ranges in buckets if ranges]
        self._slots = [
            [
                (self._map(bucket.writes, slot), self._map(bucket.reads + bucket.joins, slot))
                for slot in (0, 1)
            ]
            for bucket in self._buckets
        ]

    def bind(
        self, src_arrays: Sequence[RawArray], into: Sequence[RawArray]
    ) -> "BoundSharedMemoryTransport":
        """Bind the round to this rank's shards of the sources and the destinations."""
        arrays = sent_arrays(src_arrays, into, self._kinds)
        writes = [[arrays[c.tensor][c.region] for c in bucket.writes] for bucket in self._buckets]
        reads = [
            [into[c.tensor][c.region] for c in bucket.reads + bucket.joins]
            for bucket in self._buckets
        ]
        reductions = [
            [self._reductions[bucket.joins[indices[0]].tensor] for indices in bucket.joined]
            for bucket in self._buckets
        ]
        return BoundSharedMemoryTransport(
            self._memory, self._buckets, self._slots, writes, reads, reductions
        )

    def _bucket(
        self, ranges: Sequence[BucketRange], group_ranks: dict[Holder, int]
    ) -> _SharedBucket:
        """Return what this rank writes and reads of a bucket."""
        me = self._memory.rank
        # By where and what: what several receivers need is written once.
        writes: dict[str, _SlotCopy] = {}
        reads: list[_SlotCopy] = []
        joins: list[_SlotCopy] = []
        receivers: set[int] = set()
        for bounds in ranges:
            task = self._tasks[bounds.tensor]
            part = task.transfers[self._index]
            for piece in part.sends:
                if group_ranks[piece.peer] in self._near:
                    receivers.add(group_ranks[piece.peer])
                    for copy in self._copies(bounds, piece, me, task.sender, writes=True):
                        writes[repr(copy)] = copy
            received = joins if self._kinds[bounds.tensor] == "reduce" else reads
            for piece in part.receives:
                peer = group_ranks[task.reader(piece.peer)]
                if peer in self._near:
                    received += self._copies(bounds, piece, peer, piece.peer, writes=False)
        senders = sorted({copy.rank for copy in reads + joins})
        joined = group_by_region((copy.tensor, copy.region) for copy in joins)
        return _SharedBucket(
            _joined_writes(writes.values()), reads, joins, joined, senders, sorted(receivers)
        )

    def _copies(
        self, bounds: BucketRange, piece: Transfer, rank: int, sender: Holder, *, writes: bool
    ) -> Iterator[_SlotCopy]:
        """Yield the rectangles of a transfer in the part of a tensor that a bucket holds."""
        task = self._tasks[bounds.tensor]
        part = self._parts.get((task.plan, sender)) or _whole_part(task, sender, self._index)
        shape = part.shape
        size = prod(shape)
        offset = bounds.offset
        windows = []
        for span in spans(shape, min(bounds.start, size), min(bounds.stop, size)):
            run = tuple(stop - start for start, stop in span)
            windows.append((span, run, offset))
            offset += prod(run)
        for block in task.rectangles(piece, self._index):
            first = part.position(block.src)
            tensor_first = block.src if writes else block.dst
            for span, run, at in windows:
                common = intersect_span(first, block.shape, span)
                if common is None:
                    continue
                begin, lengths = common
                inside = [b - low for b, (low, _) in zip(begin, span, strict=True)]
                begin = [b - f + t for b, f, t in zip(begin, first, tensor_first, strict=True)]
                place = slices(begin, lengths)
                yield _SlotCopy(rank, bounds.tensor, place, at, run, slices(inside, lengths))

    def _map(self, copies: Sequence[_SlotCopy], slot: int) -> list[np.ndarray]:
        """Return the copies with their views of the ranks' slots."""
        memory = self._memory
        base = slot * memory.slot_bytes // self._width
        words = {c.rank: memory.region(c.rank).view(raw_numpy_dtype(self._width)) for c in copies}
        views = []
        for copy in copies:
            start = base + copy.offset
            run = words[copy.rank][start : start + prod(copy.run)].reshape(copy.run)
            views.append(run[copy.inside])
        return views


def _sent_parts(
    tasks: Sequence[TensorTask], index: int, ranks: Sequence[Holder]
) -> tuple[_SentParts, list[int]]:
    """Return the parts of all tensors that `ranks` send in round `index`, and, of each tensor, the
    elements of the largest part."""
    parts: _SentParts = {}
    largest = []
    for task in tasks:
        senders = [] if task.kind(index) is None else task.senders(ranks)
        for sender in senders:
            if (task.plan, sender) not in parts:
                parts[task.plan, sender] = _sent_part(task, sender, index)
        largest.append(max((prod(parts[task.plan, sender].shape) for sender in senders), default=0))
    return parts, largest


def _sent_part(task: TensorTask, sender: Holder, index: int) -> _SentPart:
    """Return the part of a shard that a slot holds in round `index`: the indices of each dim that
    are sent if they are at most half of it. Of a reduction it is the whole shard, so that all
    contributions to an element have the same position and are reduced at once."""
    whole = _whole_part(task, sender, index)
    if task.kind(index) == "reduce":
        return whole
    # The list of another rank is not kept: it may be long.
    of_plan = task.plan if sender == task.sender else task.plan.exchange
    sends = of_plan.transfers(sender)[index].sends
    blocks = [block for piece in sends for block in task.rectangles(piece, index)]
    intervals = [
        _without_gaps((block.src[dim], block.src[dim] + block.shape[dim]) for block in blocks)
        for dim in range(len(whole.intervals))
    ]
    part = _SentPart(tuple(intervals))
    return part if 2 * prod(part.shape) <= prod(whole.shape) else whole


def _whole_part(task: TensorTask, sender: Holder, index: int) -> _SentPart:
    shape = task.raw_local_shape(sender, index)
    return _SentPart(tuple(((0, length, 0),) for length in shape))


def _without_gaps(intervals: Iterable[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Merge intervals that overlap or touch; return each with its start if gaps are omitted."""
    merged: list[tuple[int, int, int]] = []
    length = 0
    for start, stop in sorted(set(intervals)):
        if merged and start <= merged[-1][1]:
            first, last, at = merged.pop()
            start, stop, length = first, max(last, stop), at
        merged.append((start, stop, length))
        length += stop - start
    return tuple(merged)


def _joined_writes(writes: Iterable[_SlotCopy]) -> list[_SlotCopy]:
    """Write the rectangle around several of one run at once if they are most of it and it has no
    gaps in the tensor: several receivers of parts of each row would make many short copies, and
    no receiver reads the rest."""
    by_run: dict[tuple[int, int], list[_SlotCopy]] = {}
    for write in writes:
        by_run.setdefault((write.tensor, write.offset), []).append(write)
    joined: list[_SlotCopy] = []
    for some in by_run.values():
        region, inside = (
            tuple(
                slice(
                    min(dim_slice.start for dim_slice in dim),
                    max(dim_slice.stop for dim_slice in dim),
                )
                for dim in zip(*places, strict=True)
            )
            for places in ([write.region for write in some], [write.inside for write in some])
        )
        around = some[0]._replace(region=region, inside=inside)
        is_most = 2 * sum(map(_num_elements, some)) >= _num_elements(around)
        joined += [around] if is_most and _lengths(region) == _lengths(inside) else some
    return joined


def _num_elements(copy: _SlotCopy) -> int:
    return prod(_lengths(copy.inside))


def _lengths(place: Slices) -> list[int]:
    return [dim_slice.stop - dim_slice.start for dim_slice in place]


class BoundSharedMemoryTransport:
    """A bound round. Use `SharedMemoryTransport.bind`."""

    def __init__(
        self,
        memory: SharedMemory,
        buckets: Sequence[_SharedBucket],
        slots: Sequence[Sequence[tuple[list[np.ndarray], list[np.ndarray]]]],
        writes: Sequence[Sequence[np.ndarray]],
        reads: Sequence[Sequence[np.ndarray]],
        reductions: Sequence[Sequence[LocalReduction]],
    ) -> None:
        """Per bucket: its description, its position in either slot, the copies written and read,
        and the reductions."""
        self._memory, self._buckets, self._slots = memory, buckets, slots
        self._writes, self._reads, self._reductions = writes, reads, reductions

    def run(self) -> None:
        """Execute the round. All ranks of the group must call it."""
        memory = self._memory
        if memory.broken:
            raise RedistributionError(
                "An earlier exchange between these ranks ended half-way. Start the processes again."
            )
        memory.broken = True
        self._run(memory, len(self._buckets))
        memory.broken = False

    def _run(self, memory: SharedMemory, count: int) -> None:
        first, memory.count = memory.count, memory.count + count
        for index in range(count + 1):
            if index < count:
                slot = (first + index) % 2
                memory.wait_read(*memory.pending.get(slot, ((), 0)))
                for view, array in zip(
                    self._slots[index][slot][0], self._writes[index], strict=True
                ):
                    view[...] = array
                memory.signal_written(first + index)
                memory.pending[slot] = self._buckets[index].receivers, first + index
            if index > 0:
                self._read(index - 1, first + index - 1)

    def _read(self, index: int, bucket: int) -> None:
        self._memory.wait_written(self._buckets[index].senders, bucket)
        views, arrays = self._slots[index][bucket % 2][1], self._reads[index]
        joined = self._buckets[index].joined
        plain = len(views) - len(self._buckets[index].joins)
        for array, view in zip(arrays[:plain], views[:plain], strict=True):
            array[...] = view
        for indices, reduction in zip(joined, self._reductions[index], strict=True):
            into = torch.from_numpy(arrays[plain + indices[0]])
            reduction.apply_(into, [torch.from_numpy(views[plain + n]) for n in indices])
        self._memory.signal_read(bucket)
