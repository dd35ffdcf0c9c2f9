"""The fewest elements that must move from one layout to another, counted element by element.

Per element with p contributions that are joined, and n replicas in each contribution of the
destination: with p = 1, every replica of the contribution that carries it needs it, but those that
have it; with more, p - 1 or p contributions go to one holder, and from it to n - 1 others.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from torch.distributed.tensor import Partial, Replicate

from tests.redistribution.indices import coordinates, elements_of
from torchtitan_lite.redistribute import Layout


def fewest_elements(src: Layout, dst: Layout, shape: tuple[int, ...]) -> int:
    """The least over all ways in which contributions may stay apart, axis by axis."""
    costs = [_cost(src, dst, shape, kept) for kept in _pairings(src, dst)]
    copies = [
        Replicate() if isinstance(p, Partial) and p.reduce_op in ("avg", "min", "max") else p
        for p in dst.placements
    ]
    if src.reduce_op is None and tuple(copies) != dst.placements:
        # Copies of a value join to that value: nothing moves where all have it already.
        everywhere = Layout(dst.mesh, copies, dst.shard_order)
        if _cost(src, everywhere, shape, ()) == 0:
            costs.append(0)
    return min(costs)


def _pairings(src: Layout, dst: Layout) -> Iterator[tuple[tuple[int, int], ...]]:
    """All sets of pairs of contribution axes of one size."""
    for count in range(min(len(src.partial_axes), len(dst.partial_axes)) + 1):
        for ours in itertools.combinations(src.partial_axes, count):
            for theirs in itertools.permutations(dst.partial_axes, count):
                pairs = tuple(zip(ours, theirs, strict=True))
                if all(src.mesh.shape[a] == dst.mesh.shape[b] for a, b in pairs):
                    yield pairs


def _cost(src: Layout, dst: Layout, shape: tuple[int, ...], kept: Sequence[tuple[int, int]]) -> int:
    """The fewest elements where the contributions of these pairs of axes stay apart."""
    has = _held(src, shape, [one for one, _ in kept])
    needs = _held(dst, shape, [other for _, other in kept])
    joined = [a for a in src.partial_axes if a not in [one for one, _ in kept]]
    num_joined = int(np.prod([src.mesh.shape[axis] for axis in joined], dtype=np.int64))
    num_elements = int(np.prod(shape, dtype=np.int64))
    num_kept = int(np.prod([src.mesh.shape[one] for one, _ in kept], dtype=np.int64))
    apart = [axis for axis in dst.partial_axes if axis not in [other for _, other in kept]]
    wanted: dict[tuple[int, ...], np.ndarray] = {}
    present: dict[tuple[int, ...], np.ndarray] = {}
    for holder, at in coordinates(dst.mesh):
        copy = tuple(at[axis] for axis in apart)
        zeros = np.zeros(num_elements * num_kept, np.int64)
        found, there = wanted.setdefault(copy, zeros.copy()), present.setdefault(copy, zeros.copy())
        found[needs[holder]] += 1
        if holder in has:
            there[np.intersect1d(needs[holder], has[holder])] += 1
    replicas, both = np.stack(list(wanted.values())), np.stack(list(present.values()))
    if num_joined == 1:
        return int((replicas - both).min(axis=0).sum())
    saved = (both.max(axis=0) > 0).astype(np.int64)
    return int((num_joined + replicas[0] - 1 - saved).sum())


def _held(layout: Layout, shape: tuple[int, ...], kept: Sequence[int]) -> dict:
    """Holder -> the numbers of its elements, those of other kept contributions counted apart."""
    size = int(np.prod(shape, dtype=np.int64))
    held = {}
    for holder, at in coordinates(layout.mesh):
        number = 0
        for axis in kept:
            number = number * layout.mesh.shape[axis] + at[axis]
        held[holder] = number * size + elements_of(layout, shape, at).ravel()
    return held
