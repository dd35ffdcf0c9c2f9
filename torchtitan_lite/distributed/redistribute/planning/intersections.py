"""Intersections of the shards of two layouts.

Intersections are computed dim by dim: the intervals of a shard in one layout are intersected with
the shards of the other, and the product over the dims gives the intersections of whole shards.
`choose_owners` decides which ranks own entire tensors, so that work is balanced and most state
stays in place.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from torchtitan_lite.distributed.redistribute.planning.layout import Layout, TensorSpec
from torchtitan_lite.distributed.redistribute.planning.partition import (
    SharedRanges,
    Split,
    dim_intersections,
    shard_sizes,
)
from torchtitan_lite.distributed.redistribute.planning.placements import Holder, HolderMesh


class HolderIndex:
    """A layout as an array of shards x contributions x replicas. Use `holder_index`.

    Each axis of the mesh is one of the three: it shards a dim, its holders contribute to a sum, or
    they are replicas.
    """

    def __init__(self, layout: Layout, ndim: int) -> None:
        self.layout = layout
        mesh = layout.mesh
        self.splits: list[tuple[Split, ...]] = [layout.splits.get(dim, ()) for dim in range(ndim)]
        self.counts = tuple(math.prod(split.size for split in splits) for splits in self.splits)
        """Shards per dim."""
        strides = [1]
        for count in reversed(self.counts[1:]):
            strides.append(strides[-1] * count)
        self.strides = tuple(reversed(strides)) if self.counts else ()
        """Stride of a dim's shards in the shard number."""
        cutting = [split.axis for splits in self.splits for split in sorted(splits)]
        partial = layout.partial_axes
        same = [a for a in range(len(mesh.shape)) if a not in (*cutting, *partial)]
        self.num_contributions = math.prod(mesh.shape[axis] for axis in partial)
        self.num_replicas = math.prod(mesh.shape[axis] for axis in same)
        self._order = (*cutting, *partial, *same)

    @cached_property
    def positions(self) -> np.ndarray:
        """[shard, contribution, replica] -> position in `layout.mesh.holders`."""
        mesh = self.layout.mesh
        positions = np.arange(len(mesh.holders)).reshape(mesh.shape).transpose(self._order)
        return positions.reshape(-1, self.num_contributions, self.num_replicas)

    @cached_property
    def part_of(self) -> np.ndarray:
        """Position -> shard."""
        return self._inverse // (self.num_contributions * self.num_replicas)

    @cached_property
    def contribution_of(self) -> np.ndarray:
        """Position -> contribution."""
        return self._inverse // self.num_replicas % self.num_contributions

    @cached_property
    def _inverse(self) -> np.ndarray:
        inverse = np.empty(self.positions.size, np.int64)
        inverse[self.positions.ravel()] = np.arange(self.positions.size)
        return inverse

    def per_dim(self, part: int) -> list[int]:
        """Return the per-dim shards of a shard."""
        return [
            part // stride % count for stride, count in zip(self.strides, self.counts, strict=True)
        ]

    def holders(self, part: int, contribution: int = 0) -> Sequence[Holder]:
        """Return the replicas of one contribution to one shard."""
        return self._holders[part][contribution]

    @cached_property
    def _holders(self) -> list[list[list[Holder]]]:
        """[shard][contribution][replica]"""
        mesh = self.layout.mesh
        ranks = mesh.ranks_array
        if ranks is not None:
            return ranks[self.positions].tolist()
        return [
            [[mesh.holders[replica] for replica in replicas] for replicas in contributions]
            for contributions in self.positions.tolist()
        ]

    def position(self, holder: Holder) -> int | None:
        """Return a holder's position in the mesh; None if absent."""
        return self.layout.mesh.position(holder)


class Intersection(NamedTuple):
    """Intersection of a shard of the source and one of the destination."""

    src_part: int
    """Shard of the source."""
    dst_part: int
    """Shard of the destination."""
    block: tuple[SharedRanges, ...]
    """Intersections per dim of the tensor."""
    size: int
    """Number of elements."""
    row: int
    """Elements of a row: all dims but the first longer than one."""


class Intersections:
    """The intersections of all shards of two layouts, for a tensor of one shape."""

    def __init__(self, src: Layout, dst: Layout, shape: tuple[int, ...]) -> None:
        self.src = holder_index(src, len(shape))
        self.dst = holder_index(dst, len(shape))
        self.shape = shape
        self._by_dim = [
            dim_intersections(length, src_splits, dst_splits)
            for length, src_splits, dst_splits in zip(
                shape, self.src.splits, self.dst.splits, strict=True
            )
        ]

    def elements(self, src_parts: np.ndarray, dst_parts: np.ndarray) -> np.ndarray:
        """Return the elements that shards of the source and the destination share."""
        common = np.ones(len(src_parts), np.int64)
        for dim, dim_parts in enumerate(self._by_dim):
            common *= dim_parts.common(
                src_parts // self.src.strides[dim] % self.src.counts[dim],
                dst_parts // self.dst.strides[dim] % self.dst.counts[dim],
            )
        return common

    @cached_property
    def max_of_source(self) -> int:
        """Upper bound on the shards of the destination that a shard of the source intersects."""
        return math.prod(dim_parts.max_of_src for dim_parts in self._by_dim)

    def of_source(self, position: int) -> Iterator[Intersection]:
        """Return the intersections of the shard at a position of the source with each shard of the
        destination."""
        return self._of(self.src, position, True)

    def of_destination(self, position: int) -> Iterator[Intersection]:
        """Return the intersections of the shard at a position of the destination with each shard of
        the source."""
        return self._of(self.dst, position, False)

    def _of(self, index: HolderIndex, position: int, is_src: bool) -> Iterator[Intersection]:
        mine = int(index.part_of[position])
        strides = (self.dst if is_src else self.src).strides
        rows: list[list[tuple[int, SharedRanges, int]]] = []
        for dim, (part, dim_parts) in enumerate(
            zip(index.per_dim(mine), self._by_dim, strict=True)
        ):
            row = dim_parts.of_src(part) if is_src else dim_parts.of_dst(part)
            rows.append(
                [
                    (peer * strides[dim], ranges, sum(length for _, _, length in ranges))
                    for peer, ranges in row.items()
                ]
            )
        for combination in itertools.product(*rows):
            offsets, block, lengths = zip(*combination, strict=True) if combination else ((),) * 3
            peer_part = sum(offsets)
            src_part, dst_part = (mine, peer_part) if is_src else (peer_part, mine)
            yield Intersection(src_part, dst_part, block, *_size_and_row(lengths))

    @cached_property
    def src_positions(self) -> np.ndarray:
        """For each position of the destination, the position of the same holder in the source, or
        -1."""
        return matching_positions(self.dst.layout.mesh, self.src.layout.mesh)

    @cached_property
    def across(self) -> np.ndarray:
        """Return the intersections of a position's source shard with each destination shard."""
        if self.dst.layout.mesh.holders == self.src.layout.mesh.holders:
            return self.src.part_of
        return np.where(self.src_positions < 0, -1, self.src.part_of[self.src_positions])


@lru_cache(maxsize=4096)
def _size_and_row(lengths: tuple[int, ...]) -> tuple[int, int]:
    """Return the elements of a rectangle, and of its rows."""
    long = list(itertools.dropwhile(lambda length: length == 1, lengths))
    return math.prod(lengths), math.prod(long[1:])


def choose_owners(
    tensors: Sequence[TensorSpec], loads: Sequence[float], candidates: Sequence[Holder]
) -> list[Holder]:
    """Return an owner for each tensor, which works on it as a whole: balance the `loads` of the
    candidates, and, as far as balance permits, move the fewest bytes from `tensors` to the owners.
    Deterministic, so that all ranks agree.

    The limit of a candidate's load is that of longest-processing-time-first scheduling (Graham
    1969: at most 4/3 of the optimum), which ignores where tensors are. Within it tensors choose the
    candidate that holds most of them, and then move or change places while that saves bytes.
    """
    if not tensors:
        return []
    by_spec = {spec: _held_bytes(spec, candidates) for spec in dict.fromkeys(tensors)}
    held = np.stack([by_spec[spec] for spec in tensors])
    work = np.asarray(loads, float)
    # Among equal loads, those whose place matters most choose first.
    order = np.lexsort((np.arange(len(tensors)), -np.ptp(held, axis=1), -work))
    # Sums of the same loads in another order may differ in the last bits.
    limit = _longest_first(work[order].tolist(), len(candidates)) * (1 + 1e-9)
    totals = np.zeros(len(candidates))
    chosen = np.zeros(len(tensors), np.int64)
    for index in order.tolist():
        # One that has room is preferred, then one that holds more, then the least loaded one.
        has_room = totals + work[index] <= limit
        keys = (totals, -held[index], ~has_room) if has_room.any() else (totals,)
        chosen[index] = np.lexsort(keys)[0]
        totals[chosen[index]] += work[index]
    _improve(chosen, held, work, totals, limit)
    return [candidates[index] for index in chosen.tolist()]


def _improve(
    chosen: np.ndarray, held: np.ndarray, work: np.ndarray, totals: np.ndarray, limit: float
) -> None:
    """Move tensors to candidates that hold more of them, or let two change places, while the sum of
    what owners hold grows and no load exceeds `limit`. Changes `chosen` and `totals`."""
    tensors = np.arange(len(chosen))
    is_better = True
    while is_better:
        is_better = False
        for tensor in np.flatnonzero(held[tensors, chosen] < held.max(axis=1)).tolist():
            here = chosen[tensor]
            moved = np.where(
                totals + work[tensor] <= limit, held[tensor] - held[tensor, here], -np.inf
            )
            swapped = (
                held[tensor, chosen] - held[tensor, here] + held[:, here] - held[tensors, chosen]
            )
            fits = (totals[here] - work[tensor] + work <= limit) & (
                totals[chosen] - work + work[tensor] <= limit
            )
            swapped = np.where(fits & (chosen != here), swapped, -np.inf)
            if max(moved.max(), swapped.max()) <= 0:
                continue
            is_better = True
            partner = int(swapped.argmax()) if swapped.max() > moved.max() else None
            to = int(moved.argmax()) if partner is None else int(chosen[partner])
            chosen[tensor] = to
            totals[here] -= work[tensor]
            totals[to] += work[tensor]
            if partner is not None:
                chosen[partner] = here
                totals[to] -= work[partner]
                totals[here] += work[partner]


def _longest_first(loads: Sequence[float], count: int) -> float:
    """Return the largest sum of `loads`, in descending order, if each goes to the smallest of
    `count` sums."""
    sums = [0.0] * count
    for load in loads:
        heapq.heapreplace(sums, sums[0] + load)
    return max(sums)


def _held_bytes(spec: TensorSpec, candidates: Sequence[Holder]) -> np.ndarray:
    """Return the bytes [candidate] of a tensor that each candidate has."""
    index = holder_index(spec.layout.with_num_dims(len(spec.shape)), len(spec.shape))
    positions = [index.position(holder) for holder in candidates]
    holding = [candidate for candidate, position in enumerate(positions) if position is not None]
    part = index.part_of[np.array([positions[candidate] for candidate in holding], np.int64)]
    held = np.zeros(len(candidates))
    held[holding] = spec.dtype.itemsize
    for length, splits, stride, count in zip(
        spec.shape, index.splits, index.strides, index.counts, strict=True
    ):
        held[holding] *= shard_sizes(length, splits)[part // stride % count]
    return held


@lru_cache(maxsize=4096)
def holder_index(layout: Layout, ndim: int) -> HolderIndex:
    """Return the roles of a layout's holders for a tensor of `ndim` dims."""
    return HolderIndex(layout, ndim)


@lru_cache(maxsize=256)
def matching_positions(mine: HolderMesh, peers: HolderMesh) -> np.ndarray:
    """Return, for each position in the first mesh, the position of the same holder in the second;
    -1 if absent."""
    if mine.holders == peers.holders:
        return np.arange(len(mine.holders))
    positions = (peers.position(holder) for holder in mine.holders)
    return np.array([-1 if position is None else position for position in positions])
