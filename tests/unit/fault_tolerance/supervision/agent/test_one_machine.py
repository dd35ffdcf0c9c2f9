"""A run on one machine: its member follows a coordinator in the same process."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.fault_tolerance.supervision.agent.conftest import (
    NoRequests,
    ObedientProcess,
)
from torchtitan_lite.core.errors import DIVERGED, GIVEN_UP, MACHINE_FAULT, TRANSIENT
from torchtitan_lite.core.rank.supervised import GENERATION
from torchtitan_lite.fault_tolerance.supervision.agent.member import Member, MemberPhase
from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import (
    RankProcess,
    RankState,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.link import LocalLink
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import RunState
from torchtitan_lite.fault_tolerance.supervision.coordinator.replica_coordinator import RunRules
from torchtitan_lite.fault_tolerance.supervision.coordinator.run_coordinator import RunCoordinator
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    ResizeRequest,
    ResizeState,
    RunMesh,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import RestartPolicy

_TP = RunMesh(3, ("--parallelism.tensor_parallel_degree=3",))


class _Requests(NoRequests):
    """A request to resize, and its answers."""

    def __init__(self) -> None:
        self.request: ResizeRequest | None = None
        self.answers: list[tuple[ResizeState, str]] = []

    def refusal(self, request_id: str, mesh: str) -> str | None:
        return "" if mesh == _TP.to_text() else "it does not fit"

    def answer(self, state: ResizeState, reason: str = "") -> None:
        self.answers.append((state, reason))
        if state.is_final:
            self.request = None


class _Machine:
    """A member of two ranks."""

    def __init__(self, *, num_spares: int = 0, may_end: bool = True, **rules: Any) -> None:
        self.signals: list[int] = []
        self.started: list[ObedientProcess] = []
        self.inbox, self.may_end = _Requests(), may_end
        given = {"policy": lambda replica: RestartPolicy(3, first_delay_s=0.0), **rules}
        self.coordinator = RunCoordinator(time.monotonic(), RunRules(is_local=True, **given))
        self.member = Member(
            self._start,
            RunMesh(2),
            num_spares,
            link=LocalLink(self.coordinator, RunMesh(2)),
            inbox=self.inbox,
            requests=self.signals,
            may_end=lambda failure: self.may_end,
        )

    def _start(self) -> RankProcess:
        self.started.append(ObedientProcess(len(self.started)))
        return cast("RankProcess", self.started[-1])

    @property
    def ranks(self) -> list[ObedientProcess]:
        return [cast("Any", process) for _, process in sorted(self.member.ranks.items())]

    def until(self, condition: Callable[[], object]) -> None:
        for _ in range(2000):
            self.member.poll()
            if condition():
                return
            time.sleep(0.001)
        raise AssertionError((self.member.phase, self.member.answer))

    def train(self, generation: int = 1) -> None:
        """Let all ranks of a generation commit a step."""
        self.until(
            lambda: (
                self.member.generation == generation and self.member.phase is MemberPhase.TRAINING
            )
        )
        for process in self.ranks:
            process.has_progress = True
        self.member.poll()

    def end(self) -> int:
        """Poll until the end, and return the exit status."""
        self.until(lambda: self.member.phase is MemberPhase.ENDED)
        return self.member.exit_status


def test_a_run_starts_at_once_and_ends_with_its_ranks() -> None:
    machine = _Machine()
    machine.member.poll()
    machine.train()
    assert [process.environment["RANK"] for process in machine.ranks] == ["0", "1"]
    assert [process.has_listener for process in machine.ranks] == [True, False]
    for process in machine.ranks:
        process.end()
    assert machine.end() == 0


def test_a_dead_rank_is_replaced_by_a_spare_and_the_others_stay() -> None:
    machine = _Machine(num_spares=1)
    machine.train()
    first, second = machine.ranks
    assert len(machine.started) == 3
    second.die()
    machine.train(generation=2)
    assert machine.ranks == [first, machine.started[2]] and len(machine.started) == 4
    assert [process.environment[GENERATION] for process in machine.ranks] == ["1", "1"]


def test_a_generation_ends_once_what_is_to_be_read_of_it_has_been_read() -> None:
    machine = _Machine(may_end=False)
    machine.train()
    first, second = machine.ranks
    second.die()
    for _ in range(10):
        machine.member.poll()
    assert first.state is RankState.TRAINING and machine.member.generation == 1
    machine.may_end = True
    machine.train(generation=2)
    assert machine.ranks[0] is first


@pytest.mark.parametrize(
    ("status", "exit_status"),
    [(2, 2), (DIVERGED, DIVERGED), (MACHINE_FAULT, MACHINE_FAULT)],
)
def test_an_error_of_a_user_and_a_fault_end_the_run(status: int, exit_status: int) -> None:
    machine = _Machine()
    machine.train()
    for process in machine.ranks:
        process.end(status)
        process.end_reason = "why"
    assert machine.end() == exit_status


@pytest.mark.parametrize(
    ("may_pass", "reason"),
    [(False, "it failed 2 times in the same way"), (True, "it failed 2 times in a row")],
)
def test_errors_that_repeat_end_the_run(
    caplog: pytest.LogCaptureFixture, may_pass: bool, reason: str
) -> None:
    machine = _Machine(policy=lambda replica: RestartPolicy(1, first_delay_s=0.0))
    for generation in (1, 2):
        machine.until(
            lambda generation=generation: (
                machine.member.generation == generation
                and machine.member.phase is MemberPhase.TRAINING
            )
        )
        for process in machine.ranks:
            process.may_pass = may_pass
            process.fail("ModuleNotFoundError: No module named 'a'")
        machine.until(lambda: machine.member.phase is not MemberPhase.TRAINING)
    assert machine.end() == (TRANSIENT if may_pass else GIVEN_UP)
    assert f": ModuleNotFoundError: No module named 'a': {reason}" in caplog.text


def test_a_silent_machine_is_not_lost() -> None:
    """As after a suspend of the machine: nothing but this process can decide otherwise."""
    machine = _Machine()
    machine.train()
    link: Any = machine.member._link
    machine.coordinator.report(link.report, time.monotonic() + 1000)
    machine.member.poll()
    assert machine.member.phase is MemberPhase.TRAINING and link.has_lease


def test_a_request_to_stop_reaches_ranks_that_train() -> None:
    machine = _Machine()
    machine.train()
    machine.signals.append(signal.SIGTERM)
    machine.member.poll()
    assert [process.signals for process in machine.ranks] == [[signal.SIGTERM]] * 2
    for process in machine.ranks:
        process.end(was_stopped=True)
    assert machine.end() == 0


@pytest.mark.parametrize("outlives_stops", [False, True])
def test_ranks_that_others_stop_end_the_run_or_start_again(outlives_stops: bool) -> None:
    machine = _Machine(outlives_stops=outlives_stops)
    machine.train()
    for process in machine.ranks:
        process.end(was_stopped=True)
    if not outlives_stops:
        assert machine.end() == 0
        return
    machine.train(generation=2)
    # A request to stop the machine ends it all the same.
    machine.signals.append(signal.SIGTERM)
    machine.member.poll()
    for process in machine.ranks:
        process.end(was_stopped=True)
    assert machine.end() == 0 and machine.member.generation == 2


@pytest.mark.parametrize("outlives_stops", [False, True])
def test_a_stop_after_all_ranks_have_left_lets_them_train_and_save(outlives_stops: bool) -> None:
    machine = _Machine(outlives_stops=outlives_stops)
    machine.train()
    machine.inbox.request = ResizeRequest(mesh=_TP)
    machine.until(lambda: machine.member.is_resizing)
    machine.signals.append(signal.SIGTERM)
    machine.until(
        lambda: machine.member.generation == 2 and machine.member.phase is MemberPhase.TRAINING
    )
    for process in machine.ranks:
        process.has_progress = True
    machine.until(lambda: all(signal.SIGTERM in process.signals for process in machine.ranks))
    for process in machine.ranks:
        process.end(was_stopped=True)
    assert machine.end() == 0


def test_a_stop_does_not_wait_for_ranks_that_start() -> None:
    machine = _Machine(outlives_stops=True)
    machine.member.poll()
    for process in machine.started:
        process.state = RankState.STARTING
    machine.until(lambda: machine.member.phase is MemberPhase.STARTING)
    machine.signals.append(signal.SIGTERM)
    assert machine.end() == 0


def test_an_error_that_ends_a_rank_is_not_taken_for_one_that_passes() -> None:
    """However long the rank takes to unwind."""
    machine = _Machine()
    machine.train()
    first, second = machine.ranks
    for process in (first, second):
        process.fail("ConfigError: lr is wrong")
        process.ends = True
        process.failed_at_s -= 5
    for _ in range(5):
        machine.member.poll()
    assert machine.member.generation == 1
    for process in (first, second):
        process.end(2)
    assert machine.end() == 2


def test_a_stop_by_others_again_and_again_ends_the_run() -> None:
    policy = lambda replica: RestartPolicy(1, first_delay_s=0.0)  # noqa: E731
    machine = _Machine(outlives_stops=True, policy=policy)
    for generation in (1, 2):
        machine.train(generation)
        for process in machine.ranks:
            process.end(was_stopped=True)
        machine.member.poll()
    assert machine.end() == GIVEN_UP


def test_a_resize_keeps_the_processes() -> None:
    machine = _Machine()
    machine.train()
    first, second = machine.ranks
    machine.inbox.request = ResizeRequest(mesh=_TP)
    machine.train(generation=2)
    assert machine.ranks == [first, second, machine.started[2]]
    machine.until(lambda: machine.inbox.request is None)
    assert [state for state, _ in machine.inbox.answers][-1] is ResizeState.DONE
    answer = machine.member.answer
    assert answer is not None and answer.mesh == _TP.to_text()


def test_a_mesh_that_fails_is_left_again() -> None:
    machine = _Machine()
    machine.train()
    before = machine.ranks
    machine.inbox.request = ResizeRequest(mesh=_TP)
    machine.until(
        lambda: machine.member.generation == 2 and machine.member.phase is MemberPhase.TRAINING
    )
    machine.ranks[2].fail("RuntimeError: too large")
    machine.train(generation=3)
    answer = machine.member.answer
    assert machine.ranks == before and answer is not None and answer.mesh == "2"
    assert machine.inbox.answers[-1] == (
        ResizeState.FAILED,
        "this machine: rank 2: RuntimeError: too large",
    )
    assert machine.coordinator.states == [RunState.RUNNING]


def test_a_mesh_that_does_not_fit_changes_nothing() -> None:
    machine = _Machine()
    machine.train()
    machine.inbox.request = ResizeRequest(mesh=RunMesh(5))
    machine.until(lambda: machine.inbox.request is None)
    assert machine.inbox.answers[-1] == (ResizeState.REJECTED, "it does not fit")
    assert machine.member.generation == 1 and len(machine.started) == 2


def test_killed_processes_end_the_member(tmp_path: Path) -> None:
    machine = _Machine(num_spares=1)
    machine.train()
    machine.member.kill()
    assert machine.end() == 1
    assert all(process.state is RankState.EXITED for process in machine.started)
