"""Partitions of one dim and their intersections, compared with lists of indices."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from tests.redistribution.reference import strided
from torchtitan_lite.distributed.redistribute.planning.partition import (
    Split,
    dim_intersections,
    intervals,
    num_shards,
    partition,
    shard_sizes,
)

Splits = tuple[Split, ...]
LENGTHS = [0, 1, 2, 6, 7, 13, 16]
ONE = [(Split(1, size, factor),) for size in (1, 2, 3) for factor in (1, 2, 3)]
# Axes in and against the order of the mesh, and not next to each other.
TWO = [
    (Split(2, a, f), Split(axis, b, g))
    for axis in (0, 3)
    for a, b in ((2, 2), (2, 3), (3, 2))
    for f, g in ((1, 1), (1, 2), (2, 1), (2, 3))
]
THREE = [
    (Split(1, 2), Split(2, 3), Split(0, 2)),
    (Split(2, 2, 2), Split(0, 2), Split(1, 3, 2)),
]
ALL: list[Splits] = [(), *ONE, *TWO, *THREE]


def _shards(length: int, splits: Splits) -> list[list[int]]:
    """The indices of each shard, as each split is defined, by the number of the shard."""
    by_axis = sorted(splits)
    found = []
    for at in itertools.product(*(range(split.size) for split in by_axis)):
        index = dict(zip((split.axis for split in by_axis), at, strict=True))
        indices = np.arange(length)
        for split in splits:
            indices = strided(indices, split.size, index[split.axis], split.factor)
        found.append(sorted(indices.tolist()))
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_a_partition_has_the_shards_of_its_splits(length: int) -> None:
    for splits in ALL:
        expected, found = _shards(length, splits), partition(length, splits)
        assert found.starts.tolist() == sorted({0, length, *found.starts.tolist()})
        assert num_shards(splits) == len(expected)
        assert shard_sizes(length, splits).tolist() == [len(shard) for shard in expected]
        assert shard_sizes(length, splits).dtype == np.int64
        elements = [
            (start + n, part, local + n)
            for start, stop, part, local in zip(
                found.starts[:-1].tolist(), found.starts[1:].tolist(), found.part, found.local,
                strict=True,
            )
            for n in range(stop - start)
        ]  # fmt: skip
        assert elements == sorted(
            (index, number, place)
            for number, shard in enumerate(expected)
            for place, index in enumerate(shard)
        )
        for number, shard in enumerate(expected):
            ranges = [range(a, a + n) for a, n in intervals(length, splits, number)]
            assert list(itertools.chain(*ranges)) == shard
            # Neighbors in the dim are one interval.
            assert all(one.stop < other.start for one, other in itertools.pairwise(ranges))


@pytest.mark.parametrize("length", LENGTHS)
def test_intersections_are_the_common_indices(length: int) -> None:
    # From the fifth: a pair with adjacent ranges after a gap.
    pairs = itertools.islice(itertools.product(ALL, ALL), 4, None, 7)
    for src, dst in [*pairs, ((), ()), *((splits, splits) for splits in THREE)]:
        ours, theirs = _shards(length, src), _shards(length, dst)
        found = dim_intersections(length, src, dst)
        of_src = [
            {n: s for n, other in enumerate(theirs) if (s := _ranges(one, other))} for one in ours
        ]
        of_dst = [
            {n: s for n, one in enumerate(ours) if (s := _ranges(one, other))} for other in theirs
        ]
        assert [found.of_src(n) for n in range(len(ours))] == of_src
        assert [found.of_dst(n) for n in range(len(theirs))] == of_dst
        assert found.max_of_src == max(map(len, of_src))
        numbers = np.array([*np.ndindex(len(ours), len(theirs))])
        assert found.common(*numbers.T).tolist() == [
            len(set(ours[n]) & set(theirs[k])) for n, k in numbers.tolist()
        ]


def _ranges(one: Sequence[int], other: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """The longest runs of common indices that are adjacent in both shards."""
    runs: list[list[int]] = []
    for index in sorted({*one} & {*other}):
        here, there = one.index(index), other.index(index)
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (here, there):
            runs[-1][2] += 1
        else:
            runs.append([here, there, 1])
    return tuple((a, b, n) for a, b, n in runs)
