"""Rectangles that a rank writes into shared memory for others, and their places in its slot."""

import random
from itertools import product
from math import prod
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, plan
from torchtitan_lite.distributed.redistribute.execution.program import TensorTask
from torchtitan_lite.distributed.redistribute.execution.shared_memory import _peers
from torchtitan_lite.distributed.redistribute.execution.shared_memory_transport import (
    SharedMemoryTransport,
    _joined_writes,
    _sent_part,
    _SlotCopy,
    _without_gaps,
)


def write(columns: tuple[int, int], *, tensor: int = 0, offset: int = 0) -> _SlotCopy:
    """All 4 rows and some columns of a shard of 4 x 12 elements, which begins at column 100."""
    rows, inside = slice(0, 4), slice(*columns)
    region = slice(columns[0] + 100, columns[1] + 100)
    return _SlotCopy(0, tensor, (rows, region), offset, (4, 12), (rows, inside))


def test_what_several_ranks_read_of_each_row_is_written_at_once() -> None:
    assert _joined_writes([write((0, 3)), write((6, 9)), write((9, 12))]) == [write((0, 12))]


def test_few_elements_of_a_run_and_other_runs_are_written_apart() -> None:
    sparse = [write((0, 2)), write((10, 12))]
    assert _joined_writes(sparse) == sparse
    apart = [write((0, 6)), write((0, 6), tensor=1), write((0, 6), offset=48)]
    assert _joined_writes(apart) == apart


def test_columns_that_are_apart_in_the_tensor_are_written_apart() -> None:
    rows, inside = slice(0, 4), slice(0, 3)
    next_to = [
        _SlotCopy(0, 0, (rows, slice(100, 103)), 0, (4, 6), (rows, inside)),
        _SlotCopy(0, 0, (rows, slice(200, 203)), 0, (4, 6), (rows, slice(3, 6))),
    ]
    assert _joined_writes(next_to) == next_to


def test_a_slot_omits_indices_that_are_not_sent() -> None:
    # Each replica sends a half of what two holders of experts lack of them.
    task = _task([Replicate(), Shard(1)], [Shard(0), Shard(0)], (8, 64, 64))
    part = _sent_part(task, 1, 0)
    blocks = [block for one in task.transfers[0].sends for block in task.rectangles(one, 0)]
    assert prod(part.shape) == sum(prod(block.shape) for block in blocks) == 2 * 32 * 64
    places = [(part.position(block.src), block.shape) for block in blocks]
    covered = {
        index
        for first, shape in places
        for index in product(*(range(a, a + n) for a, n in zip(first, shape, strict=True)))
    }
    assert covered == set(product(*map(range, part.shape)))


def test_a_slot_has_the_whole_shard_if_most_is_sent_or_it_is_reduced() -> None:
    most_sent = _task([Shard(0), Shard(0)], [Shard(1), Shard(1)], (8, 8))
    assert _sent_part(most_sent, 1, 0).shape == (2, 8)
    reduced = _task([Partial(), Partial()], [Shard(0), Shard(0)], (8, 8))
    assert _sent_part(reduced, 1, 0).shape == (8, 8)


class _Memory:
    """The shared memory of four ranks, as seen by one of them."""

    peers = frozenset(range(4))
    slot_bytes = 1 << 12

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def region(self, rank: int) -> np.ndarray:
        return np.zeros(2 * self.slot_bytes, np.uint8)


def _num_buckets(tasks: list[TensorTask], number: int, near: frozenset[int]) -> int:
    rank = tasks[0].me
    assert isinstance(rank, int)
    memory = cast("Any", _Memory(rank))
    transport = SharedMemoryTransport(tasks, number, range(4), memory, 1 << 12, near, scales=True)
    return len(transport._buckets)


@pytest.mark.parametrize("seed", range(6))
def test_all_ranks_have_the_same_buckets(seed: int) -> None:
    """Otherwise they would wait for each other; also those that are near different ones."""
    choice = random.Random(seed)
    mesh = HolderMesh((2, 2), (0, 1, 2, 3), ("dp", "tp"))
    smaller = HolderMesh((2,), (1, 3), ("dp",))
    kinds: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial()]
    plans = []
    for _ in range(8):
        shape = (choice.randint(20, 60), choice.randint(20, 60))
        src = Layout(mesh, choice.choices(kinds, k=2))
        dst = choice.choice(
            [Layout(mesh, choice.choices(kinds[:3], k=2)), Layout(smaller, [Shard(0)])]
        )
        plans.append(plan(src, dst, shape, torch.float64))
    for number in range(max(len(one.rounds) for one in plans)):
        counts = {
            _num_buckets([TensorTask(one, rank, 4) for one in plans], number, near)
            for rank in range(4)
            for near in (frozenset(range(4)), frozenset({rank}), frozenset({rank, 3 - rank}))
        }
        assert len(counts) == 1


def test_intervals_that_touch_are_one() -> None:
    assert _without_gaps([(4, 6), (0, 2), (2, 3), (1, 2)]) == ((0, 3, 0), (4, 6, 3))


def test_fewer_buckets_if_little_of_the_shards_is_sent() -> None:
    near = frozenset(range(4))
    little = _task([Replicate(), Shard(1)], [Shard(0), Shard(0)], (8, 64, 64))
    # Shards of 64 KiB, of which 16 are sent, in slots of 4.
    assert _num_buckets([little], 0, near) == 4
    most = _task([Shard(0), Shard(0)], [Shard(1), Shard(1)], (128, 128))
    assert _num_buckets([most], 0, near) == 4


def test_peers_are_ranks_that_see_the_same_ones() -> None:
    sees = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]).bool()
    assert [_peers(sees, rank) for rank in range(4)] == [{0, 1}, {0, 1}, {2}, {3}]
    # 0 sees 1 and 2, which do not see each other, and 3 sees 0, which does not see 3.
    sees = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]).bool()
    assert [_peers(sees, rank) for rank in range(4)] == [{0}, {1}, {2}, {3}]


def _task(src: list[Placement], dst: list[Placement], shape: tuple[int, ...]) -> TensorTask:
    """The task of rank 1 of 4."""
    mesh = HolderMesh((2, 2), (0, 1, 2, 3), ("dp", "tp"))
    return TensorTask(plan(Layout(mesh, src), Layout(mesh, dst), shape, torch.float32), 1, 4)
