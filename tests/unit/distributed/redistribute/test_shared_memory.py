"""Ranks that wait in shared memory notice at once that a peer has died."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness.ranks import FORK_SERVER
from tests.harness.threads import run_on_threads
from torchtitan_lite.core.errors import RedistributionError
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.distributed.redistribute.execution.shared_memory import (
    SharedMemory,
    is_supported,
)

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs Linux on x86-64")


def _wait_for_a_dead_peer(rank: int, store: str, folder: Path, *, writes: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    memory = SharedMemory(group, 1 << 16)
    assert memory.covers_all
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
        if writes:
            memory.signal_written(0)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        memory.wait_written([1], 0)
        result = "written"
    except RedistributionError as error:
        result = str(error)
    (folder / "result").write_text(f"{time.monotonic() - began}\n{result}")
    os._exit(0)


@pytest.mark.parametrize("writes", [False, True])
def test_a_dead_peer_is_noticed_unless_it_did_its_part(writes: bool, tmp_path: Path) -> None:
    processes = [
        FORK_SERVER.Process(
            target=_wait_for_a_dead_peer,
            args=(rank, str(tmp_path / "store"), tmp_path),
            kwargs={"writes": writes},
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
    seconds, result = (tmp_path / "result").read_text().split("\n", 1)
    # Beside the half second for which it lives.
    assert float(seconds) < 10
    expected = "Rank 1 of the group did not write its part of an exchange and has ended."
    assert result == ("written" if writes else expected)


def test_the_ranks_of_a_group_share_memory_with_each_other_only() -> None:
    def share() -> tuple[list[int], bool]:
        mesh = Mesh(detect_device("cpu"), ParallelDims(dp_shard=2, tp=2))
        memory = SharedMemory(mesh.device_mesh.get_group("tp"), 8192)
        for file in memory._files.values():
            file.close()
        return list(memory.peers), memory.covers_all

    assert run_on_threads(4, share) == [([0, 1], True)] * 4


@pytest.mark.parametrize("what", ["written", "read"])
def test_a_part_is_awaited(mesh: Mesh, what: str) -> None:
    assert dist.group.WORLD is not None
    memory = SharedMemory(dist.group.WORLD, 1 << 16)
    memory.timeout_s = 0.0
    wait, signal = (getattr(memory, f"{verb}_{what}") for verb in ("wait", "signal"))
    for bucket in range(2):
        with pytest.raises(RedistributionError, match=r"did not (write|read) its part"):
            wait([0], bucket)
        signal(bucket)
        wait([0], bucket)
    for file in memory._files.values():
        file.close()
