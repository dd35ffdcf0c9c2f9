"""Attempts of a replica, whose processes end as the test says, and the loop of the launcher."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.core.diagnosis import Diagnosis
from torchtitan_lite.fault_tolerance.supervision.launcher import launcher as launcher_module
from torchtitan_lite.fault_tolerance.supervision.launcher import replica_process
from torchtitan_lite.fault_tolerance.supervision.launcher.launcher import Launcher
from torchtitan_lite.fault_tolerance.supervision.launcher.replica_process import (
    ReplicaProcess,
    ReplicaState,
)
from torchtitan_lite.fault_tolerance.supervision.launcher.restart_policy import (
    Failure,
    RestartPolicy,
)


class _Group:
    """Processes of an attempt."""

    pid, num_ranks, replaces_ranks, stopped_early = 1, 2, False, False

    def __init__(self, folder: Path, calls: list[str]) -> None:
        self.folder, self.leader_log, self.calls = folder, folder / "log", calls
        self.has_failed = self.has_ended = False
        self.descriptors: list[int] = []

    def poll(self) -> None:
        pass

    def rank_pids(self) -> dict[int, int]:
        return {}

    def take_lost_ranks(self) -> list[Failure]:
        return []

    def failure(self) -> Failure:
        return Failure("rank 0 exited", "", self.leader_log, rank=0)

    def terminate(self) -> None:
        self.calls.append("terminate")

    def kill(self) -> None:
        self.calls.append("kill")

    def close(self) -> None:
        self.calls.append("close")


class _Monitor:
    """A hang monitor."""

    pid = None

    def __init__(self, group: _Group) -> None:
        self._calls = group.calls

    def poll(self, now_s: float) -> None:
        self._calls.append("check for hangs")

    def close(self) -> None:
        self._calls.append("close monitor")


class _Attempts:
    """A replica and its attempts."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[str] = []
        self.failed_ranks: list[int | None] = []
        self.group: Any = None
        self.replica = ReplicaProcess(
            0,
            self._start,
            folder=folder,
            metrics=folder / "metrics.jsonl",
            policy=RestartPolicy(9),
            on_failure=lambda replica, rank: self.failed_ranks.append(rank),
            report_event=print,
            report_diagnosis=self._report,
        )

    def _start(self, folder: Path) -> Any:
        folder.mkdir()
        self.group = _Group(folder, self.calls)
        return self.group

    def _report(self, diagnosis: Diagnosis) -> None:
        pass


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Attempts]:
    monkeypatch.setattr(replica_process, "HangMonitor", _Monitor)
    yield _Attempts(tmp_path)


def test_a_launcher_waits_between_polls_and_for_what_outlives_the_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    def logged(name: str) -> Any:
        return lambda *given: log.append(name)

    launcher: Any = object.__new__(Launcher)
    replica = SimpleNamespace(is_over=False)
    launcher._replicas = [replica]
    launcher._lighthouse = SimpleNamespace(start=logged("start"))
    launcher._resizer = SimpleNamespace(end=logged("end"))
    launcher._view = SimpleNamespace(close=logged("close"))
    launcher._handling_signals = nullcontext
    launcher._status = lambda: 0

    def poll() -> None:
        log.append("poll")
        replica.is_over = log.count("poll") == 2

    launcher._poll, launcher._kill = poll, logged("kill")
    launcher._wait, launcher._wait_for_orphans = logged("wait"), logged("wait for orphans")
    monkeypatch.setattr(launcher_module, "become_subreaper", lambda: None)
    assert launcher.run() == 0
    assert log == [
        "start", "wait", "poll", "wait", "poll", "end", "kill", "wait for orphans", "kill", "close",
    ]  # fmt: skip


def test_an_attempt_that_failed_is_closed_once(attempts: _Attempts) -> None:
    """The monitor first: it may be about to diagnose the processes of the group."""
    attempts.replica.start_attempt()
    attempts.group.has_failed = attempts.group.has_ended = True
    for now_s in (1.0, 1.1):
        attempts.replica.poll(now_s)
    assert attempts.replica.state is ReplicaState.RESTARTING
    assert attempts.calls == ["close monitor", "kill", "close"]
    assert attempts.replica.pids == [] and attempts.failed_ranks == [0]


def test_an_attempt_that_finished_is_closed_once(attempts: _Attempts) -> None:
    attempts.replica.start_attempt()
    attempts.group.has_ended = True
    for now_s in (1.0, 1.1):
        attempts.replica.poll(now_s)
    assert attempts.calls == ["check for hangs", "close monitor", "close"]
    assert attempts.replica.state is ReplicaState.FINISHED and attempts.replica.pids == []


def test_a_new_attempt_has_no_part_in_an_earlier_resize(attempts: _Attempts) -> None:
    """It is restarted after a failure, and one that fails while it leaves is reported again."""
    for _ in range(2):
        attempts.replica.start_attempt()
        attempts.replica.resize()
        attempts.group.has_failed = True
        for now_s in (1.0, 1.1):
            attempts.replica.poll(now_s)
        attempts.group.has_ended = True
        attempts.replica.poll(2.0)
        assert attempts.replica.has_left
    assert attempts.failed_ranks == [None, None]
    attempts.replica.start_attempt()
    attempts.group.has_failed = attempts.group.has_ended = True
    attempts.replica.poll(3.0)
    assert attempts.replica.state is ReplicaState.RESTARTING


def test_a_new_attempt_is_watched_for_hangs(attempts: _Attempts) -> None:
    """Also if the one before was not, because it was leaving."""
    attempts.replica.start_attempt()
    attempts.replica._check_hangs_at_s = 1000.0
    attempts.replica.poll(1.0)
    assert attempts.calls == []
    attempts.replica.start_attempt()
    attempts.replica.poll(10.0)
    assert attempts.calls == ["check for hangs"]
