"""Memory that ranks share, where it fails: too little of it, and a rank that does not come."""

import errno
import os
import time
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from tests.pool import WorkerPool
from torchtitan_lite.errors import RedistributionError
from torchtitan_lite.redistribute import ExchangeOptions, HolderMesh, Layout, plan
from torchtitan_lite.redistribute.execute import FusedExchange
from torchtitan_lite.redistribute.program import TensorTask
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
    deadline = time.monotonic() + 5
    # Those of another run on this machine go.
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= set(os.listdir(FOLDER))
    assert not left


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _one_has_none() -> set[int]:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if dist.get_rank() != 1:
        return _exchanged_with(SharedMemory(_world(), 1 << 16))
    with patch("os.posix_fallocate", full):
        memory = SharedMemory(_world(), 1 << 16)
    assert memory.problem is not None and "No space left" in memory.problem
    assert not memory.covers_all
    return _exchanged_with(memory)


def _exchanged_with(memory: SharedMemory) -> set[int]:
    """The neighbours, after an exchange in which all take part."""
    mesh = HolderMesh.ranks(3)
    found = plan(Layout(mesh, [Shard(0)]), Layout(mesh, [Shard(1)]), (6, 9), torch.float32)
    rank, whole = dist.get_rank(), torch.arange(54.0).view(6, 9)
    out = torch.zeros(6, 3)
    with patch("torchtitan_lite.redistribute.execute.shared_memory_for", lambda _: memory):
        options = ExchangeOptions(bucket_bytes=1 << 14)
        tasks = [TensorTask(found, rank, 4)]
        execution = FusedExchange(tasks, range(3), _world(), torch.device("cpu"), options)
        execution.run([whole[2 * rank : 2 * rank + 2].contiguous()], [out])
    assert torch.equal(out, whole[:, 3 * rank : 3 * rank + 3])
    return set(memory.peers)


def _one_does_not_come() -> None:
    memory = SharedMemory(_world(), 1 << 16)
    assert memory.covers_all
    if dist.get_rank() == 0:
        memory.signal_written(0)
        memory.timeout_s = 0.1
        with pytest.raises(RedistributionError, match="Rank 1 of the group did not write"):
            memory.wait_written([1], 0)
    else:
        memory.wait_written([0], 0)
    dist.barrier()


def _make() -> None:
    SharedMemory(_world(), 1 << 16)
