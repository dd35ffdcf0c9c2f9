"""Checkpoint writers end with the lease of their machine; what a machine reports of a resize."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from tests.harness import launch
from tests.unit.fault_tolerance.supervision.rank_recovery.conftest import FakeProcess
from torchtitan_lite.config import check_resize_arguments
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.rank.processes import WRITER_MODULE, ExitStatus, Subreaper, command_line
from torchtitan_lite.fault_tolerance.supervision.rank_recovery import lease, machine_agent
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.machine_agent import MachineAgent
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.rank_process import (
    RankProcess,
    RankState,
)
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.resize_inbox import ResizeInbox
from torchtitan_lite.fault_tolerance.supervision.rendezvous import link as rendezvous_link
from torchtitan_lite.fault_tolerance.supervision.rendezvous.link import RendezvousLink
from torchtitan_lite.fault_tolerance.supervision.rendezvous.messages import (
    MAX_CHARS,
    Answer,
    NodeState,
    Report,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.rendezvous.server import rendezvous_server
from torchtitan_lite.fault_tolerance.supervision.rendezvous.timing import (
    BLOCKED_S,
    LEASE_S,
    STANDBY_S,
    lease_clock_s,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    RequestInbox,
    ResizeRequest,
    ResizeState,
    RunMesh,
    read_answer,
    send_request,
)

_SECRET = "a secret of the tests"
_LEASED_S = 600.0
_QUIET = Answer(state=RunState.RUNNING, generation=1, node_rank=0, mesh="1")
_READY = Answer(
    state=RunState.RUNNING, generation=1, node_rank=0,
    resize="r1", resize_mesh="1", resize_state=ResizeState.READY,
)  # fmt: skip


class _Agent(MachineAgent):
    """Shows what a run does within the base class."""

    turns: Iterator[tuple[Answer, bool]] | None = None
    """Answers, and whether there is a lease with them, which `joined` receives."""

    def _pause(self) -> None:
        if self.turns is None:
            super()._pause()
        else:
            answer, has_lease = next(self.turns)
            self.answered(answer, has_lease=has_lease)

    def pause(self) -> None:
        """Run the main loop once."""
        self._pause()

    def joined(self, *turns: tuple[Answer, bool], timeout_s: float = 60) -> int:
        """Join a run that answers like this, turn by turn, and return the node rank. No turn may
        be left."""
        self._ranks = cast("dict[int, Any]", {0: FakeProcess()})
        self.turns, self._join_timeout_s = iter(turns), timeout_s
        try:
            rank = self.join().rank
            assert next(self.turns, None) is None
        finally:
            self._ranks = {}
            self.turns = None
        return rank

    @property
    def current_report(self) -> Report:
        """The report that is sent next."""
        return self._link.report

    def report(self, phase: NodeState, **changes: Any) -> None:
        """Change the phase that is reported, and more."""
        self._link.update(phase=phase, **changes)

    def joins(self, generation: int) -> None:
        """Join a generation."""
        self._generation_number = generation
        self._link.update(phase=NodeState.JOINED)

    def follow(self, answer: Answer, until: Callable[[Report], object]) -> Report:
        """Follow an answer until the next report is as expected, and return that."""

        def follows() -> object:
            self._answer_request(answer)
            self._prepare_for(answer)
            return until(self._link.report)

        self._made_progress()
        launch.wait_until(follows, 10)
        return self._link.report

    def answered(self, answer: Answer, *, has_lease: bool = True) -> None:
        """Replace the last answer of the rendezvous, which sends no other one."""
        self._link._send = lambda now_s: None
        self._link.answer = answer
        self._link._leased_s = lease_clock_s() + (_LEASED_S if has_lease else -2 * LEASE_S)

    def monitored(self, *processes: FakeProcess) -> WorkerState:
        """Return what this machine's agent finds, with `processes` as its ranks."""
        self._ranks = cast("dict[int, Any]", dict(enumerate(processes)))
        state = self._monitor_workers(self._worker_group).state
        self._ranks = {}
        return state

    def order_to_leave(self, answer: Answer) -> bool:
        """Follow an answer; return whether the ranks were ordered to leave."""
        self._order_to_leave(answer)
        return bool(self._link.report.leaving_for)

    def stop(self) -> None:
        """Receive SIGTERM."""
        self._requests = [signal.SIGTERM]
        self._report_stop()

    def may_forward(self, *processes: FakeProcess) -> bool:
        """Return whether the ranks receive it, with `processes` as ranks."""
        self._ranks = cast("dict[int, Any]", dict(enumerate(processes)))
        may = self._may_forward()
        self._ranks = {}
        return may

    def commit_step(self) -> None:
        """Let its ranks commit a step."""
        self._made_progress()

    def status_of_stop(self) -> int:
        """Return the exit status if it leaves now, because it was asked to."""
        return self._status_of_stop(self._link.answer)

    def may_wait(self, answer: Answer) -> bool:
        """Return whether it waits while no rank trains."""
        return self._stop_waits(answer)

    def arguments(self) -> list[str]:
        """Return what the ranks of the generation get beside their own arguments."""
        return list(self._arguments())

    def end(self) -> None:
        """End the processes, and leave."""
        self._shutdown()

    def standby_deadline_s(self) -> float:
        """Return the deadline of an order that comes now."""
        return self._standby_deadline_s(time.monotonic())


_HANGS_S = 4.0


def _check_resize(request: ResizeRequest) -> None:
    if "--parallelism.hangs=true" in request.mesh.arguments:
        time.sleep(_HANGS_S)
        raise ConfigError("It is slow.")
    if request.mesh.num_ranks > 1:
        raise ConfigError("It has one GPU.")


@pytest.fixture
def writer() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the command line of a checkpoint writer."""
    program = "import time; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", program, "-m", WRITER_MODULE])
    # Its command line is that of this process until it has started.
    launch.wait_until(lambda: command_line(process.pid)[-1:] == [WRITER_MODULE], 10)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[_Agent]:
    """An agent without processes, which has a lease."""
    # The agents of other tests run in processes of their own.
    monkeypatch.setattr(lease, "become_subreaper", lambda: None)
    # It would reap processes of other tests.
    monkeypatch.setattr(Subreaper, "reap", lambda *ignored: None)
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    with rendezvous_server("127.0.0.1:0", _SECRET) as server:
        link = RendezvousLink(
            server.address,
            _SECRET,
            address="127.0.0.1",
            name="a",
            run_id="run",
            num_machines=1,
            num_ranks=1,
            fingerprint="1-abc",
        )
        link.start()
        launch.wait_until(lambda: (link.beat(), link.answer)[1], 10)
        inbox = ResizeInbox(
            RequestInbox(tmp_path),
            _check_resize,
            check_arguments=check_resize_arguments,
        )
        inbox.start()
        agent = _Agent(
            lambda: RankProcess([], {}),
            1,
            0,
            link=link,
            join_timeout_s=60,
            requests=[],
            inbox=inbox,
        )
        yield agent
        agent.end()


def test_writers_end_first_when_the_lease_ends(
    agent: _Agent, writer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_s = 1.0
    monkeypatch.setattr(rendezvous_link, "LEASE_S", lease_s)
    agent.pause()
    assert agent.standby_deadline_s() - time.monotonic() > STANDBY_S
    # Without it, reports end, and the lease does.
    time.sleep(BLOCKED_S + lease_s + 0.2)
    assert writer.poll() is None
    assert agent.standby_deadline_s() < time.monotonic() + STANDBY_S
    agent.pause()
    assert writer.wait(5) == -signal.SIGKILL


def test_the_ranks_are_of_the_replica_that_the_rendezvous_names(
    agent: _Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert agent.arguments() == []
    monkeypatch.setattr(agent, "_replica_arguments", lambda replica: [f"--replica={replica}"])
    mesh = RunMesh(1, ("--training.local_batch_size=2",))
    seat = replace(_QUIET, replica=3, store_address="10.0.0.2", store_port=29001)
    answer = replace(seat, mesh=mesh.to_text())
    assert agent.joined((answer, True)) == 0
    assert agent.current_report.replica == 3
    assert agent.arguments() == ["--replica=3", *mesh.arguments]


@pytest.mark.parametrize("phase", [NodeState.STANDBY, NodeState.ENDED])
def test_writers_end_before_a_machine_leaves_unless_it_has_finished(
    phase: NodeState, agent: _Agent, writer: subprocess.Popen[bytes]
) -> None:
    agent.report(phase)
    agent.end()
    if phase is NodeState.ENDED:
        time.sleep(0.5)
        assert writer.poll() is None
    else:
        assert writer.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("mesh", "why"),
    [
        (RunMesh(2).to_text(), "It has one GPU."),
        ("1 --experimental.custom_import=a", "a resize changes [parallelism]"),
        ("zero --ranks", "is not a mesh"),
        ("'open quote", "No closing quotation"),
        ("1" * (MAX_CHARS + 1), f"at most {MAX_CHARS} fit"),
    ],
)
def test_a_mesh_that_a_machine_cannot_have_is_refused(agent: _Agent, mesh: str, why: str) -> None:
    answer = Answer(
        state=RunState.RUNNING, generation=1, node_rank=0, resize="r1", resize_mesh=mesh
    )
    report = agent.follow(answer, lambda report: report.refused)
    assert report.refused == "r1" and why in report.refusal and not report.ready_for


def _answered(folder: Path, request: ResizeRequest, state: ResizeState) -> bool:
    found = read_answer(folder, request)
    return found is not None and found.state is state


def test_a_machine_passes_a_request_on_and_answers_it(agent: _Agent, tmp_path: Path) -> None:
    request = ResizeRequest(mesh=RunMesh(1, ("--parallelism.pipeline_parallel_schedule=a b",)))
    send_request(tmp_path, request)
    answer = Answer(state=RunState.RUNNING, generation=1, node_rank=0)
    report = agent.follow(answer, lambda report: report.request)
    assert RunMesh.from_text(report.request_mesh) == request.mesh
    assert _answered(tmp_path, request, ResizeState.ACCEPTED)
    # One at a time.
    other = ResizeRequest(mesh=RunMesh(1))
    send_request(tmp_path, other)
    launch.wait_until(lambda: _answered(tmp_path, other, ResizeState.REJECTED), 10)
    # The outcome of an earlier request does not end it.
    stale = replace(answer, request="earlier", request_state=ResizeState.DONE)
    assert agent.follow(stale, lambda _: True).request == request.id
    for state in (ResizeState.LEFT, ResizeState.DONE):
        named = replace(answer, request=request.id, request_state=state)
        report = agent.follow(named, lambda _: True)
        launch.wait_until(lambda state=state: _answered(tmp_path, request, state), 10)
    assert not report.request


def test_a_machine_that_becomes_a_spare_one_ends_its_request(agent: _Agent, tmp_path: Path) -> None:
    request = ResizeRequest(mesh=RunMesh(1))
    send_request(tmp_path, request)
    answer = Answer(state=RunState.RUNNING, generation=1, node_rank=0)
    agent.follow(answer, lambda report: report.request)
    report = agent.follow(replace(answer, node_rank=-1), lambda report: not report.request)
    launch.wait_until(lambda: _answered(tmp_path, request, ResizeState.FAILED), 10)
    assert not report.request


def test_a_signal_does_not_split_ranks_that_may_leave(agent: _Agent) -> None:
    mesh = RunMesh(1).to_text()
    quiet = Answer(state=RunState.RUNNING, generation=1, node_rank=0)
    named = replace(quiet, resize="r1", resize_mesh=mesh)
    agent.joins(1)
    agent.stop()
    agent.answered(named)
    assert agent.may_forward()
    # Once it is ready, the rendezvous may have decided that all ranks leave.
    agent.report(NodeState.JOINED, ready_for="r1")
    assert not agent.may_forward()
    agent.answered(replace(quiet, state=RunState.REBUILDING))
    assert not agent.may_forward()
    # It has not: the resize has ended.
    agent.answered(quiet)
    assert agent.may_forward()


def test_a_signal_waits_until_ranks_that_left_train_again(agent: _Agent) -> None:
    agent.joins(1)
    assert not agent.may_wait(_READY)
    assert agent.order_to_leave(_READY)
    agent.stop()
    agent.answered(replace(_READY, resize=""))
    assert not agent.may_forward()
    agent.report(NodeState.STANDBY)
    assert agent.may_wait(_READY)
    # Also before the store of the next generation is known, but not on a spare machine.
    agent.joins(2)
    assert agent.may_wait(_READY) and not agent.may_wait(replace(_READY, node_rank=-1))
    # Without a lease, nothing says that they will.
    agent.answered(_READY, has_lease=False)
    assert not agent.may_wait(_READY)
    agent.answered(_READY)
    agent.joins(3)
    assert not agent.may_wait(_READY)


def test_a_signal_waits_until_all_ranks_have_committed_a_step_after_a_resize(
    agent: _Agent,
) -> None:
    agent.joins(1)
    agent.order_to_leave(_READY)
    agent.joins(2)
    agent.stop()
    agent.answered(replace(_QUIET, generation=2))
    process = FakeProcess()
    process.has_progress = False
    assert not agent.may_forward(process)
    process.has_progress = True
    assert agent.may_forward(process)


@pytest.mark.parametrize(
    ("answer", "has_lease", "state"),
    [
        (_QUIET, True, WorkerState.HEALTHY),
        (_QUIET, False, WorkerState.FAILED),
        (replace(_QUIET, generation=2), True, WorkerState.FAILED),
        (replace(_QUIET, node_rank=-1), True, WorkerState.FAILED),
    ],
)
def test_a_generation_ends_with_the_lease_or_when_there_is_another(
    agent: _Agent, answer: Answer, has_lease: bool, state: WorkerState
) -> None:
    agent.joins(1)
    agent.answered(answer, has_lease=has_lease)
    assert agent.monitored(FakeProcess()) is state


def test_a_machine_of_several_replicas_that_is_asked_to_stop_departs(agent: _Agent) -> None:
    agent.answered(_QUIET)
    assert agent.status_of_stop() == 1, "the run of one replica ends with it"
    agent.report(NodeState.JOINED, num_replicas=2)
    agent.joins(1)
    agent.answered(_QUIET)
    starting, training, ended = FakeProcess(), FakeProcess(), FakeProcess()
    starting.has_progress = False
    ended.state, ended.status, ended.was_stopped = RankState.ENDED, ExitStatus(0), True
    assert agent.monitored(starting) is WorkerState.HEALTHY
    agent.stop()
    # Ranks that start would die of the signal, and have nothing to save.
    assert not agent.may_forward(starting)
    assert agent.monitored(starting) is WorkerState.UNHEALTHY
    assert agent.status_of_stop() == 0
    agent.commit_step()
    assert agent.may_forward(training) and agent.may_forward(starting, training)
    assert agent.status_of_stop() == 1, "their steps would be lost"
    finished = FakeProcess()
    finished.state, finished.status = RankState.ENDED, ExitStatus(0)
    agent.monitored(ended, finished)
    assert agent.current_report.phase is NodeState.ENDED and agent.current_report.was_stopped
    assert agent.status_of_stop() == 0


@pytest.mark.parametrize(
    ("has_lease", "state"), [(True, WorkerState.HEALTHY), (False, WorkerState.SUCCEEDED)]
)
def test_a_machine_that_has_finished_waits_for_the_others_while_it_has_a_lease(
    agent: _Agent, has_lease: bool, state: WorkerState
) -> None:
    agent.joins(1)
    agent.answered(_QUIET, has_lease=has_lease)
    process = FakeProcess()
    process.state, process.status = RankState.ENDED, ExitStatus(0)
    assert agent.monitored(process) is state
    assert agent.current_report.phase is NodeState.ENDED


def test_a_machine_reports_the_newest_generation_that_it_knows(agent: _Agent) -> None:
    agent.answered(replace(_QUIET, generation=3))
    agent.pause()
    assert agent.current_report.seen_generation == 3
    # A rendezvous that was restarted is still learning it.
    agent.answered(replace(_QUIET, generation=2))
    agent.pause()
    assert agent.current_report.seen_generation == 3


def test_a_machine_takes_a_seat_only_with_a_lease(agent: _Agent) -> None:
    seat = replace(_QUIET, node_rank=1, store_address="127.0.0.1", store_port=29500)
    assert agent.joined((seat, False), (seat, True)) == 1
    assert agent.current_report.generation == 1


@pytest.mark.parametrize("node_rank", [0, 1])
def test_the_first_machine_opens_one_store_per_generation(
    agent: _Agent, node_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(
        machine_agent,
        "listening_store",
        lambda address: (opened.append(address), SimpleNamespace(port=29501))[1],
    )
    # Of the generation before.
    agent._excepted, agent._num_forwarded = 0, 2
    seat = replace(_QUIET, generation=2, node_rank=node_rank)
    known = replace(seat, store_address="127.0.0.1", store_port=29501)
    assert agent.joined((seat, True), (seat, True), (known, True)) == node_rank
    assert opened == ["127.0.0.1"] * (node_rank == 0)
    assert agent.current_report.store_port == (29501 if node_rank == 0 else 0)
    assert agent._excepted is None and agent._num_forwarded == 0 and agent._generation() == 1


@pytest.mark.parametrize("text", ["1", "1 --parallelism.pipeline_parallel_schedule=a"])
def test_a_machine_joins_with_the_mesh_of_the_run(
    agent: _Agent, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    seat = replace(_QUIET, node_rank=1, store_address="127.0.0.1", store_port=29500, mesh=text)
    with caplog.at_level("WARNING", "torchtitan_lite"):
        agent.joined((seat, True))
    assert agent._mesh.to_text() == text
    assert ("change to" in caplog.text) == (text != "1")


def test_a_machine_is_ready_to_resize_once_its_processes_are(agent: _Agent) -> None:
    agent._ranks = cast("dict[int, Any]", {0: FakeProcess()})
    answer = replace(_READY, resize_state=ResizeState.ACCEPTED)
    assert agent.follow(answer, lambda report: report.ready_for).ready_for == "r1"
    agent._ranks = {}


@pytest.mark.parametrize("is_blamed", [False, True])
def test_the_rank_that_ended_the_run_exits_with_its_status(agent: _Agent, is_blamed: bool) -> None:
    process = FakeProcess()
    agent._ranks, agent._excepted = cast("dict[int, Any]", {0: process}), 0
    answer = replace(_QUIET, state=RunState.ENDED, status=7, reason="why", is_blamed=is_blamed)
    agent.answered(answer)
    assert agent._finish(answer).state is WorkerState.FAILED and agent.exit_status == 7
    assert process.status == (ExitStatus(7) if is_blamed else None)
    agent._ranks = {}


def test_a_machine_accepts_no_request_while_its_processes_end(
    agent: _Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not agent._has_finished(), "it has no rank that could have"
    is_open: list[bool] = []
    monkeypatch.setattr(
        machine_agent.ProcessAgent, "_shutdown", lambda *_: is_open.append(agent._inbox.is_open)
    )
    agent._inbox.is_open = True
    agent.end()
    assert is_open == [False]


def test_a_spare_machine_waits_as_long_as_it_has_a_lease(agent: _Agent) -> None:
    spare = replace(_QUIET, node_rank=-1)
    with pytest.raises(RendezvousGracefulExitError, match="1 of 1 machines have joined"):
        agent.joined((spare, True), (replace(spare, num_joined=1), False), timeout_s=-1)


def test_ranks_may_be_on_standby_before_their_machine_is_told_to_order_it(agent: _Agent) -> None:
    """All ranks leave after the same step, of which another machine was told first."""
    agent.joins(1)
    process = FakeProcess()
    process.state = RankState.STANDBY
    agent.answered(replace(_READY, resize_state=ResizeState.ACCEPTED))
    assert agent.monitored(process) is WorkerState.HEALTHY
    agent.answered(_READY)
    assert agent.monitored(process) is WorkerState.UNHEALTHY
    assert process.is_ordered_to_leave


def test_storage_that_hangs_does_not_block_the_main_loop(agent: _Agent, tmp_path: Path) -> None:
    mesh = RunMesh(1, ("--parallelism.hangs=true",)).to_text()
    answer = Answer(
        state=RunState.RUNNING, generation=1, node_rank=0, resize="r1", resize_mesh=mesh
    )
    for _ in range(20):
        began_s = time.monotonic()
        report = agent.follow(answer, lambda _: True)
        assert time.monotonic() - began_s < _HANGS_S / 2
        assert not report.ready_for and not report.refused
    assert agent.follow(answer, lambda report: report.refused).refusal == "It is slow."
