"""Ranks of a new mesh, and owners of tensors, are assigned so that most data stays in place."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute import (
    HolderMesh,
    Layout,
    TensorSpec,
    choose_holders,
    choose_owners,
    plan,
)
from torchtitan_lite.redistribute.intersections import TensorMove

SHAPES = [(12, 8), (24, 6), (5, 7)]


@pytest.mark.parametrize("count", [2, 3])
def test_no_other_assignment_moves_less(count: int) -> None:
    src = Layout(HolderMesh.ranks(4), [Shard(0)])
    dst = Layout(HolderMesh.ranks(count), [Shard(0)])
    moves = [TensorMove(src, dst, shape, torch.float32) for shape in SHAPES]
    chosen = choose_holders(moves, range(4))
    of_all = [
        _moved(moves, HolderMesh((count,), ranks))
        for ranks in itertools.permutations(range(4), count)
    ]
    assert _moved(moves, chosen) == min(of_all) < _moved(moves, HolderMesh.ranks(count))


def test_ties_keep_the_axes_and_the_order() -> None:
    mesh = HolderMesh((2, 2), (0, 1, 2, 3), ("copy", "tp"))
    full = Layout(HolderMesh.ranks(4), [Replicate()])
    chosen = choose_holders(
        [TensorMove(full, Layout(mesh, [Replicate(), Shard(0)]), (4, 4), torch.float32)], range(4)
    )
    assert chosen == mesh


def test_impossible_assignments_are_rejected() -> None:
    one = TensorMove(_whole(2), _whole(2), (4,), torch.float32)
    with pytest.raises(LayoutError, match="needs 2 holders, and 1 can be chosen"):
        choose_holders([one], [0])
    with pytest.raises(LayoutError, match="lie on 2 meshes"):
        choose_holders([one, one._replace(dst=_whole(3))], range(4))


def _random_tensors(draw: random.Random, count: int) -> list[TensorSpec]:
    placements = [Shard(0), Shard(1), Replicate()]
    return [
        TensorSpec(
            Layout(HolderMesh.ranks(3), [draw.choice(placements)]),
            (draw.randint(1, 9), draw.randint(1, 9)),
            torch.float32,
        )
        for _ in range(count)
    ]


def _score(
    tensors: Sequence[TensorSpec], loads: Sequence[float], owners: Sequence[object]
) -> tuple[float, int]:
    """Return the largest load, and the moved bytes."""
    sums = dict.fromkeys(range(3), 0.0)
    moved = 0
    for tensor, load, owner in zip(tensors, loads, owners, strict=True):
        assert isinstance(owner, int)
        sums[owner] += load
        dst = Layout.on_holder(owner)
        moved += plan(tensor.layout, dst, tensor.shape, tensor.dtype).moved_bytes
    return max(sums.values()), moved


@pytest.mark.parametrize("seed", range(12))
def test_owners_of_equal_work_are_balanced_and_move_least(seed: int) -> None:
    draw = random.Random(seed)
    tensors = _random_tensors(draw, draw.randint(1, 5))
    loads = [2.0] * len(tensors)
    chosen = choose_owners(tensors, loads, range(3))
    scores = [
        _score(tensors, loads, owners)
        for owners in itertools.product(range(3), repeat=len(tensors))
    ]
    assert _score(tensors, loads, chosen) == min(scores)


@pytest.mark.parametrize("seed", range(12))
def test_owners_of_unequal_work_are_balanced(seed: int) -> None:
    draw = random.Random(seed)
    tensors = _random_tensors(draw, draw.randint(2, 6))
    loads = [float(draw.randint(1, 9)) for _ in tensors]
    largest, _ = _score(tensors, loads, choose_owners(tensors, loads, range(3)))
    optimum = min(
        max(
            sum(load for load, owner in zip(loads, owners, strict=True) if owner == one)
            for one in range(3)
        )
        for owners in itertools.product(range(3), repeat=len(tensors))
    )
    assert largest <= 4 / 3 * optimum


def test_owners_of_no_tensors() -> None:
    assert choose_owners([], [], range(3)) == []


def _whole(count: int) -> Layout:
    return Layout(HolderMesh.ranks(count), [Replicate()])


def _moved(moves: list[TensorMove], mesh: HolderMesh) -> int:
    return sum(
        plan(move.src, Layout(mesh, move.dst.placements), move.shape, move.dtype).moved_bytes
        for move in moves
    )
