"""Memory that ranks share, where it fails: too little of it, and a rank that does not come."""

import errno
import os
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.pool import WorkerPool
from torchtitan_lite.errors import RedistributionError
from torchtitan_lite.redistribute.shared_memory import FOLDER, SharedMemory

Pools = Callable[[int], WorkerPool]


def test_a_rank_without_memory_is_no_neighbour(pools: Pools) -> None:
    assert pools(3).run(_one_has_none) == [{0, 2}, {1}, {0, 2}]


def test_a_rank_that_does_not_come_is_named(pools: Pools) -> None:
    pools(3).run(_one_does_not_come)


def test_nothing_is_left_on_the_file_system(pools: Pools) -> None:
    before = set(os.listdir(FOLDER))
    pools(3).run(_make)
    left = {name for name in set(os.listdir(FOLDER)) - before if "redistribute" in name}
    assert not left


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _one_has_none() -> set[int]:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if dist.get_rank() != 1:
        return set(SharedMemory(_world(), 1 << 16).neighbours)
    with patch("os.posix_fallocate", full):
        memory = SharedMemory(_world(), 1 << 16)
    assert memory.problem is not None and "No space left" in memory.problem
    assert not memory.covers_all
    return set(memory.neighbours)


def _one_does_not_come() -> None:
    memory = SharedMemory(_world(), 1 << 16)
    assert memory.covers_all
    if dist.get_rank() == 0:
        memory.wrote(0)
        memory.timeout_s = 0.1
        with pytest.raises(RedistributionError, match="Rank 1 of the group did not write"):
            memory.wait_written([1], 0)
    else:
        memory.wait_written([0], 0)
    dist.barrier()


def _make() -> None:
    SharedMemory(_world(), 1 << 16)
