"""Partition of one dim of a tensor by the axes of a mesh, in closed form.

Axes split a dim one after the other. A split into n shards with split factor f first divides the
dim into f blocks and each block into n; shard i is the i-th of each block. With f = 1 this is
`torch.chunk`; otherwise it is DTensor's strided shard. Every division uses ceil(length / count), so
the last pieces may be shorter or empty.

Invariant: the intervals of a `Partition` cover the dim exactly once, in order; within a shard,
elements are stored in the order of the dim.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

SharedRanges = tuple[tuple[int, int, int], ...]
"""Ranges that two shards of a dim share: (start in the first, start in the second, length)."""


class Split(NamedTuple):
    """One mesh axis that shards a dim."""

    axis: int
    """Index of the axis in the mesh."""
    size: int
    factor: int = 1
    """Split factor of a strided shard; 1: contiguous."""


class Partition(NamedTuple):
    """The intervals of a dim in order: int64 arrays with one entry per interval; `starts` has one
    more."""

    starts: np.ndarray
    part: np.ndarray
    """Shard of each interval. Shards are numbered over the coordinates of the sharding axes, the
    first axis of the mesh varying slowest, whatever their order."""
    local: np.ndarray
    """Start of each interval in the storage of its shard."""


@lru_cache(maxsize=8192)
def partition(length: int, splits: tuple[Split, ...]) -> Partition:
    """Return the intervals of a dim of `length` elements after `splits`, applied in
    order."""
    if not splits:
        ends = [0, length] if length else [0]
        zeros = np.zeros(len(ends) - 1, np.int64)
        return Partition(np.array(ends, np.int64), zeros, zeros)
    if all(split.factor == 1 for split in splits):
        return _contiguous(length, splits)
    return _strided(length, splits)


def num_shards(splits: Sequence[Split]) -> int:
    """Number of shards, empty ones included."""
    count = 1
    for split in splits:
        count *= split.size
    return count


@lru_cache(maxsize=8192)
def shard_sizes(length: int, splits: tuple[Split, ...]) -> np.ndarray:
    """Elements per shard, int64."""
    shards = partition(length, splits)
    return np.bincount(
        shards.part, weights=np.diff(shards.starts), minlength=num_shards(splits)
    ).astype(np.int64)


def intervals(length: int, splits: tuple[Split, ...], part: int) -> list[tuple[int, int]]:
    """Return (start, length) of each interval of a shard, in order."""
    shards = partition(length, splits)
    mine = np.flatnonzero(shards.part == part)
    starts = shards.starts[mine]
    return list(zip(starts.tolist(), (shards.starts[mine + 1] - starts).tolist(), strict=True))


class DimIntersections:
    """The intersections of each shard of one partition of a dim with each shard of another."""

    def __init__(self, src: Partition, dst: Partition) -> None:
        if src is dst:
            starts = src.starts
        elif len(src.part) == 1 or len(dst.part) == 1:
            starts = max(src.starts, dst.starts, key=len)
        else:
            starts = np.unique(np.concatenate([src.starts, dst.starts]))
        first = starts[:-1]
        self.src_part, self.src_local = _at(src, first)
        self.dst_part, self.dst_local = _at(dst, first)
        self.length = starts[1:] - first
        self._of: dict[tuple[bool, int], dict[int, SharedRanges]] = {}

    def of_src(self, part: int) -> dict[int, SharedRanges]:
        """Return the intersections of the first partition's shard `part`, by other shard."""
        return self._row(True, part)

    def of_dst(self, part: int) -> dict[int, SharedRanges]:
        """Return the intersections of the second partition's shard `part`, by other shard."""
        return self._row(False, part)

    @cached_property
    def max_of_src(self) -> int:
        """The most shards of the second partition that a shard of the first intersects."""
        pairs = np.unique(np.stack([self.src_part, self.dst_part]), axis=1)
        return int(np.bincount(pairs[0]).max(initial=0))

    def common(self, src_parts: np.ndarray, dst_parts: np.ndarray) -> np.ndarray:
        """Return the elements that shards `src_parts[i]` and `dst_parts[i]` share, int64."""
        width = max(int(self.dst_part.max(initial=0)), int(dst_parts.max(initial=0))) + 1
        keys, index = np.unique(self.src_part * width + self.dst_part, return_inverse=True)
        if not len(keys):
            return np.zeros(len(src_parts), np.int64)
        lengths = np.bincount(index, weights=self.length).astype(np.int64)
        wanted = src_parts * width + dst_parts
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[at] == wanted, lengths[at], 0)

    def _row(self, of_src: bool, part: int) -> dict[int, SharedRanges]:
        key = (of_src, part)
        if key not in self._of:
            mine, theirs = (
                (self.src_part, self.dst_part) if of_src else (self.dst_part, self.src_part)
            )
            at = np.flatnonzero(mine == part)
            ranges = zip(
                self.src_local[at].tolist(),
                self.dst_local[at].tolist(),
                self.length[at].tolist(),
                strict=True,
            )
            rows: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
            for peer, shared_range in zip(theirs[at].tolist(), ranges, strict=True):
                rows[peer].append(shared_range)
            self._of[key] = {peer: _merged(peer_ranges) for peer, peer_ranges in rows.items()}
        return self._of[key]


def _at(partition: Partition, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for intervals that begin at `first`, their shard and their position in it."""
    if len(partition.part) == 1:
        return np.zeros_like(first), first
    if len(partition.part) == len(first):
        return partition.part, partition.local
    at = partition.starts.searchsorted(first, "right") - 1
    return partition.part[at], partition.local[at] + first - partition.starts[at]


@lru_cache(maxsize=8192)
def dim_intersections(
    length: int, src_splits: tuple[Split, ...], dst_splits: tuple[Split, ...]
) -> DimIntersections:
    """Return the intersections of two partitions of a dim of `length` elements."""
    return DimIntersections(partition(length, src_splits), partition(length, dst_splits))


def _merged(ranges: list[tuple[int, int, int]]) -> SharedRanges:
    """Merge ranges that are adjacent in both shards: other shards are between them in the dim,
    but not in storage."""
    merged = ranges[:1]
    for src_start, dst_start, length in ranges[1:]:
        last_src, last_dst, last = merged[-1]
        if last_src + last == src_start and last_dst + last == dst_start:
            merged[-1] = (last_src, last_dst, last + length)
        else:
            merged.append((src_start, dst_start, length))
    return tuple(merged)


def _strides(splits: Sequence[Split]) -> dict[int, int]:
    """Return, per axis, the stride of its coordinates in the number of a shard."""
    stride, strides = 1, {}
    for split in sorted(splits, reverse=True):
        strides[split.axis] = stride
        stride *= split.size
    return strides


def _contiguous(length: int, splits: Sequence[Split]) -> Partition:
    """Return the partition if every shard is one interval."""
    strides = _strides(splits)
    start, size, part = np.zeros(1, np.int64), np.array([length]), np.zeros(1, np.int64)
    for split in splits:
        index = np.arange(split.size)
        piece = -(-size // split.size)[:, None]
        begin = np.minimum(index * piece, size[:, None])
        start = (start[:, None] + begin).ravel()
        size = np.minimum(piece, size[:, None] - begin).ravel()
        part = (part[:, None] + index * strides[split.axis]).ravel()
    # The cuts go from the outermost in, so the parts are in the order of the dim.
    held = np.flatnonzero(size)
    starts = np.empty(len(held) + 1, np.int64)
    starts[:-1], starts[-1] = start[held], length
    return Partition(starts, part[held], np.zeros(len(held), np.int64))


def _strided(length: int, splits: Sequence[Split]) -> Partition:
    """Return the partition if shards may have several intervals.

    `place` numbers shards in the order of the splits. Elements are numbered shard by shard, so that
    one sorted list holds the intervals and another the borders of the next split, and merging both
    gives the intervals after it.
    """
    strides = _strides(splits)
    start, size = np.zeros(1, np.int64), np.array([length])
    place, part = np.zeros_like(start), np.zeros(1, np.int64)
    for split in splits:
        total = np.bincount(place, weights=size, minlength=len(part)).astype(np.int64)
        base = np.cumsum(total) - total
        pieces, index = np.arange(split.factor), np.arange(split.size)
        first = -(-total // split.factor)[:, None]
        piece_start = np.minimum(pieces * first, total[:, None])
        piece = np.minimum(first, total[:, None] - piece_start)
        second = -(-piece // split.size)[..., None]
        begin = piece_start[..., None] + np.minimum(index * second, piece[..., None])
        borders = (base[:, None, None] + begin).ravel()
        old = np.cumsum(size) - size
        numbers = np.unique(np.concatenate([old, borders, [length]]))
        numbers = numbers[numbers <= length]
        at = np.searchsorted(old, numbers[:-1], "right") - 1
        # Where borders coincide, those of empty parts come first.
        border = np.searchsorted(borders, numbers[:-1], "right") - 1
        start, size = start[at] + numbers[:-1] - old[at], np.diff(numbers)
        coordinate = border % split.size
        place = border // (split.factor * split.size) * split.size + coordinate
        part = (part[:, None] + index * strides[split.axis]).ravel()
        order = np.lexsort((start, place))
        start, size, place = start[order], size[order], place[order]
    order = np.argsort(start, kind="stable")
    return _joined(np.append(start[order], length), part[place][order])


def _joined(starts: np.ndarray, part: np.ndarray) -> Partition:
    """Build a partition whose adjacent intervals belong to different shards."""
    if len(part) == 0:
        return Partition(starts, part, part)
    begins = np.append(True, part[1:] != part[:-1])
    starts, part = np.append(starts[:-1][begins], starts[-1]), part[begins]
    order = np.argsort(part, kind="stable")
    length = np.diff(starts)[order]
    before = np.cumsum(length) - length
    in_part = part[order]
    first_of_part = np.append(True, in_part[1:] != in_part[:-1])
    base = np.maximum.accumulate(np.where(first_of_part, before, 0))
    local = np.empty_like(before)
    local[order] = before - base
    return Partition(starts, part, local)
