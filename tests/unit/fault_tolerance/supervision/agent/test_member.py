"""Checkpoint writers end with the lease of their machine; what a machine reports of a resize."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.harness import launch
from tests.unit.fault_tolerance.supervision.agent.conftest import FakeProcess
from torchtitan_lite.config import check_resize_arguments
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.output_fence import OUTPUTS_AFTER, lease_clock_s
from torchtitan_lite.core.rank.processes import WRITER_MODULE, ExitStatus, Subreaper, command_line
from torchtitan_lite.fault_tolerance.supervision.agent import lease
from torchtitan_lite.fault_tolerance.supervision.agent import member as member_module
from torchtitan_lite.fault_tolerance.supervision.agent.lease import AdoptedWriters
from torchtitan_lite.fault_tolerance.supervision.agent.member import Member, MemberPhase
from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import (
    RankProcess,
    RankState,
)
from torchtitan_lite.fault_tolerance.supervision.agent.resize_inbox import ResizeInbox
from torchtitan_lite.fault_tolerance.supervision.coordinator import remote_link
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    MAX_CHARS,
    Answer,
    NodeState,
    Report,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.remote_link import RemoteLink
from torchtitan_lite.fault_tolerance.supervision.coordinator.server import coordinator_server
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    BLOCKED_S,
    LEASE_S,
    LOST_S,
    STANDBY_S,
    WITHHELD_S,
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


class _Member(Member):
    """Shows what it does, one call of `poll` after the other."""

    def joined(self, *answers: tuple[Answer, bool], timeout_s: float = 60) -> int:
        """Wait for a place with these answers, and whether there is a lease with them, one after
        the other; return the node rank. Only the last one may start the ranks."""
        self.set_ranks(FakeProcess())
        self._join_timeout_s = timeout_s
        for answer, has_lease in answers:
            assert self.phase is MemberPhase.WAITING
            self.answered(answer, has_lease=has_lease)
            self.poll()
        if self.phase is MemberPhase.STARTING:
            self.poll()
        rank = int(self._environment(0)["RANK"]) if self._is_training else -1
        self.set_ranks()
        return rank

    @property
    def _is_training(self) -> bool:
        return self.phase is MemberPhase.TRAINING

    def set_ranks(self, *processes: FakeProcess) -> None:
        """Let these be its ranks."""
        self._pool.ranks = cast("dict[int, Any]", dict(enumerate(processes)))
        self._resizing.mesh = replace(self._mesh, num_ranks=max(1, len(processes)))

    @property
    def current_report(self) -> Report:
        """The report that is sent next."""
        return self._link.report

    def report(self, phase: NodeState, **changes: Any) -> None:
        """Change the phase that is reported, and more."""
        self._link.update(phase=phase, **changes)

    def joins(self, generation: int) -> None:
        """Join a generation."""
        self._generation, self.phase = generation, MemberPhase.TRAINING
        self._link.update(phase=NodeState.JOINED)

    def follow(self, answer: Answer, until: Callable[[Report], object]) -> Report:
        """Follow an answer until the next report is as expected, and return that."""

        def follows() -> object:
            self._resizing.answer_request(answer, is_spare=self._is_spare(answer))
            self._resizing.prepare(answer, is_stopping=bool(self._requests))
            return until(self._link.report)

        self.commit_step()
        launch.wait_until(follows, 10)
        return self._link.report

    def answered(self, answer: Answer, *, has_lease: bool = True) -> None:
        """Replace the last answer of the coordinator, which sends no other one."""
        link: Any = self._link
        link._send = lambda now_s: None
        link.answer = answer
        link._leased_s = lease_clock_s() + (_LEASED_S if has_lease else -2 * LEASE_S)

    def trained(self, *processes: FakeProcess) -> MemberPhase:
        """Return what this member does next, with `processes` as its ranks that train."""
        self.set_ranks(*processes)
        self.phase = MemberPhase.TRAINING
        self._train()
        after, self.phase = self.phase, MemberPhase.TRAINING
        self.set_ranks()
        return after

    def order_to_leave(self, answer: Answer) -> bool:
        """Follow an answer; return whether the ranks were ordered to leave."""
        self._resizing.order_to_leave(answer, self._generation)
        return bool(self._link.report.leaving_for)

    def stop_by_signal(self) -> None:
        """Receive SIGTERM."""
        self._requests = [signal.SIGTERM]
        self._report_stop()

    def may_forward(self, *processes: FakeProcess) -> bool:
        """Return whether the ranks receive it, with `processes` as ranks."""
        self.set_ranks(*processes)
        may = self._may_forward()
        self.set_ranks()
        return may

    def commit_step(self) -> None:
        """Let its ranks commit a step."""
        self._report_progress()

    def status_of_stop(self) -> int:
        """Return the exit status if it leaves now, because it was asked to."""
        return self._status_of_stop(self._link.answer)

    def may_wait(self, answer: Answer) -> bool:
        """Return whether it waits while no rank trains."""
        return self._stop_waits(answer)

    @property
    def outputs_after_s(self) -> float:
        """Time of which its ranks are told."""
        return float(self._environment(0)[OUTPUTS_AFTER])

    def arguments(self) -> list[str]:
        """Return what the ranks of the generation get beside their own arguments."""
        return list(self._arguments)

    def end(self) -> None:
        """End the processes, and leave."""
        self._end_processes()
        while self.phase is not MemberPhase.ENDED:
            self.poll()

    def standby_deadline_s(self) -> float:
        """Return the deadline of an order that comes now."""
        self._stopping_since_s = time.monotonic()
        return self._standby_deadline_s()


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
def member(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[_Member]:
    """An agent without processes, which has a lease."""
    # The agents of other tests run in processes of their own.
    monkeypatch.setattr(lease, "become_subreaper", lambda: None)
    # It would reap processes of other tests.
    monkeypatch.setattr(Subreaper, "reap", lambda *ignored: None)
    with coordinator_server("127.0.0.1:0", _SECRET) as server:
        link = RemoteLink(
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
        member = _Member(
            lambda: cast("RankProcess", FakeProcess()),
            RunMesh(1),
            0,
            link=link,
            inbox=inbox,
            requests=[],
            join_timeout_s=60,
            writers=AdoptedWriters(),
        )
        yield member
        if member.phase is not MemberPhase.ENDED:
            member.end()


def test_writers_end_first_when_the_lease_ends(
    member: _Member, writer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_s = 1.0
    monkeypatch.setattr(remote_link, "LEASE_S", lease_s)
    member.poll()
    assert member.standby_deadline_s() - time.monotonic() > STANDBY_S
    # Without it, reports end, and the lease does.
    time.sleep(BLOCKED_S + lease_s + 0.2)
    assert writer.poll() is None
    assert member.standby_deadline_s() < time.monotonic() + STANDBY_S
    member.poll()
    assert writer.wait(5) == -signal.SIGKILL


def test_the_ranks_are_of_the_replica_that_the_coordinator_names(
    member: _Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert member.arguments() == []
    monkeypatch.setattr(member, "_replica_arguments", lambda replica: [f"--replica={replica}"])
    mesh = RunMesh(1, ("--training.local_batch_size=2",))
    seat = replace(_QUIET, replica=3, store_address="10.0.0.2", store_port=29001)
    answer = replace(seat, mesh=mesh.to_text())
    assert member.joined((answer, True)) == 0
    assert member.current_report.replica == 3
    assert member.arguments() == ["--replica=3", *mesh.arguments]


def test_outputs_are_withheld_until_an_answer_allows_them(member: _Member) -> None:
    withheld = replace(_QUIET, store_address="10.0.0.2", store_port=29001, withholds_outputs=True)
    assert member.joined((withheld, True)) == 0
    until_s = member.outputs_after_s
    assert LOST_S < until_s - lease_clock_s() <= WITHHELD_S
    rank, blocked = FakeProcess(), FakeProcess()
    blocked.stays = True
    member.trained(rank, blocked)
    assert not rank.may_write and not member.current_report.has_progress
    # An answer about another generation allows nothing.
    member.answered(replace(withheld, state=RunState.REBUILDING, withholds_outputs=False))
    member.trained(rank, blocked)
    assert not rank.may_write
    member.answered(replace(withheld, withholds_outputs=False))
    member.trained(rank, blocked)
    # It has not read the message, and is sent another one.
    assert rank.may_write and not blocked.may_write
    assert not member.current_report.has_progress
    blocked.stays = False
    member.trained(rank, blocked)
    assert blocked.may_write and member.current_report.has_progress
    # The next generation starts without a fence.
    assert member.outputs_after_s == 0


@pytest.mark.parametrize("phase", [NodeState.STANDBY, NodeState.ENDED])
def test_writers_end_before_a_machine_leaves_unless_it_has_finished(
    phase: NodeState, member: _Member, writer: subprocess.Popen[bytes]
) -> None:
    member.report(phase)
    member.end()
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
def test_a_mesh_that_a_machine_cannot_have_is_refused(member: _Member, mesh: str, why: str) -> None:
    answer = Answer(
        state=RunState.RUNNING, generation=1, node_rank=0, resize="r1", resize_mesh=mesh
    )
    report = member.follow(answer, lambda report: report.refused)
    assert report.refused == "r1" and why in report.refusal and not report.ready_for


def _answered(folder: Path, request: ResizeRequest, state: ResizeState) -> bool:
    found = read_answer(folder, request)
    return found is not None and found.state is state


def test_a_machine_passes_a_request_on_and_answers_it(member: _Member, tmp_path: Path) -> None:
    request = ResizeRequest(mesh=RunMesh(1, ("--parallelism.pipeline_parallel_schedule=a b",)))
    send_request(tmp_path, request)
    answer = Answer(state=RunState.RUNNING, generation=1, node_rank=0)
    report = member.follow(answer, lambda report: report.request)
    assert RunMesh.from_text(report.request_mesh) == request.mesh
    assert _answered(tmp_path, request, ResizeState.ACCEPTED)
    # One at a time.
    other = ResizeRequest(mesh=RunMesh(1))
    send_request(tmp_path, other)
    launch.wait_until(lambda: _answered(tmp_path, other, ResizeState.REJECTED), 10)
    # The outcome of an earlier request does not end it.
    stale = replace(answer, request="earlier", request_state=ResizeState.DONE)
    assert member.follow(stale, lambda _: True).request == request.id
    for state in (ResizeState.LEFT, ResizeState.DONE):
        named = replace(answer, request=request.id, request_state=state)
        member.follow(named, lambda _: True)
        launch.wait_until(lambda state=state: _answered(tmp_path, request, state), 10)
    assert not member.follow(named, lambda report: not report.request).request


def test_a_machine_that_becomes_a_spare_one_ends_its_request(
    member: _Member, tmp_path: Path
) -> None:
    request = ResizeRequest(mesh=RunMesh(1))
    send_request(tmp_path, request)
    answer = Answer(state=RunState.RUNNING, generation=1, node_rank=0)
    member.follow(answer, lambda report: report.request)
    report = member.follow(replace(answer, node_rank=-1), lambda report: not report.request)
    launch.wait_until(lambda: _answered(tmp_path, request, ResizeState.FAILED), 10)
    assert not report.request


def test_a_signal_does_not_split_ranks_that_may_leave(member: _Member) -> None:
    mesh = RunMesh(1).to_text()
    quiet = Answer(state=RunState.RUNNING, generation=1, node_rank=0)
    named = replace(quiet, resize="r1", resize_mesh=mesh)
    member.joins(1)
    member.stop_by_signal()
    member.answered(named)
    assert member.may_forward()
    # Once it is ready, the coordinator may have decided that all ranks leave.
    member.report(NodeState.JOINED, ready_for="r1")
    assert not member.may_forward()
    member.answered(replace(quiet, state=RunState.REBUILDING))
    assert not member.may_forward()
    # It has not: the resize has ended.
    member.answered(quiet)
    assert member.may_forward()


def test_a_signal_waits_until_ranks_that_left_train_again(member: _Member) -> None:
    member.joins(1)
    assert not member.may_wait(_READY)
    assert member.order_to_leave(_READY)
    member.stop_by_signal()
    member.answered(replace(_READY, resize=""))
    assert not member.may_forward()
    member.report(NodeState.STANDBY)
    assert member.may_wait(_READY)
    # Also before the store of the next generation is known, but not on a spare machine.
    member.joins(2)
    assert member.may_wait(_READY) and not member.may_wait(replace(_READY, node_rank=-1))
    # Without a lease, nothing says that they will.
    member.answered(_READY, has_lease=False)
    assert not member.may_wait(_READY)
    member.answered(_READY)
    member.joins(3)
    assert not member.may_wait(_READY)


def test_a_signal_waits_until_all_ranks_have_committed_a_step_after_a_resize(
    member: _Member,
) -> None:
    member.joins(1)
    member.order_to_leave(_READY)
    member.joins(2)
    member.stop_by_signal()
    member.answered(replace(_QUIET, generation=2))
    process = FakeProcess()
    process.has_progress = False
    assert not member.may_forward(process)
    process.has_progress = True
    assert member.may_forward(process)


@pytest.mark.parametrize(
    ("answer", "has_lease", "phase"),
    [
        (_QUIET, True, MemberPhase.TRAINING),
        (_QUIET, False, MemberPhase.STOPPING),
        (replace(_QUIET, generation=2), True, MemberPhase.STOPPING),
        (replace(_QUIET, node_rank=-1), True, MemberPhase.STOPPING),
    ],
)
def test_a_generation_ends_with_the_lease_or_when_there_is_another(
    member: _Member, answer: Answer, has_lease: bool, phase: MemberPhase
) -> None:
    member.joins(1)
    member.answered(answer, has_lease=has_lease)
    assert member.trained(FakeProcess()) is phase


def test_a_machine_of_several_replicas_that_is_asked_to_stop_departs(member: _Member) -> None:
    member.answered(_QUIET)
    assert member.status_of_stop() == 1, "the run of one replica ends with it"
    member.report(NodeState.JOINED, num_replicas=2)
    member.joins(1)
    member.answered(_QUIET)
    starting, training, ended = FakeProcess(), FakeProcess(), FakeProcess()
    starting.has_progress = False
    ended.state, ended.status, ended.was_stopped = RankState.ENDED, ExitStatus(0), True
    assert member.trained(starting) is MemberPhase.TRAINING
    member.stop_by_signal()
    # Ranks that start would die of the signal, and have nothing to save.
    assert not member.may_forward(starting)
    assert member.trained(starting) is MemberPhase.STOPPING
    assert member.status_of_stop() == 0
    member.commit_step()
    assert member.may_forward(training) and member.may_forward(starting, training)
    assert member.status_of_stop() == 1, "their steps would be lost"
    finished = FakeProcess()
    finished.state, finished.status = RankState.ENDED, ExitStatus(0)
    member.trained(ended, finished)
    assert member.current_report.phase is NodeState.ENDED and member.current_report.was_stopped
    assert member.status_of_stop() == 0


@pytest.mark.parametrize(
    ("has_lease", "phase"), [(True, MemberPhase.TRAINING), (False, MemberPhase.ENDING)]
)
def test_a_machine_that_has_finished_waits_for_the_others_while_it_has_a_lease(
    member: _Member, has_lease: bool, phase: MemberPhase
) -> None:
    member.joins(1)
    member.answered(_QUIET, has_lease=has_lease)
    process = FakeProcess()
    process.state, process.status = RankState.ENDED, ExitStatus(0)
    assert member.trained(process) is phase
    assert member.current_report.phase is NodeState.ENDED


def test_a_machine_reports_the_newest_generation_that_it_knows(member: _Member) -> None:
    member.answered(replace(_QUIET, generation=3))
    member.poll()
    assert member.current_report.seen_generation == 3
    # A coordinator that was restarted is still learning it.
    member.answered(replace(_QUIET, generation=2))
    member.poll()
    assert member.current_report.seen_generation == 3


def test_a_machine_takes_a_seat_only_with_a_lease(member: _Member) -> None:
    seat = replace(_QUIET, node_rank=1, store_address="127.0.0.1", store_port=29500)
    assert member.joined((seat, False), (seat, True)) == 1
    assert member.current_report.generation == 1


@pytest.mark.parametrize("node_rank", [0, 1])
def test_the_first_machine_opens_one_listener_per_generation(
    member: _Member, node_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, int]] = []
    create_server = socket.create_server

    def record(address: tuple[str, int], **options: Any) -> socket.socket:
        opened.append(address)
        return create_server(address, **options)

    monkeypatch.setattr(socket, "create_server", record)
    # Of the generation before.
    member._excepted, member._num_forwarded = 0, 2
    seat = replace(_QUIET, generation=2, node_rank=node_rank)
    known = replace(seat, store_address="127.0.0.1", store_port=29501)
    assert member.joined((seat, True), (seat, True), (known, True)) == node_rank
    assert opened == [("127.0.0.1", 0)] * (node_rank == 0)
    assert bool(member.current_report.store_port) == (node_rank == 0)
    assert member._excepted is None and member._num_forwarded == 0 and member._generation == 2
    assert member._listener is None, "rank 0 has it"


@pytest.mark.parametrize("text", ["1", "1 --parallelism.pipeline_parallel_schedule=a"])
def test_a_machine_joins_with_the_mesh_of_the_run(
    member: _Member, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    seat = replace(_QUIET, node_rank=1, store_address="127.0.0.1", store_port=29500, mesh=text)
    with caplog.at_level("WARNING", "torchtitan_lite"):
        member.joined((seat, True))
    assert member._mesh.to_text() == text
    assert ("change to" in caplog.text) == (text != "1")


def test_a_machine_is_ready_to_resize_once_its_processes_are(member: _Member) -> None:
    member.set_ranks(FakeProcess())
    answer = replace(_READY, resize_state=ResizeState.ACCEPTED)
    assert member.follow(answer, lambda report: report.ready_for).ready_for == "r1"


@pytest.mark.parametrize("is_blamed", [False, True])
def test_the_rank_that_ended_the_run_exits_with_its_status(
    member: _Member, is_blamed: bool
) -> None:
    process = FakeProcess()
    member.set_ranks(process)
    member._excepted = 0
    answer = replace(_QUIET, state=RunState.ENDED, status=7, reason="why", is_blamed=is_blamed)
    member.answered(answer)
    member._finish(answer)
    assert member.phase is MemberPhase.ENDING and member.exit_status == 7
    assert process.status == ExitStatus(7 if is_blamed else 0)


def test_a_machine_accepts_no_request_while_its_processes_end(member: _Member) -> None:
    assert not member._pool.have_finished, "it has no rank that could have"
    process = FakeProcess()
    process.stays = True
    member.set_ranks(process)
    member._inbox.is_open = True
    member._end_processes()
    member.poll()
    assert member.phase is MemberPhase.ENDING and not member._inbox.is_open
    process.state = RankState.EXITED
    member.poll()
    assert member.phase is MemberPhase.ENDED


def test_a_spare_machine_waits_as_long_as_it_has_a_lease(
    member: _Member, caplog: pytest.LogCaptureFixture
) -> None:
    spare = replace(_QUIET, node_rank=-1)
    with caplog.at_level("ERROR", "torchtitan_lite"):
        member.joined((spare, True), (replace(spare, num_joined=1), False), timeout_s=-1)
    assert "1 of 1 machines have joined" in caplog.text and member.exit_status == 1


def test_ranks_may_be_on_standby_before_their_machine_is_told_to_order_it(member: _Member) -> None:
    """All ranks leave after the same step, of which another machine was told first."""
    member.joins(1)
    process = FakeProcess()
    process.state = RankState.STANDBY
    member.answered(replace(_READY, resize_state=ResizeState.ACCEPTED))
    assert member.trained(process) is MemberPhase.TRAINING
    member.answered(_READY)
    assert member.trained(process) is MemberPhase.STOPPING
    assert process.is_ordered_to_leave


def test_storage_that_hangs_does_not_block_the_main_loop(member: _Member, tmp_path: Path) -> None:
    mesh = RunMesh(1, ("--parallelism.hangs=true",)).to_text()
    answer = Answer(
        state=RunState.RUNNING, generation=1, node_rank=0, resize="r1", resize_mesh=mesh
    )
    for _ in range(20):
        began_s = time.monotonic()
        report = member.follow(answer, lambda _: True)
        assert time.monotonic() - began_s < _HANGS_S / 2
        assert not report.ready_for and not report.refused
    assert member.follow(answer, lambda report: report.refused).refusal == "It is slow."


def test_ranks_find_the_store_of_their_generation_while_the_coordinator_is_restarted(
    member: _Member,
) -> None:
    late = FakeProcess()
    late.state = RankState.STARTING
    member.set_ranks(late)
    seat = replace(_QUIET, node_rank=1, store_address="10.0.0.2", store_port=29501)
    member.answered(seat)
    member.poll()
    assert member.phase is MemberPhase.STARTING
    member.poll()
    # A coordinator that is learning names no store.
    member.answered(replace(seat, state=RunState.REBUILDING, store_address="", store_port=0))
    late.state = RankState.STANDBY
    member.poll()
    assert member.phase is MemberPhase.TRAINING
    assert late.environment["MASTER_ADDR"] == "10.0.0.2"
    assert late.environment["MASTER_PORT"] == "29501" and late.environment["GROUP_RANK"] == "1"
    member.set_ranks()


def test_a_process_that_does_not_start_is_killed_once_and_is_a_failure(
    member: _Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_module, "_START_S", -1.0)
    stuck = FakeProcess()
    stuck.state = RankState.STARTING
    vars(stuck)["signal"] = stuck.signals.append
    member.set_ranks(stuck)
    member.answered(replace(_QUIET, store_address="127.0.0.1", store_port=29501))
    for _ in range(4):
        member.poll()
    assert stuck.signals == [signal.SIGKILL]
    stuck.state, stuck.status = RankState.EXITED, ExitStatus(-signal.SIGKILL)
    for _ in range(2):
        member.poll()
    assert member.current_report.failure_text == "rank 0: killed by SIGKILL"


def test_a_generation_that_ends_while_its_ranks_start_is_left(member: _Member) -> None:
    starting = FakeProcess()
    starting.state = RankState.STARTING
    member.set_ranks(starting)
    member.answered(replace(_QUIET, store_address="127.0.0.1", store_port=29501))
    member.poll()
    member.answered(replace(_QUIET, state=RunState.FORMING))
    began_s = time.monotonic()
    member.poll()
    assert member.phase is MemberPhase.STOPPING and member._failed_at_s >= began_s
    member.poll()
    assert member.current_report.phase is NodeState.STANDBY


def test_an_error_of_the_agent_ends_all_that_its_machine_does(
    member: _Member, writer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = FakeProcess()
    member.set_ranks(process)
    left: list[str] = []
    monkeypatch.setattr(member._link, "leave", left.append)

    def poll() -> None:
        raise OSError("no descriptor is free")

    monkeypatch.setattr(member, "poll", poll)
    with pytest.raises(OSError, match="no descriptor"):
        member.run()
    assert process.state is RankState.EXITED and writer.wait(5) == -signal.SIGKILL
    assert left == [""] and member.phase is MemberPhase.ENDED


def test_writers_of_finished_ranks_go_on_without_a_lease(
    member: _Member, writer: subprocess.Popen[bytes]
) -> None:
    finished = FakeProcess()
    finished.state, finished.status, finished.stays = RankState.ENDED, ExitStatus(0), True
    member.joins(1)
    member.answered(_QUIET, has_lease=False)
    member.set_ranks(finished)
    member.poll()
    assert member.phase is MemberPhase.ENDING
    for _ in range(10):
        member.poll()
    finished.state = RankState.EXITED
    member.poll()
    assert member.phase is MemberPhase.ENDED and writer.poll() is None
