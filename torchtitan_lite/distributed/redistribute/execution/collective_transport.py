"""A round of an exchange as all-to-all collectives, overlapped with packing and unpacking.

Two buckets are in flight at a time: while one is sent, the next is packed and the previous one is
unpacked.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_lite.distributed.redistribute.execution.program import (
    RAW_DTYPES,
    BucketRange,
    LocalReduction,
    RawArray,
    Slices,
    TensorTask,
    aligned,
    assign_buckets,
    group_by_region,
    local_reduction,
    raw_array,
    sent_arrays,
    slices,
)
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.redistribute.planning.transfers import Transfer


class _PackedCopy(NamedTuple):
    """A rectangle of a tensor, and its raw elements in a buffer."""

    tensor: int
    region: Slices
    offset: int
    size: int
    shape: tuple[int, ...]
    reduction: LocalReduction | None
    """Reduction into the existing value; None replaces it."""


class _CollectiveBucket(NamedTuple):
    packs: list[_PackedCopy]
    unpacks: list[_PackedCopy]
    joined: list[list[int]]
    """Indices of `unpacks` with the same position."""
    sent_elements: list[int]
    """Raw elements per rank of the group."""
    received_elements: list[int]


class CollectiveTransport:
    """Round `index` of an exchange over a process group, ready to run."""

    def __init__(
        self,
        tasks: Sequence[TensorTask],
        index: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        bucket_bytes: int,
        device: torch.device,
        without: frozenset[int] = frozenset(),
        *,
        scales: bool,
    ) -> None:
        """`ranks` are the global ranks of the group, in its order; group ranks in `without` are
        skipped. `scales`: as `local_reduction`."""
        self._tasks, self._index = tasks, index
        self.group, self._device, self.width = group, device, tasks[0].width
        self._bucket_bytes = bucket_bytes
        self._kinds = [task.kind(index) for task in tasks]
        self._reductions = [local_reduction(task, scales) for task in tasks]
        self._group_ranks: dict[Holder, int] = {
            rank: group_rank for group_rank, rank in enumerate(ranks) if group_rank not in without
        }
        # The most that any rank sends or receives of each tensor: all ranks must split it alike.
        loads = [task.max_moved_raw(index) for task in tasks]
        # Dividing each piece leaves up to one element of each over.
        spare = 2 * len(ranks) * max(task.plan.dtype.itemsize for task in tasks)
        capacity = max(bucket_bytes - spare, bucket_bytes // 2) // self.width
        self.buckets = [
            self._bucket(ranges, len(ranks))
            for ranges in assign_buckets(loads, capacity, 1)
            if ranges
        ]

    def bind(
        self, src_arrays: Sequence[RawArray], into: Sequence[RawArray]
    ) -> "BoundCollectiveTransport":
        """Bind the round to this rank's shards of the sources and the destinations."""
        arrays = sent_arrays(src_arrays, into, self._kinds)
        packs = [[arrays[c.tensor][c.region] for c in bucket.packs] for bucket in self.buckets]
        unpacks = [[into[c.tensor][c.region] for c in bucket.unpacks] for bucket in self.buckets]
        return BoundCollectiveTransport(self, packs, unpacks)

    def buffer(self, parity: int) -> torch.Tensor:
        """Return the buffer of alternating buckets, each of which sends and receives in it."""
        nbytes = max(
            aligned(sum(bucket.sent_elements) * self.width)
            + sum(bucket.received_elements) * self.width
            for bucket in self.buckets[parity::2]
        )
        scratch = scratch_buffers(self.group, self._device)
        return scratch.buffer(parity, nbytes, self._bucket_bytes).view(RAW_DTYPES[self.width])

    def split(self, buffer: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a bucket sends and receives, both aligned for any dtype."""
        sent, received = (
            sum(elements)
            for elements in (
                self.buckets[index].sent_elements,
                self.buckets[index].received_elements,
            )
        )
        first = aligned(sent * self.width) // self.width
        return buffer[:sent], buffer[first : first + received]

    def _bucket(self, ranges: Sequence[BucketRange], num_ranks: int) -> _CollectiveBucket:
        """Return what this rank sends and receives in a bucket, by peer, then by tensor."""
        sends: list[list[tuple[BucketRange, Transfer]]] = [[] for _ in range(num_ranks)]
        receives: list[list[tuple[BucketRange, Transfer]]] = [[] for _ in range(num_ranks)]
        for bounds in ranges:
            task = self._tasks[bounds.tensor]
            part = task.transfers[self._index]
            for pieces, by_peer in ((part.sends, sends), (part.receives, receives)):
                for piece in pieces:
                    group_rank = self._group_ranks.get(task.reader(piece.peer))
                    if group_rank is not None:
                        by_peer[group_rank].append((bounds, piece))
        packs, sent = self._copies(sends, of_source=True)
        unpacks, received = self._copies(receives, of_source=False)
        joined = group_by_region((copy.tensor, copy.region) for copy in unpacks)
        return _CollectiveBucket(packs, unpacks, joined, sent, received)

    def _copies(
        self, by_peer: Sequence[Sequence[tuple[BucketRange, Transfer]]], of_source: bool
    ) -> tuple[list[_PackedCopy], list[int]]:
        copies, words, offset = [], [], 0
        for pieces in by_peer:
            before = offset
            for bounds, piece in pieces:
                task = self._tasks[bounds.tensor]
                is_reduced = self._kinds[bounds.tensor] == "reduce" and not of_source
                reduction = self._reductions[bounds.tensor] if is_reduced else None
                share = (bounds.start, bounds.stop, bounds.whole)
                for block in task.rectangles(piece, self._index, *share):
                    place = slices(block.src if of_source else block.dst, block.shape)
                    size = prod(block.shape)
                    copies.append(
                        _PackedCopy(bounds.tensor, place, offset, size, block.shape, reduction)
                    )
                    offset += size
            words.append(offset - before)
        return copies, words


class ScratchBuffers:
    """Two buffers that exchanges of a group use in turn. They are kept, because the first touch of
    fresh memory takes as long as everything else."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, torch.Tensor] = {}

    def buffer(self, index: int, nbytes: int, max_bytes: int) -> torch.Tensor:
        """Return `nbytes` uninitialized bytes of one of the buffers. It is replaced if it is too
        small, or larger than both `nbytes` and `max_bytes`."""
        kept = self._kept.get(index)
        if kept is None or not nbytes <= kept.nbytes <= max(nbytes, max_bytes):
            # The former one goes first, so that both are never there at once.
            kept = None
            self._kept.pop(index, None)
            kept = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._kept[index] = kept
        return kept[:nbytes]


@lru_cache(maxsize=16)
def scratch_buffers(group: dist.ProcessGroup, device: torch.device) -> ScratchBuffers:
    """Return the buffers of a group, for one exchange at a time."""
    return ScratchBuffers(device)


class BoundCollectiveTransport:
    """A bound round. Use `CollectiveTransport.bind`."""

    def __init__(
        self,
        transport: CollectiveTransport,
        packs: Sequence[Sequence[RawArray]],
        unpacks: Sequence[Sequence[RawArray]],
    ) -> None:
        """Per bucket: the packed and the unpacked rectangles."""
        self._transport, self._packs, self._unpacks = transport, packs, unpacks

    def run(self) -> None:
        """Execute the round. All ranks of the group must call it."""
        transport, count = self._transport, len(self._transport.buckets)
        buffers = [transport.buffer(parity) for parity in range(min(2, count))]
        flying: list[dist.Work | None] = [None, None]
        for index in range(count + 1):
            if index < count:
                bucket = transport.buckets[index]
                sent, received = transport.split(buffers[index % 2], index)
                self._pack(index, sent)
                flying[index % 2] = dist.all_to_all_single(
                    received.view(torch.uint8),
                    sent.view(torch.uint8),
                    [words * transport.width for words in bucket.received_elements],
                    [words * transport.width for words in bucket.sent_elements],
                    group=transport.group,
                    async_op=True,
                )
            if index > 0:
                work = flying[(index - 1) % 2]
                assert work is not None
                work.wait()
                _, received = transport.split(buffers[(index - 1) % 2], index - 1)
                self._unpack(index - 1, received)

    def _pack(self, index: int, buffer: torch.Tensor) -> None:
        words = raw_array(buffer, self._transport.width)
        for copy, array in zip(
            self._transport.buckets[index].packs, self._packs[index], strict=True
        ):
            words[copy.offset : copy.offset + copy.size].reshape(copy.shape)[...] = array

    def _unpack(self, index: int, buffer: torch.Tensor) -> None:
        words = raw_array(buffer, self._transport.width)
        bucket = self._transport.buckets[index]
        for indices in bucket.joined:
            array = self._unpacks[index][indices[0]]
            copies = [bucket.unpacks[n] for n in indices]
            reduction = copies[0].reduction
            if reduction is None:
                for copy in copies:
                    array[...] = words[copy.offset : copy.offset + copy.size].reshape(copy.shape)
                continue
            contributions = []
            for copy in copies:
                arrived = buffer[copy.offset : copy.offset + copy.size]
                if copy.offset * self._transport.width % reduction.dtype.itemsize:
                    # Torch computes where elements are aligned only.
                    arrived = arrived.clone()
                contributions.append(arrived.view(copy.shape))
            into = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
            reduction.apply_(into, contributions)
