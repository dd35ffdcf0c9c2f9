"""A group of ranks under an agent: which processes have ranks, which of them are lost, and what is
killed. The agent and its children are real processes that only write heartbeats."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from torchtitan_lite.core.rank.heartbeat import HeartbeatMemory
from torchtitan_lite.core.rank.processes import ExitStatus
from torchtitan_lite.fault_tolerance.supervision.failures.failure_cause import diagnose_failure
from torchtitan_lite.fault_tolerance.supervision.launcher import worker_group
from torchtitan_lite.fault_tolerance.supervision.launcher.worker_group import WorkerGroup
from torchtitan_lite.fault_tolerance.supervision.restart_policy import Failure

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher needs Linux")

_CHILD = """
import os, pathlib, sys, time
from torchtitan_lite.core.rank.heartbeat import HEARTBEATS, HeartbeatWriter
from torchtitan_lite.core.phases import Phase
folder = pathlib.Path(sys.argv[1])
(folder / f"pid-{os.getpid()}").touch()
writer = None
while True:
    order = folder / f"order-{os.getpid()}"
    text = order.read_text() if order.exists() else ""
    if text.startswith("rank") and writer is None:
        writer = HeartbeatWriter(os.environ[HEARTBEATS], int(text[4:]), {}, 10.0)
        writer.entered(Phase.COMPUTE, 3)
        (folder / f"training-{os.getpid()}").touch()
    if text == "leave":
        writer.erase()
        sys.exit(0)
    time.sleep(0.01)
"""
_AGENT = """
import subprocess, sys, time
def start():
    command = [sys.executable, "-c", sys.argv[2], sys.argv[1]]
    return subprocess.Popen(command, start_new_session=True)
children = [start() for _ in range(3)]
while True:
    children = [child if child.poll() is None else start() for child in children]
    time.sleep(0.02)
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[WorkerGroup]:
    """Two ranks and a spare."""
    command = [sys.executable, "-c", _AGENT, str(tmp_path), _CHILD]
    found = WorkerGroup(command, dict(os.environ), 2, tmp_path / "logs", has_agent=True)
    yield found
    found.kill()
    wait_until(lambda: polled(found).has_ended)
    found.close()


def polled(group: WorkerGroup) -> WorkerGroup:
    group.poll()
    return group


def wait_until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children(folder: Path) -> list[int]:
    return sorted(int(path.name[4:]) for path in folder.glob("pid-*"))


def give_rank(folder: Path, pid: int, rank: int) -> None:
    (folder / f"order-{pid}").write_text(f"rank{rank}")
    wait_until((folder / f"training-{pid}").exists)


def ranks_of(group: WorkerGroup) -> dict[int, int]:
    return {one.number: one.pid for one in polled(group).rank_statuses()}


def test_ranks_are_known_by_their_heartbeats_and_lost_ones_are_replaced(
    group: WorkerGroup, tmp_path: Path
) -> None:
    wait_until(lambda: len(children(tmp_path)) == 3)
    first, second, spare = children(tmp_path)
    assert ranks_of(group) == {}
    give_rank(tmp_path, first, 0)
    give_rank(tmp_path, second, 1)
    wait_until(lambda: ranks_of(group) == {0: first, 1: second})
    # A rank that its agent has not waited for yet is lost only once.
    os.kill(group.pid, signal.SIGSTOP)
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: ranks_of(group) == {0: first})
    assert ranks_of(group) == {0: first}
    (lost,) = group.take_lost_ranks()
    assert (lost.rank, lost.description) == (1, "rank 1: killed by SIGKILL")
    assert not lost.has_error and not lost.is_hang
    os.kill(group.pid, signal.SIGCONT)
    wait_until(lambda: len(children(tmp_path)) == 4)
    assert ranks_of(group) == {0: first}
    assert group.take_lost_ranks() == []
    assert not group.has_failed
    give_rank(tmp_path, spare, 1)
    wait_until(lambda: ranks_of(group) == {0: first, 1: spare})
    # A rank that hangs is killed, and so is lost. It has been diagnosed as a hang.
    group.end_hang(Failure("rank 1: no progress", "", tmp_path, 1))
    assert not group.has_failed
    wait_until(lambda: ranks_of(group) == {0: first})
    (lost,) = group.take_lost_ranks()
    assert lost.rank == 1 and diagnose_failure(lost, 0, ["OSError: x"], {}) is None


def test_a_spare_that_dies_and_a_rank_that_leaves_are_not_lost(
    group: WorkerGroup, tmp_path: Path
) -> None:
    wait_until(lambda: len(children(tmp_path)) == 3)
    first, _, spare = children(tmp_path)
    give_rank(tmp_path, first, 0)
    wait_until(lambda: ranks_of(group) == {0: first})
    os.kill(spare, signal.SIGKILL)
    (tmp_path / f"order-{first}").write_text("leave")
    wait_until(lambda: ranks_of(group) == {})
    wait_until(lambda: len(children(tmp_path)) == 5)
    polled(group)
    assert group.take_lost_ranks() == [] and not group.has_failed


def test_a_hang_without_a_known_rank_ends_the_group(group: WorkerGroup, tmp_path: Path) -> None:
    wait_until(lambda: len(children(tmp_path)) == 3)
    group.end_hang(Failure("rank 1: no progress", "", tmp_path, 1))
    assert group.has_failed


def test_the_end_of_the_agent_is_one_failure_and_leaves_no_process(
    group: WorkerGroup, tmp_path: Path
) -> None:
    wait_until(lambda: len(children(tmp_path)) == 3)
    first = children(tmp_path)[0]
    give_rank(tmp_path, first, 0)
    wait_until(lambda: ranks_of(group) == {0: first})
    os.kill(group.pid, signal.SIGKILL)
    wait_until(lambda: polled(group).has_failed)
    assert "agent: killed by SIGKILL" in group.failure().description
    # Its children still run, so the generation has not ended.
    assert not group.has_ended
    group.kill()
    wait_until(lambda: polled(group).has_ended)
    assert group.take_lost_ranks() == []
    assert not any(map(runs, children(tmp_path)))


def test_a_rank_is_watched_until_it_has_exited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by descriptor 0, which a launcher without standard input gets."""
    closed: list[int] = []
    monkeypatch.setattr(worker_group, "os", SimpleNamespace(close=closed.append))
    monkeypatch.setattr(worker_group, "wait_readable", set)
    monkeypatch.setattr(worker_group, "exit_status_of", lambda pid: ExitStatus(0))
    group: Any = object.__new__(WorkerGroup)
    group._ranks = {pid: worker_group._RankProcess(n, pid, n) for n, pid in enumerate((71, 70))}
    group._heartbeats, group.num_ranks, group.folder = HeartbeatMemory(2), 2, tmp_path
    group._parent, group._descriptor = SimpleNamespace(returncode=None), 9
    group._first_failure, group._num_clean, group.replaces_ranks = None, 0, False
    group._poll_parent = lambda: None
    assert [(one.number, one.pid) for one in group.rank_statuses()] == [(0, 71), (1, 70)]
    assert group.rank_pids() == {0: 71, 1: 70} and group.descriptors == [9, 0, 1]
    group.poll()
    assert closed == [0, 1] and group.has_finished and group.descriptors == [9]
    assert group.rank_statuses() == [] and group.rank_pids() == {}
