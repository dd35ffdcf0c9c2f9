"""Owners of tensors are assigned so that work is balanced and most data stays in place."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from torchtitan_lite.distributed.redistribute import (
    HolderMesh,
    Layout,
    TensorSpec,
    choose_owners,
    plan,
)


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
