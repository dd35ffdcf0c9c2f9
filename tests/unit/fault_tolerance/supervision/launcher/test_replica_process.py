"""Generations of a replica, whose processes end as the test says, and the loop of the launcher."""

import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.core.diagnosis import Cause, Diagnosis
from torchtitan_lite.core.outputs import SAMPLE
from torchtitan_lite.fault_tolerance.supervision.launcher import launcher as launcher_module
from torchtitan_lite.fault_tolerance.supervision.launcher import replica_process
from torchtitan_lite.fault_tolerance.supervision.launcher.launcher import Launcher
from torchtitan_lite.fault_tolerance.supervision.launcher.replica_process import (
    ReplicaProcess,
    ReplicaState,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    Permission,
    ResizeRequest,
    RunMesh,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import (
    Failure,
    RestartPolicy,
)


class _Group:
    """Processes of a generation."""

    pid, num_ranks, replaces_ranks, stopped_early = 1, 2, False, False

    def __init__(self, folder: Path, calls: list[str]) -> None:
        self.folder, self.leader_log, self.calls = folder, folder / "log", calls
        self.has_failed = self.has_ended = self.ends_with_hang = False
        self.descriptors: list[int] = []
        self.pids: dict[int, int] = {}
        self.hang: Failure | None = None

    def poll(self) -> None:
        pass

    def rank_pids(self) -> dict[int, int]:
        return self.pids

    def end_hang(self, failure: Failure) -> None:
        self.calls.append(f"end {failure.description}")
        self.has_failed, self.hang = self.ends_with_hang, None

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
        self._calls, self._group = group.calls, group

    def poll(self, now_s: float) -> Failure | None:
        self._calls.append("check for hangs")
        return self._group.hang

    def close(self) -> None:
        self._calls.append("close monitor")


class _Generations:
    """A replica and its generations."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[str] = []
        self.failed_ranks: list[int | None] = []
        self.events: list[str] = []
        self.group: Any = None
        self.replica = ReplicaProcess(
            0,
            self._start,
            folder=folder,
            metrics=folder / "metrics.jsonl",
            policy=RestartPolicy(9),
            on_failure=lambda replica, rank: self.failed_ranks.append(rank),
            report_event=self.events.append,
            report_diagnosis=self._report,
        )

    def _start(self, folder: Path) -> Any:
        folder.mkdir()
        self.group = _Group(folder, self.calls)
        return self.group

    def _report(self, diagnosis: Diagnosis) -> None:
        pass


@pytest.fixture
def generations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Generations]:
    monkeypatch.setattr(replica_process, "HangMonitor", _Monitor)
    yield _Generations(tmp_path)


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


def test_a_generation_that_failed_is_closed_once(generations: _Generations) -> None:
    """The monitor first: it may be about to diagnose the processes of the group."""
    generations.replica.start_generation()
    generations.group.has_failed = generations.group.has_ended = True
    for now_s in (1.0, 1.1):
        generations.replica.poll(now_s)
    assert generations.replica.state is ReplicaState.RESTARTING
    assert generations.calls == ["close monitor", "kill", "close"]
    assert generations.replica.pids == [] and generations.failed_ranks == [0]


def test_a_generation_that_finished_is_closed_once(generations: _Generations) -> None:
    generations.replica.start_generation()
    generations.group.has_ended = True
    for now_s in (1.0, 1.1):
        generations.replica.poll(now_s)
    assert generations.calls == ["check for hangs", "close monitor", "close"]
    assert generations.replica.state is ReplicaState.FINISHED and generations.replica.pids == []


def test_a_new_generation_has_no_part_in_an_earlier_resize(generations: _Generations) -> None:
    """It is restarted after a failure, and one that fails while it leaves is reported again."""
    for _ in range(2):
        generations.replica.start_generation()
        generations.replica.resize()
        generations.group.has_failed = True
        for now_s in (1.0, 1.1):
            generations.replica.poll(now_s)
        generations.group.has_ended = True
        generations.replica.poll(2.0)
        assert generations.replica.has_left
    assert generations.failed_ranks == [None, None]
    generations.replica.start_generation()
    generations.group.has_failed = generations.group.has_ended = True
    generations.replica.poll(3.0)
    assert generations.replica.state is ReplicaState.RESTARTING


def test_a_new_generation_is_watched_for_hangs(generations: _Generations) -> None:
    """Also if the one before was not, because it was leaving."""
    generations.replica.start_generation()
    generations.replica._check_hangs_at_s = 1000.0
    generations.replica.poll(1.0)
    assert generations.calls == []
    generations.replica.start_generation()
    generations.replica.poll(10.0)
    assert generations.calls == ["check for hangs"]


def test_the_ranks_and_the_progress_of_a_generation_are_reported(
    generations: _Generations, tmp_path: Path
) -> None:
    replica = generations.replica
    replica.start_generation()
    generations.group.descriptors, generations.group.pids = [5], {0: 70, 1: 71}
    generations.events.clear()
    for now_s in (1.0, 1.1):
        replica.poll(now_s)
    assert replica.descriptors == [5] and replica.state is ReplicaState.STARTING
    assert generations.events == ["replica 0: rank 0 is process 70, rank 1 is process 71"]
    generations.group.pids = {0: 70, 1: 72}
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    replica.poll(9.0)
    assert (tmp_path / "rank_1.pid").read_text() == "72\n"
    last = ["replica 0: rank 1 is process 72", "replica 0: training at step 3"]
    assert generations.events[1:] == last and replica.state is ReplicaState.TRAINING
    generations.group.has_ended = True
    replica.poll(9.1)
    assert not list(tmp_path.glob("*.pid")) and replica.descriptors == []


def test_a_failed_generation_is_followed_by_another_after_its_delay(
    generations: _Generations,
) -> None:
    generations.replica.start_generation()
    generations.group.has_failed = generations.group.has_ended = True
    generations.replica.poll(1.0)
    assert generations.events[-1] == "replica 0: restarts in 0.2 s"
    for now_s, state in ((1.1, ReplicaState.RESTARTING), (1.0 + 0.2, ReplicaState.STARTING)):
        generations.replica.poll(now_s)
        assert generations.replica.state is state


def test_a_replica_leaves_when_it_is_asked_to(generations: _Generations) -> None:
    replica = generations.replica
    replica.start_generation()
    replica.resize()
    assert generations.calls == ["terminate"] and replica.state is ReplicaState.RESIZING
    replica.start_generation()
    replica.stop()
    assert generations.calls == ["terminate"] * 2 and replica.state is ReplicaState.LEAVING
    for _ in range(2):
        replica.kill()
    assert generations.calls[2:] == ["kill"] * 2
    assert generations.events.count("replica 0: killed before it had left") == 1


def test_a_replica_that_waits_has_left_when_it_is_asked_to(generations: _Generations) -> None:
    generations.replica.stop()
    generations.replica.kill()
    assert generations.replica.state is ReplicaState.STOPPED and generations.calls == []


@pytest.mark.parametrize("ends", [False, True], ids=["replaced", "ends the generation"])
def test_a_rank_that_hangs_is_reported_once(
    generations: _Generations, ends: bool, tmp_path: Path
) -> None:
    hang = "rank 1: no progress"
    generations.replica.start_generation()
    generations.group.hang = Failure(hang, "", tmp_path / "log", rank=1, is_hang=True)
    generations.group.ends_with_hang = ends
    for now_s in (1.0, 9.0):
        generations.replica.poll(now_s)
    assert generations.calls.count(f"end {hang}") == 1
    # The heartbeats of others are as late, until they have left their training.
    assert generations.calls.count("check for hangs") == 1
    reported = "failed, rank 0 exited" if ends else hang
    assert generations.events.count(f"replica 0: {reported}") == 1
    assert (f"replica 0: {hang}" in generations.events) == (not ends)


def test_ranks_that_move_to_another_mesh_are_not_taken_for_a_hang(
    generations: _Generations,
) -> None:
    request = ResizeRequest(mesh=RunMesh(2))
    generations.replica.start_generation()
    generations.replica.permit(request, Permission.START, 1.0)
    assert generations.calls == ["close monitor"]
    generations.replica.poll(2.0)
    assert "check for hangs" not in generations.calls
    generations.group.has_ended = True
    generations.replica.poll(3.0)
    # Its processes have ended meanwhile.
    generations.replica.permit(request, Permission.START, 4.0)


def _launcher(**values: Any) -> Any:
    launcher: Any = object.__new__(Launcher)
    vars(launcher).update(values)
    return launcher


def test_a_launcher_reports_the_end_of_a_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"a line\n{SAMPLE}\nOnce upon\na time\nOutputs are in x\n")
    first = SimpleNamespace(state=ReplicaState.FINISHED, progress=None, leader_log=None)
    second = SimpleNamespace(
        state=ReplicaState.FINISHED, progress=SimpleNamespace(total_steps=8), leader_log=log
    )
    for replicas in ([second], [first, second]):
        launcher = _launcher(_replicas=replicas)
        assert launcher.finished_steps == 8
        assert launcher.sample() == [SAMPLE, "Once upon", "a time", ""]
    launcher = _launcher(_replicas=[first, second])
    first.state = ReplicaState.STOPPED
    assert launcher.finished_steps is None
    second.leader_log = None
    assert launcher.sample() == []


@pytest.mark.parametrize("explains", [False, True])
def test_a_launcher_reports_a_hang_unless_a_link_explains_it(explains: bool) -> None:
    reported: list[Diagnosis] = []
    launcher = _launcher(
        _links=SimpleNamespace(explains_hang=lambda replica, now_s: explains),
        _view=SimpleNamespace(report_diagnosis=reported.append),
    )
    hang, other, of_run = (
        Diagnosis(cause=cause, text="", replica=replica)
        for cause, replica in ((Cause.HANG, 0), (Cause.PROCESS_DIED, 0), (Cause.HANG, None))
    )
    for one in (hang, other, of_run):
        launcher._report_failure(one)
    assert reported == [hang, other, of_run][explains:]


def test_a_launcher_counts_failures_of_ranks_and_notifies_the_lighthouse() -> None:
    failures: list[tuple[int, int]] = []
    departures: list[tuple[str, str]] = []
    launcher = _launcher(
        _resizer=SimpleNamespace(record_failure=lambda *one: failures.append(one[:2])),
        _lighthouse=SimpleNamespace(address="host:1"),
        _notifier=SimpleNamespace(notify=lambda *one: departures.append(one)),
    )
    replica: Any = SimpleNamespace(number=3, name="replica_00003")
    for rank in (None, 0):
        launcher._on_failure(replica, rank)
    assert failures == [(3, 0)] and departures == [("host:1", "replica_00003")] * 2


def test_a_launcher_follows_each_signal_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    stopped: list[str] = []
    launcher = _launcher(
        _signals=[signal.SIGTERM],
        _num_handled=0,
        _deadline_s=None,
        _plan=SimpleNamespace(grace_s=30.0),
        _view=SimpleNamespace(report_event=events.append),
        _resizer=SimpleNamespace(end=lambda reason: None),
        _replicas=[SimpleNamespace(stop=lambda: stopped.append("replica"))],
        _subreaper=SimpleNamespace(num_orphans=1, has_writer=True),
        _reap_orphans=lambda now_s: None,
    )
    for now_s in (1.0, 2.0):
        launcher._handle_signals(now_s)
    assert launcher._deadline_s == 31.0 and stopped == ["replica"]
    launcher._signals.append(signal.SIGINT)
    launcher._handle_signals(3.0)
    assert launcher._deadline_s == 3.0
    assert events == [
        "SIGTERM: replicas save and leave within 30 s",
        "SIGINT again: killing everything",
    ]
    # One that arrives later ends the wait for checkpoint writers.
    monkeypatch.setattr(
        launcher_module.time, "sleep", lambda _: launcher._signals.append(signal.SIGINT)
    )
    launcher._wait_for_orphans()
    assert len(launcher._signals) == 3 and [one.partition(":")[0] for one in events[2:]] == [
        "waiting for checkpoint writers",
        "checkpoint writers are still busy",
    ]
