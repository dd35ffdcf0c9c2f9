"""Rectangles that a rank writes into shared memory for others, and their places in its slot."""

from itertools import product
from math import prod

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_lite.redistribute import HolderMesh, Layout, plan
from torchtitan_lite.redistribute.program import TensorTask
from torchtitan_lite.redistribute.shared_memory_transport import (
    _joined_writes,
    _sent_part,
    _SlotCopy,
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


def _task(src: list[Placement], dst: list[Placement], shape: tuple[int, ...]) -> TensorTask:
    """The task of rank 1 of 4."""
    mesh = HolderMesh((2, 2), (0, 1, 2, 3), ("dp", "tp"))
    return TensorTask(plan(Layout(mesh, src), Layout(mesh, dst), shape, torch.float32), 1, 4)
