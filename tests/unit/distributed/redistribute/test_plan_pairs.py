"""Plans between all pairs of layouts of a mesh are correct and move the minimum."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.redistribution.bound import fewest_elements
from tests.redistribution.layouts import all_layouts
from tests.redistribution.reference import check_bound, replay
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, plan
from torchtitan_lite.distributed.redistribute.planning.transfers import stripes

SHAPES = [(8, 12), (5, 7), (3, 0)]
# By mesh: every n-th of all pairs and shapes. Primes that do not divide the number of layouts, so
# that none is skipped.
EVERY = {(4,): 5, (2, 2): 31, (3, 2): 101, (2, 2, 2): 20011}
EVERY_IN_MATRIX = {(4,): 1, (2, 2): 1, (3, 2): 1, (2, 2, 2): 151}


@pytest.mark.parametrize("mesh_shape", EVERY)
def test_a_sample_of_pairs_is_correct_and_minimal(mesh_shape: tuple[int, ...]) -> None:
    _check_pairs(mesh_shape, EVERY[mesh_shape])


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh_shape", EVERY_IN_MATRIX)
def test_all_pairs_are_correct_and_minimal(mesh_shape: tuple[int, ...]) -> None:
    _check_pairs(mesh_shape, EVERY_IN_MATRIX[mesh_shape])


def _check_pairs(mesh_shape: tuple[int, ...], every: int) -> None:
    actual = all_layouts(HolderMesh.ranks(*mesh_shape), 2)
    rng = np.random.default_rng(math.prod(mesh_shape))
    cases = itertools.islice(itertools.product(actual, actual, SHAPES), 0, None, every)
    for src, dst, shape in cases:
        made = plan(src, dst, shape, torch.float32)
        moved = replay(made, rng)
        assert made.moved_bytes == moved * 4, (str(src), str(dst), shape)
        assert moved == fewest_elements(src, dst, shape), (str(src), str(dst), shape)


# Large enough that sources share what they send.
LARGE_SHAPES = [(1 << 20,), (1 << 10, 1 << 10)]


_BY_HOLDERS = pytest.mark.parametrize("first", [0, 8], ids=["the same holders", "other holders"])
_BY_SHAPE = pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)


@_BY_HOLDERS
@_BY_SHAPE
def test_the_bound_of_a_round_holds_for_large_tensors(shape: tuple[int, ...], first: int) -> None:
    _check_bounds(shape, first, 7)


@pytest.mark.matrix
@_BY_HOLDERS
@_BY_SHAPE
def test_the_bound_of_a_round_holds_for_all_pairs(shape: tuple[int, ...], first: int) -> None:
    _check_bounds(shape, first, 1)


def _check_bounds(shape: tuple[int, ...], first: int, every: int) -> None:
    pairs = itertools.product(
        all_layouts(HolderMesh.ranks(2, 2), len(shape)),
        all_layouts(HolderMesh.ranks(2, 2, first=first), len(shape)),
    )
    for src, dst in itertools.islice(pairs, 0, None, every):
        check_bound(plan(src, dst, shape, torch.float32))


def test_the_bound_holds_where_one_replica_sends_a_whole_contribution() -> None:
    src = Layout(HolderMesh.ranks(4, 4), [Replicate(), Partial()])
    dst = Layout(HolderMesh.ranks(16, 2, first=16), [Shard(0), Partial()])
    check_bound(plan(src, dst, (1 << 20,), torch.float32))


def test_the_bound_holds_where_replicas_divide_many_small_pieces() -> None:
    src = Layout(HolderMesh.ranks(2, 2), [Replicate(), Shard(0)])
    dst = Layout(HolderMesh.ranks(8, 2, first=4), [Shard(0), Shard(0)], {0: (1, 0)})
    check_bound(plan(src, dst, (4000,), torch.float32))


@pytest.mark.parametrize("shape", [(200, 7), (1, 200, 7)])
def test_replicas_that_divide_many_rows_send_whole_ones(shape: tuple[int, ...]) -> None:
    replicated = [Replicate()]
    src = Layout(HolderMesh.ranks(3), replicated)
    made = plan(src, Layout(HolderMesh.ranks(1, first=3), replicated), shape, torch.float32)
    (sent,) = made.transfers(3)
    assert len(sent.receives) == 3
    assert all(piece.start % 7 == piece.stop % 7 == 0 for piece in sent.receives)


@pytest.mark.parametrize(("start", "stop", "count"), [(0, 10, 4), (3, 20, 3), (5, 6, 2)])
def test_stripes_are_consecutive_and_as_equal_as_possible(
    start: int, stop: int, count: int
) -> None:
    parts = stripes(start, stop, count, 1)
    assert [begin for begin, _ in parts] == [start, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == stop
    sizes = [end - begin for begin, end in parts]
    assert len(sizes) == count and max(sizes) - min(sizes) <= 1
