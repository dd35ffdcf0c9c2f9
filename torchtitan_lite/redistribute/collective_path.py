"""A round of an exchange as all-to-all collectives, with packing and unpacking beside them.

Two buckets are under way at a time: while one travels, the next is packed and the one before is
unpacked. Layer: above program and words.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_lite.redistribute.holder_mesh import Holder
from torchtitan_lite.redistribute.pieces import Piece
from torchtitan_lite.redistribute.program import (
    Range,
    Slices,
    Task,
    buckets,
    by_place,
    reduction_of,
    slices,
)
from torchtitan_lite.redistribute.words import (
    WORDS,
    Reduction,
    WordArray,
    word_array,
    word_tensor_of,
)


class _Copy(NamedTuple):
    """A rectangle of a tensor, and the words of a buffer that hold it."""

    tensor: int
    place: Slices
    offset: int
    size: int
    shape: tuple[int, ...]
    reduction: Reduction | None
    """How it is reduced with what is there; None where it takes its place."""


class _Bucket(NamedTuple):
    packs: list[_Copy]
    unpacks: list[_Copy]
    joined: list[list[int]]
    """The numbers of the `unpacks` that have one place, place by place."""
    sent_words: list[int]
    """To each rank of the group."""
    received_words: list[int]


class CollectivePath:
    """Round `number` of an exchange over a process group, ready to run."""

    def __init__(
        self,
        tasks: Sequence[Task],
        number: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        bucket_bytes: int,
        device: torch.device,
        without: frozenset[int] = frozenset(),
        *,
        scales: bool,
    ) -> None:
        """`ranks` are the global ranks of the group, in its order; nothing is moved to or from
        those of the group's numbers in `without`. `scales`: as `reduction_of`."""
        self._tasks, self._number = tasks, number
        self.group, self._device, self.width = group, device, tasks[0].width
        self._kinds = [task.kind(number) for task in tasks]
        self._reductions = [reduction_of(task, scales) for task in tasks]
        self._numbers: dict[Holder, int] = {
            rank: n for n, rank in enumerate(ranks) if n not in without
        }
        # What a rank can send and receive of each tensor at most: all must cut it alike.
        loads = [task.most_moved_words(number) for task in tasks]
        # Dividing each piece leaves up to one element of each over.
        spare = 2 * len(ranks) * max(task.plan.dtype.itemsize for task in tasks)
        capacity = max(bucket_bytes - spare, bucket_bytes // 2) // self.width
        self.buckets = [
            self._bucket(ranges, len(ranks)) for ranges in buckets(loads, capacity, 1) if ranges
        ]

    def bind(self, given: Sequence[WordArray], into: Sequence[WordArray]) -> "BoundCollectivePath":
        """The round for this rank's parts of the sources and the destinations."""
        arrays = [
            out if kind == "spread" else source
            for source, out, kind in zip(given, into, self._kinds, strict=True)
        ]
        packs = [[arrays[c.tensor][c.place] for c in bucket.packs] for bucket in self.buckets]
        unpacks = [[into[c.tensor][c.place] for c in bucket.unpacks] for bucket in self.buckets]
        return BoundCollectivePath(self, packs, unpacks)

    def buffers(self, parity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """To send from and to receive into, for every second bucket."""
        mine = self.buckets[parity::2]
        sent = max(sum(bucket.sent_words) for bucket in mine)
        received = max(sum(bucket.received_words) for bucket in mine)
        scratch = scratch_of(self.group, self._device)
        return (
            scratch.words(2 * parity, sent, self.width),
            scratch.words(2 * parity + 1, received, self.width),
        )

    def _bucket(self, ranges: Sequence[Range], num_ranks: int) -> _Bucket:
        """What this rank sends and receives in a bucket: peer after peer, and for each peer tensor
        after tensor."""
        sends: list[list[tuple[Range, Piece]]] = [[] for _ in range(num_ranks)]
        receives: list[list[tuple[Range, Piece]]] = [[] for _ in range(num_ranks)]
        for bounds in ranges:
            task = self._tasks[bounds.tensor]
            part = task.parts[self._number]
            for pieces, by_peer in ((part.sends, sends), (part.receives, receives)):
                for piece in pieces:
                    number = self._numbers.get(task.actor(piece.peer))
                    if number is not None:
                        by_peer[number].append((bounds, piece))
        packs, sent = self._copies(sends, of_source=True)
        unpacks, received = self._copies(receives, of_source=False)
        joined = by_place((copy.tensor, copy.place) for copy in unpacks)
        return _Bucket(packs, unpacks, joined, sent, received)

    def _copies(
        self, by_peer: Sequence[Sequence[tuple[Range, Piece]]], of_source: bool
    ) -> tuple[list[_Copy], list[int]]:
        copies, words, offset = [], [], 0
        for pieces in by_peer:
            before = offset
            for bounds, piece in pieces:
                task = self._tasks[bounds.tensor]
                is_reduced = self._kinds[bounds.tensor] == "reduce" and not of_source
                reduction = self._reductions[bounds.tensor] if is_reduced else None
                share = (bounds.start, bounds.stop, bounds.whole)
                for block in task.blocks(piece, self._number, *share):
                    place = slices(block.src if of_source else block.dst, block.shape)
                    size = prod(block.shape)
                    copies.append(_Copy(bounds.tensor, place, offset, size, block.shape, reduction))
                    offset += size
            words.append(offset - before)
        return copies, words


class Scratch:
    """Memory that exchanges over a group use one after the other. It is kept, since the first touch
    of fresh memory takes as long as all else, and is never more than two buckets."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, torch.Tensor] = {}

    def words(self, number: int, count: int, width: int) -> torch.Tensor:
        """One of the pieces of memory, as `count` words of `width` bytes, whatever they hold."""
        kept = self._kept.get(number)
        if kept is None or kept.nbytes != count * width:
            # What another exchange needed goes first, so that both are never there at once.
            kept = None
            self._kept.pop(number, None)
            kept = self._kept[number] = word_tensor_of(count, width, self._device)
        return kept.view(WORDS[width])


@lru_cache(maxsize=16)
def scratch_of(group: dist.ProcessGroup, device: torch.device) -> Scratch:
    """The memory of a group, for one exchange at a time."""
    return Scratch(device)


class BoundCollectivePath:
    """Made by `CollectivePath.bind`."""

    def __init__(
        self,
        path: CollectivePath,
        packs: Sequence[Sequence[WordArray]],
        unpacks: Sequence[Sequence[WordArray]],
    ) -> None:
        """By bucket: the rectangles that are packed and those that are unpacked into."""
        self._path, self._packs, self._unpacks = path, packs, unpacks

    def run(self) -> None:
        """Move. All ranks of the group must come to it."""
        path, count = self._path, len(self._path.buckets)
        buffers = [path.buffers(parity) for parity in range(min(2, count))]
        flying: list[dist.Work | None] = [None, None]
        for number in range(count + 1):
            if number < count:
                bucket = path.buckets[number]
                sent, received = buffers[number % 2]
                self._pack(number, sent)
                flying[number % 2] = dist.all_to_all_single(
                    received[: sum(bucket.received_words)].view(torch.uint8),
                    sent[: sum(bucket.sent_words)].view(torch.uint8),
                    [words * path.width for words in bucket.received_words],
                    [words * path.width for words in bucket.sent_words],
                    group=path.group,
                    async_op=True,
                )
            if number > 0:
                work = flying[(number - 1) % 2]
                assert work is not None
                work.wait()
                self._unpack(number - 1, buffers[(number - 1) % 2][1])

    def _pack(self, number: int, buffer: torch.Tensor) -> None:
        words = word_array(buffer, self._path.width)
        for copy, array in zip(self._path.buckets[number].packs, self._packs[number], strict=True):
            words[copy.offset : copy.offset + copy.size].reshape(copy.shape)[...] = array

    def _unpack(self, number: int, buffer: torch.Tensor) -> None:
        words = word_array(buffer, self._path.width)
        bucket = self._path.buckets[number]
        for numbers in bucket.joined:
            array = self._unpacks[number][numbers[0]]
            copies = [bucket.unpacks[n] for n in numbers]
            reduction = copies[0].reduction
            if reduction is None:
                for copy in copies:
                    array[...] = words[copy.offset : copy.offset + copy.size].reshape(copy.shape)
                continue
            others = []
            for copy in copies:
                arrived = buffer[copy.offset : copy.offset + copy.size]
                if copy.offset * self._path.width % reduction.dtype.itemsize:
                    # Torch computes where elements are aligned only.
                    arrived = arrived.clone()
                others.append(arrived.view(copy.shape))
            into = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
            reduction.apply_(into, others)
