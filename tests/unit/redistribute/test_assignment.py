"""Ranks of a new mesh are assigned so that most data stays in place."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute import HolderMesh, Layout, choose_holders, plan
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


def _whole(count: int) -> Layout:
    return Layout(HolderMesh.ranks(count), [Replicate()])


def _moved(moves: list[TensorMove], mesh: HolderMesh) -> int:
    return sum(
        plan(move.src, Layout(mesh, move.dst.placements), move.shape, move.dtype).moved_bytes
        for move in moves
    )
