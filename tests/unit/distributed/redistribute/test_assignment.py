"""Owners of tensors are assigned so that work is balanced and most data stays in place."""

import itertools
import random
from collections.abc import Sequence
from math import prod
from typing import Any

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


# The last: moves and swaps alone would not get from balance to the fewest bytes.
@pytest.mark.parametrize("seed", [*range(12), 487])
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


@pytest.mark.parametrize("seed", range(20))
def test_no_move_of_a_tensor_and_no_swap_of_two_saves_bytes(seed: int) -> None:
    draw, mesh = random.Random(seed), HolderMesh.ranks(2, 2)
    kinds = [Shard(0), Shard(1), Replicate()]
    tensors = [
        TensorSpec(
            Layout(mesh, draw.choices(kinds, k=2)),
            (draw.randint(1, 9), draw.randint(1, 9)),
            torch.uint8,
        )
        for _ in range(draw.randint(2, 8))
    ]
    loads = [draw.randint(1, 6) / 8 for _ in tensors]
    held = [[prod(t.layout.local_shape(t.shape, rank)) for rank in range(4)] for t in tensors]

    def stays(owners: Sequence[Any]) -> int:
        return sum(of_tensor[owner] for of_tensor, owner in zip(held, owners, strict=True))

    def largest(owners: Sequence[Any]) -> float:
        sums: dict[Any, float] = dict.fromkeys(owners, 0.0)
        for load, owner in zip(loads, owners, strict=True):
            sums[owner] += load
        return max(sums.values())

    chosen = choose_owners(tensors, loads, range(4))
    limit = _longest_first(loads, 4)
    assert largest(chosen) <= limit
    numbers = range(len(tensors))
    moved = [[*chosen[:n], rank, *chosen[n + 1 :]] for n in numbers for rank in range(4)]
    swapped = [
        [chosen[{one: other, other: one}.get(n, n)] for n in numbers]
        for one, other in itertools.combinations(numbers, 2)
    ]
    for owners in (*moved, *swapped):
        assert largest(owners) > limit or stays(owners) <= stays(chosen)


def _longest_first(loads: Sequence[float], count: int) -> float:
    """The largest load if each goes to the least loaded owner, the largest ones first."""
    sums = [0.0] * count
    for load in sorted(loads, reverse=True):
        sums[sums.index(min(sums))] += load
    return max(sums)


def test_owners_of_no_tensors() -> None:
    assert choose_owners([], [], range(3)) == []
