"""Generations of a replica, whose processes do what the test says, and the loop of the launcher."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.fault_tolerance.supervision.agent.conftest import (
    NoRequests,
    ObedientProcess,
)
from torchtitan_lite.core.diagnosis import Cause, Diagnosis
from torchtitan_lite.core.errors import DIVERGED, TRANSIENT
from torchtitan_lite.core.outputs import SAMPLE
from torchtitan_lite.core.rank.supervised import GENERATION, RANK_LOGS
from torchtitan_lite.fault_tolerance.supervision.agent.member import Member
from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import (
    RankProcess,
    RankState,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.link import LocalLink
from torchtitan_lite.fault_tolerance.supervision.coordinator.replica_coordinator import RunRules
from torchtitan_lite.fault_tolerance.supervision.coordinator.run_coordinator import RunCoordinator
from torchtitan_lite.fault_tolerance.supervision.launcher import launcher as launcher_module
from torchtitan_lite.fault_tolerance.supervision.launcher import replica as replica_module
from torchtitan_lite.fault_tolerance.supervision.launcher.launcher import Launcher
from torchtitan_lite.fault_tolerance.supervision.launcher.replica import Replica, ReplicaState
from torchtitan_lite.fault_tolerance.supervision.resize_request import RunMesh
from torchtitan_lite.fault_tolerance.supervision.restart_policy import Failure, RestartPolicy


class _Monitor:
    """A hang monitor."""

    pid = None

    def __init__(self, replica: Any) -> None:
        self.is_closed, self.hang = False, None

    def poll(self, now_s: float) -> Failure | None:
        return self.hang

    def close(self) -> None:
        self.is_closed = True


class _Run:
    """A replica of two ranks, whose member has a coordinator of its own."""

    def __init__(self, folder: Path, max_restarts: int = 9, delay_s: float = 0.0) -> None:
        self.folder, self.metrics = folder, folder / "metrics.jsonl"
        self.events: list[str] = []
        self.failed_ranks: list[int | None] = []
        self.diagnoses: list[Diagnosis] = []
        self.started: list[ObedientProcess] = []
        self.replica = Replica(
            0,
            max_ranks=2,
            folder=folder,
            metrics=self.metrics,
            environment={},
            on_failure=lambda replica, rank: self.failed_ranks.append(rank),
            report_event=self.events.append,
            report_diagnosis=self.diagnoses.append,
        )

        def policy(replica: int) -> RestartPolicy:
            return RestartPolicy(max_restarts, first_delay_s=delay_s)

        self._rules = RunRules(policy=policy, is_local=True, outlives_stops=True)
        self.start()

    def start(self) -> None:
        """Start a member."""
        coordinator = RunCoordinator(time.monotonic(), self._rules)
        member = Member(
            self._process,
            RunMesh(2),
            0,
            link=LocalLink(coordinator, RunMesh(2)),
            inbox=NoRequests(),
            requests=self.replica.requests,
            generation_environment=self.replica.generation_environment,
            may_end=self.replica.may_end,
            log=self.replica.log,
        )
        self.replica.start(member, partial(coordinator.restart_s, 0))

    def _process(self) -> RankProcess:
        self.started.append(ObedientProcess(70 + len(self.started)))
        return cast("RankProcess", self.started[-1])

    @property
    def ranks(self) -> list[ObedientProcess]:
        """The processes of the present generation."""
        member: Any = self.replica._member
        return [process for _, process in sorted(member.ranks.items())]

    @property
    def monitor(self) -> Any:
        return self.replica._hang_monitor

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.replica._read_at_s = 0.0
            self.replica.poll(time.monotonic())

    def until(self, condition: Callable[[], object]) -> None:
        for _ in range(1000):
            if condition():
                return
            self.poll()
            time.sleep(0.001)
        raise AssertionError(self.events)

    def train(self, generation: int = 0) -> None:
        """Let the ranks of a generation train and commit a step."""
        name = f"generation_{generation:02d}"
        self.until(lambda: self.replica.folder.name == name and len(self.replica.rank_pids) == 2)
        with self.metrics.open("a") as file:
            file.write('{"step": 3, "loss": 1.0}\n')
        for process in self.ranks:
            process.has_progress = True
        self.until(lambda: self.replica.state is ReplicaState.TRAINING)

    def reported(self, text: str) -> int:
        """Return how many events begin so."""
        return sum(event.startswith(f"replica 0: {text}") for event in self.events)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Run]:
    monkeypatch.setattr(replica_module, "HangMonitor", _Monitor)
    monkeypatch.setattr(replica_module, "state_of", lambda pid: "S")
    monkeypatch.setattr(replica_module, "request_flight_record", lambda pid: False)
    monkeypatch.setattr(replica_module, "kill_process_group", lambda pid: None)
    run = _Run(tmp_path)
    yield run
    run.replica.close()


def test_a_launcher_waits_between_polls_and_for_what_outlives_the_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    def logged(name: str) -> Any:
        return lambda *given: log.append(name)

    launcher: Any = object.__new__(Launcher)
    replica = SimpleNamespace(is_over=False, close=logged("close replica"))
    launcher._replicas = [replica]
    launcher._lighthouse = SimpleNamespace(start=logged("start"), descriptors=[])
    launcher._resizer = SimpleNamespace(end=logged("end"))
    launcher._view = SimpleNamespace(close=logged("close"))
    launcher._handling_signals = nullcontext
    launcher._status = lambda: 0

    def poll() -> None:
        log.append("poll")
        replica.is_over = log.count("poll") == 2

    launcher._poll, launcher._kill = poll, logged("kill")
    launcher._wait_for_orphans = logged("wait for orphans")
    monkeypatch.setattr(launcher_module, "wait_readable", logged("wait"))
    monkeypatch.setattr(launcher_module, "become_subreaper", lambda: None)
    assert launcher.run() == 0
    assert log == [
        "start", "wait", "poll", "wait", "poll", "end", "kill", "wait for orphans", "kill", "close",
        "close replica",
    ]  # fmt: skip


def test_a_dead_rank_is_replaced_in_another_generation(run: _Run) -> None:
    run.train()
    first, second = run.ranks
    monitor = run.monitor
    second.die()
    run.train(generation=1)
    assert monitor.is_closed and not run.monitor.is_closed
    assert run.ranks == [first, run.started[2]] and run.failed_ranks == [1]
    assert run.reported("failed, rank 1: killed by SIGKILL") == 1
    assert run.reported("restarts in 0.0 s") == 1 and run.replica.num_restarts == 1
    (diagnosis,) = run.diagnoses
    assert (diagnosis.cause, diagnosis.rank, diagnosis.replica) == (Cause.PROCESS_DIED, 1, 0)
    folders = [process.environment[RANK_LOGS] for process in run.ranks]
    assert folders == [str(run.folder / "generation_01")] * 2
    assert [process.environment[GENERATION] for process in run.ranks] == ["1", "1"]
    assert run.replica.leader_log == run.folder / "generation_01" / "rank_0.log"


def test_a_restart_is_announced_with_its_delay(tmp_path: Path, run: _Run) -> None:
    late = _Run(tmp_path / "late", delay_s=20.0)
    late.folder.mkdir()
    late.train()
    late.ranks[0].die()
    late.until(lambda: late.replica.state is ReplicaState.RESTARTING)
    assert late.reported("restarts in 20.0 s") == 1
    assert 19 < late.replica.restarts_in_s(time.monotonic()) <= 20
    late.replica.stop()
    late.until(lambda: late.replica.is_over)
    assert late.replica.state is ReplicaState.STOPPED and late.reported("left") == 1
    late.replica.close()


def test_a_replica_finishes_with_its_ranks(run: _Run) -> None:
    run.train()
    for process in run.ranks:
        process.end()
    run.until(lambda: run.replica.is_over)
    assert run.replica.state is ReplicaState.FINISHED and run.replica.given_up is None
    assert run.reported("finished at step 3") == 1 and not run.failed_ranks
    assert run.replica.pids == set() and not list(run.folder.glob("*.pid"))


def test_the_ranks_and_the_progress_of_a_generation_are_reported(run: _Run) -> None:
    run.until(lambda: run.replica.rank_pids)
    assert run.replica.state is ReplicaState.STARTING and run.replica.pids == {70, 71}
    run.poll(3)
    assert run.events.count("replica 0: rank 0 is process 70, rank 1 is process 71") == 1
    assert (run.folder / "rank_1.pid").read_text() == "71\n"
    run.train()
    assert run.events[-1] == "replica 0: training at step 3"
    run.ranks[1].die()
    run.train(generation=1)
    assert run.events.count("replica 0: rank 0 is process 70, rank 1 is process 72") == 1
    assert (run.folder / "rank_1.pid").read_text() == "72\n"


def test_a_rank_that_hangs_is_killed_and_reported_as_such(
    run: _Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(replica_module, "kill_process_group", killed.append)
    run.train()
    hang = Failure("rank 1: no progress", "", run.folder, 1, cause=Cause.HANG, is_hang=True)
    run.monitor.hang = hang
    run.poll(2)
    assert killed == [71] and run.monitor is None
    run.ranks[1].die()
    run.train(generation=1)
    assert run.reported("failed, rank 1: no progress") == 1 and run.failed_ranks == [1]
    assert [diagnosis.cause for diagnosis in run.diagnoses] == [Cause.HANG]
    # The next failure is another one.
    run.ranks[0].die()
    run.until(lambda: run.reported("failed, rank 0: killed by SIGKILL"))


def test_all_ranks_are_killed_if_none_is_known_to_hang(
    run: _Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(replica_module, "kill_process_group", killed.append)
    run.train()
    run.monitor.hang = Failure("no progress", "", run.folder, is_hang=True)
    run.poll()
    assert killed == [70, 71]
    for process in run.ranks:
        process.die()
    run.train(generation=1)
    assert run.reported("failed, no progress") == 1 and run.failed_ranks == [None]


@pytest.mark.parametrize("is_written", [False, True])
def test_an_error_is_compared_with_what_the_others_write(
    run: _Run, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """The generation ends once they have written it, or when the time is up."""
    written: set[int] = set()
    monkeypatch.setattr(replica_module, "request_flight_record", lambda pid: pid == 71)
    monkeypatch.setattr(
        replica_module, "has_newer_flight_record", lambda folder, rank, ns: rank in written
    )
    run.train()
    run.ranks[0].die(status=1)
    run.poll(5)
    assert run.reported("failed, rank 0: exit status 1") == 1
    assert run.ranks[1].state is RankState.TRAINING and not run.diagnoses
    if is_written:
        written.add(1)
    else:
        run.replica._examine_until_s = 0.0
    run.poll()
    assert len(run.diagnoses) == 1
    run.train(generation=1)
    assert run.ranks[1].pid == 71


def test_a_replica_that_others_ask_to_stop_is_started_again(run: _Run) -> None:
    run.train()
    for process in run.ranks:
        process.end(was_stopped=True)
    run.train(generation=1)
    assert run.reported("saved and left, because a process other than the launcher") == 1
    assert not run.failed_ranks and len(run.started) == 2


def test_a_replica_leaves_when_it_is_asked_to(run: _Run) -> None:
    run.train()
    run.replica.stop()
    run.poll()
    assert run.replica.state is ReplicaState.LEAVING
    assert [process.signals for process in run.ranks] == [[signal.SIGTERM]] * 2


def test_a_replica_that_does_not_leave_is_killed(run: _Run) -> None:
    run.train()
    processes = run.ranks
    run.replica.stop()
    run.poll()
    for _ in range(2):
        run.replica.kill()
    assert all(signal.SIGKILL in process.signals for process in processes)
    run.until(lambda: run.replica.is_over)
    assert run.reported("killed before it had left") == 1 and run.replica.was_killed
    assert run.replica.state is ReplicaState.STOPPED and not run.failed_ranks


def test_a_replica_that_waits_has_left_when_it_is_asked_to(tmp_path: Path) -> None:
    unused: Any = None
    replica = Replica(
        0, max_ranks=1, folder=tmp_path, metrics=tmp_path / "x", environment={},
        on_failure=unused, report_event=unused, report_diagnosis=unused,
    )  # fmt: skip
    replica.stop()
    replica.kill()
    assert replica.state is ReplicaState.STOPPED and replica.pids == set()
    replica.close()


def test_a_replica_starts_again_after_it_has_left_to_resize(run: _Run) -> None:
    run.train()
    run.replica.leave_to_resize()
    run.poll()
    assert run.replica.state is ReplicaState.RESIZING and not run.replica.has_left
    for process in run.ranks:
        process.end(was_stopped=True)
    run.until(lambda: run.replica.has_left)
    assert run.reported("left to resize") == 1
    run.start()
    run.train(generation=1)
    # Its ranks know that they are not the first.
    assert [process.environment[GENERATION] for process in run.ranks] == ["1", "1"]
    assert not any(process.signals for process in run.ranks)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (1, "the lr is wrong"),
        (2, "the lr is wrong"),
        (DIVERGED, "the lr is wrong: the training has diverged"),
    ],
)
def test_an_error_of_the_user_ends_a_replica(run: _Run, status: int, reason: str) -> None:
    run.until(lambda: run.replica.rank_pids)
    for process in run.ranks:
        process.end(status)
        process.end_reason = "the lr is wrong"
    run.until(lambda: run.replica.is_over)
    assert run.replica.state is ReplicaState.GIVEN_UP and run.replica.given_up is not None
    assert run.replica.given_up.reason == f"rank 0: {reason}"
    assert run.replica.given_up.first_failure.status == status
    assert len(run.started) == 2 and run.failed_ranks == [0]


@pytest.mark.parametrize("status", [1, TRANSIENT])
def test_a_replica_whose_error_a_restart_may_repair_is_started_again(
    run: _Run, status: int
) -> None:
    """As one that has lost its state, or whose storage is not available for a while."""
    run.train()
    for process in run.ranks:
        process.end(status, may_restart=True)
        process.end_reason = "the state is lost"
    run.train(generation=1)
    assert run.reported("failed, rank 0: the state is lost") == 1


def test_a_replica_that_leaves_to_resize_and_fails_is_reported_to_the_others(run: _Run) -> None:
    run.train()
    run.replica.leave_to_resize()
    run.poll()
    run.ranks[1].die()
    run.poll(3)
    assert run.failed_ranks == [None]


def test_an_end_that_is_final_is_not_followed_by_a_resize(run: _Run) -> None:
    run.train()
    run.replica.leave_to_resize()
    run.poll()
    for process in run.ranks:
        process.end(DIVERGED)
    run.until(lambda: run.replica.is_over)
    assert run.replica.state is ReplicaState.GIVEN_UP


def test_an_error_that_repeats_ends_a_replica(run: _Run) -> None:
    for generation in range(2):
        name = f"generation_{generation:02d}"
        run.until(lambda name=name: run.replica.folder.name == name and run.replica.rank_pids)
        (run.replica.folder / "rank_0.log").write_text("\nValueError: 7\n")
        for process in run.ranks:
            process.fail("ValueError: 7")
        run.until(
            lambda generation=generation: len(run.failed_ranks) == generation + 1,
        )
    run.until(lambda: run.replica.is_over)
    assert run.replica.given_up is not None
    assert "it failed 2 times in the same way" in run.replica.given_up.reason
    failure = run.replica.given_up.first_failure
    assert failure.log == run.folder / "generation_01" / "rank_0.log"
    assert failure.description == "rank 0: ValueError: 7"


def test_the_log_of_a_process_that_could_not_start_is_that_of_all(run: _Run) -> None:
    run.poll()
    run.started[0].die(status=1)
    (run.folder / "processes.log").write_text("No module named 'a'\n")
    run.until(lambda: run.failed_ranks)
    assert run.events[-1].endswith("processes.log ends with: No module named 'a'")
    assert run.replica._failure is not None
    assert run.replica._failure.log == run.folder / "processes.log"


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
