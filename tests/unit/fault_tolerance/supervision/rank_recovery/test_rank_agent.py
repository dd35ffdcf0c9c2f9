"""The agent of a run on one machine resizes it; that of a replica waits for the launcher in each
phase."""

import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState

from tests.unit.fault_tolerance.supervision.rank_recovery.conftest import FakeProcess
from torchtitan_lite.core.errors import GIVEN_UP, TRANSIENT, ConfigError
from torchtitan_lite.core.rank.processes import ExitStatus
from torchtitan_lite.fault_tolerance.supervision.rank_recovery import agent, rank_agent
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.rank_agent import RankAgent
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.rank_process import (
    RankProcess,
    RankState,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    Permission,
    RequestInbox,
    ResizeRequest,
    ResizeState,
    RunMesh,
    permit,
    read_answer,
    send_request,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import RestartPolicy

_MESH = RunMesh(3)


class _Replica:
    """An agent of two ranks, and the launcher's side of its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stops = folder, cast("list[int]", [])
        self.started: list[FakeProcess] = []
        self.agent = RankAgent(
            self._start,
            RunMesh(2),
            0,
            policy=RestartPolicy(3),
            requests=self.stops,
            inbox=RequestInbox(folder),
            check_resize=self._check,
        )
        self.ranks = [FakeProcess(), FakeProcess()]
        self.agent._ranks = cast("dict[int, Any]", dict(enumerate(self.ranks)))
        self.request = ResizeRequest(mesh=_MESH, is_joint=True)
        send_request(folder, self.request)

    def _start(self) -> Any:
        self.started.append(FakeProcess())
        self.started[-1].state = RankState.STARTING
        return self.started[-1]

    def _check(self, request: ResizeRequest) -> None:
        if request.mesh.num_ranks > 8:
            raise ConfigError("too many")
        if request.mesh.num_ranks > 7:
            raise AttributeError("a fault of an extension")

    def tick(self) -> RunResult:
        # Requests are read every quarter of a second.
        self.agent._inbox._read_at_s = float("-inf")
        return self.agent._monitor_workers(self.agent._worker_group)

    def start(self) -> None:
        """Start a generation of all ranks."""
        workers: Any = self.agent._worker_group
        workers.group_rank, workers.master_addr, workers.master_port = 0, "127.0.0.1", 29500
        workers.workers = [
            Worker(local_rank=number, global_rank=number, world_size=2) for number in range(2)
        ]
        self.agent._start_workers(workers)

    def answer(self) -> ResizeState | None:
        found = read_answer(self.folder, self.request)
        return None if found is None else found.state

    def permit(self, permission: Permission) -> RunResult:
        permit(self.folder, self.request, permission)
        return self.tick()

    def ready(self) -> None:
        self.tick()
        (new,) = self.started
        new.state = RankState.STANDBY
        self.tick()
        assert self.answer() is ResizeState.READY

    def left(self) -> None:
        self.ready()
        self.permit(Permission.LEAVE)
        for one in self.ranks:
            one.state = RankState.STANDBY
        self.tick()
        assert self.answer() is ResizeState.LEFT


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Replica:
    monkeypatch.setattr(rank_agent.ProcessAgent, "_pause", lambda self: None)
    return _Replica(tmp_path)


def test_each_phase_needs_a_permission(replica: _Replica) -> None:
    replica.tick()
    assert replica.answer() is ResizeState.ACCEPTED
    replica.ready()
    for _ in range(3):
        replica.tick()
    assert not any(one.is_ordered_to_leave for one in replica.ranks)
    replica.permit(Permission.LEAVE)
    assert all(one.is_ordered_to_leave for one in replica.ranks)
    replica.ranks[0].state = RankState.STANDBY
    replica.tick()
    assert replica.answer() is ResizeState.READY
    replica.ranks[1].state = RankState.STANDBY
    replica.tick()
    assert replica.answer() is ResizeState.LEFT
    assert replica.tick().state is WorkerState.HEALTHY
    assert replica.permit(Permission.START).state is WorkerState.UNHEALTHY
    assert replica.agent._worker_group.spec.local_world_size == 3
    for one in replica.ranks:
        one.state = RankState.TRAINING
    replica.tick()
    assert replica.answer() is ResizeState.DONE


def test_a_rank_that_is_slow_to_start_is_not_killed(replica: _Replica) -> None:
    states = iter([RankState.STARTING, RankState.STARTING, RankState.STANDBY])
    slow = replica.ranks[0]
    for one in replica.ranks:
        one.state = RankState.STANDBY
    slow.poll = lambda: setattr(slow, "state", next(states, slow.state))
    replica.start()
    assert all(one.is_started for one in replica.ranks)
    assert not slow.signals


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_does_not_leave_its_training_in_time_is_replaced(
    replica: _Replica, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(agent, "_STANDBY_S", 0.0)
    stays = replica.ranks[1]
    polls = iter([RankState.TRAINING] * 3)
    # What does not end in time ends at last.
    stays.poll = lambda: setattr(stays, "state", next(polls, RankState.STANDBY))
    replica.ranks[0].state = RankState.STANDBY
    if leaves:
        stays.state = RankState.STANDBY
    replica.agent._stop_workers(replica.agent._worker_group)
    assert [number in replica.agent._ranks for number in (0, 1)] == [True, leaves]


def test_ranks_that_start_are_not_ordered_to_leave(replica: _Replica) -> None:
    replica.tick()
    replica.started[0].state = RankState.STANDBY
    replica.ranks[1].has_progress = False
    replica.tick()
    assert replica.answer() is ResizeState.ACCEPTED
    replica.ranks[1].has_progress = True
    replica.tick()
    assert replica.answer() is ResizeState.READY


def test_a_cancelled_resize_leaves_no_spare(replica: _Replica) -> None:
    replica.ready()
    replica.permit(Permission.CANCEL)
    assert replica.started[0].state is RankState.EXITED
    assert not any(one.is_ordered_to_leave for one in replica.ranks)
    replica.permit(Permission.LEAVE)
    assert not any(one.is_ordered_to_leave for one in replica.ranks)


def test_after_a_cancelled_resize_a_user_may_request_another(replica: _Replica) -> None:
    replica.ready()
    replica.permit(Permission.CANCEL)
    assert _answer_to(replica, RunMesh(1)) == (ResizeState.ACCEPTED, "")


def test_a_newer_request_replaces_one_that_has_not_begun(replica: _Replica) -> None:
    """The processes that only the former one needs are ended."""
    assert _answer_to(replica, RunMesh(5)) == (ResizeState.ACCEPTED, "")
    before = list(replica.started)
    assert len(before) == 3
    assert _answer_to(replica, RunMesh(1)) == (ResizeState.ACCEPTED, "")
    assert all(one.state is RankState.EXITED for one in before)


def test_ranks_are_ordered_to_leave_again_after_a_failure(replica: _Replica) -> None:
    replica.ready()
    replica.permit(Permission.LEAVE)
    replica.ranks[0].state, replica.ranks[0].status = RankState.EXITED, ExitStatus(-9)
    assert replica.tick().state is WorkerState.FAILED
    for one in replica.ranks:
        one.state, one.is_ordered_to_leave = RankState.TRAINING, False
    replica.tick()
    assert all(one.is_ordered_to_leave for one in replica.ranks)


def test_a_stop_after_the_ranks_have_left_returns_to_the_former_mesh(replica: _Replica) -> None:
    replica.left()
    replica.stops.append(15)
    assert replica.tick().state is WorkerState.UNHEALTHY
    assert replica.answer() is ResizeState.FAILED
    assert replica.agent._worker_group.spec.local_world_size == 2
    # It is forwarded once the ranks train.
    assert not replica.agent._may_forward()
    replica.agent._made_progress()
    assert replica.agent._may_forward() and replica.answer() is ResizeState.FAILED


def test_a_rank_that_dies_while_it_waits_is_replaced_at_the_start(replica: _Replica) -> None:
    replica.left()
    replica.ranks[1].state, replica.ranks[1].status = RankState.EXITED, ExitStatus(-9)
    assert replica.tick().state is WorkerState.HEALTHY
    assert replica.permit(Permission.START).state is WorkerState.UNHEALTHY
    assert replica.agent._lost == {1}


def test_a_mesh_that_fails_ends_the_agent(replica: _Replica) -> None:
    replica.left()
    replica.permit(Permission.START)
    replica.ranks[0].state, replica.ranks[0].status = RankState.EXITED, ExitStatus(-9)
    assert replica.tick().state is WorkerState.FAILED
    assert replica.agent.exit_status and replica.answer() is ResizeState.FAILED
    # torch's agent would start it again.
    assert replica.agent._remaining_restarts == 0


def test_a_request_of_a_user_does_not_disturb_that_of_the_launcher(replica: _Replica) -> None:
    replica.ready()
    send_request(replica.folder, ResizeRequest(mesh=RunMesh(1)))
    replica.tick()
    assert replica.answer() is ResizeState.READY
    newer = ResizeRequest(mesh=RunMesh(9), is_joint=True)
    send_request(replica.folder, newer)
    replica.tick()
    found = read_answer(replica.folder, newer)
    assert found is not None and found.state is ResizeState.REJECTED


def _answer_to(replica: _Replica, mesh: RunMesh) -> tuple[ResizeState, str] | None:
    """Return the answer to a request of a user."""
    request = ResizeRequest(mesh=mesh)
    send_request(replica.folder, request)
    # After an answer, one look is omitted.
    for _ in range(2):
        assert replica.tick().state is WorkerState.HEALTHY
    found = read_answer(replica.folder, request)
    return None if found is None else (found.state, found.reason)


def test_a_check_that_fails_does_not_end_the_run(replica: _Replica) -> None:
    reason = "AttributeError('a fault of an extension')"
    assert _answer_to(replica, RunMesh(8)) == (ResizeState.REJECTED, reason)


def test_the_present_mesh_ends_a_resize_that_has_not_begun(replica: _Replica) -> None:
    assert _answer_to(replica, _MESH) == (ResizeState.ACCEPTED, "")
    assert _answer_to(replica, RunMesh(2)) == (ResizeState.DONE, "")
    (new,) = replica.started
    new.poll()
    assert new.state is RankState.EXITED
    assert replica.tick().state is WorkerState.HEALTHY
    assert not any(one.is_ordered_to_leave for one in replica.ranks)


def test_processes_that_do_not_start_end_the_resize(
    replica: _Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_agent, "_PREPARE_S", 0.0)
    reason = "its new processes have not started in 0 s"
    assert _answer_to(replica, _MESH) == (ResizeState.FAILED, reason)
    (new,) = replica.started
    assert new.state is RankState.EXITED
    assert replica.tick().state is WorkerState.HEALTHY
    assert not any(one.is_ordered_to_leave for one in replica.ranks)


def test_an_answer_that_cannot_be_written_is_written_later(
    replica: _Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica.tick()
    replica.started[0].state = RankState.STANDBY

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torchtitan_lite.fault_tolerance.supervision.resize_request._write", full)
        replica.tick()
    assert replica.answer() is ResizeState.ACCEPTED
    replica.tick()
    assert replica.answer() is ResizeState.READY


@pytest.mark.parametrize(("may_pass", "num_failures"), [(False, 2), (True, 4)])
def test_an_agent_that_gives_up_says_so_to_the_launcher(
    replica: _Replica, caplog: pytest.LogCaptureFixture, may_pass: bool, num_failures: int
) -> None:
    """The launcher would otherwise start it again, and it would try as often as before."""
    replica.agent._inbox.poll = lambda now_s: None  # type: ignore[method-assign]
    for _ in range(num_failures):
        assert replica.agent.exit_status == 0
        for rank in replica.ranks:
            rank.state, rank.has_progress, rank.may_pass = RankState.EXITED, False, may_pass
            rank.error, rank.status = "ModuleNotFoundError: No module named 'a'", ExitStatus(1)
        replica.tick()
        replica.agent._generation_started()
    assert replica.agent.exit_status == (TRANSIENT if may_pass else GIVEN_UP)
    assert ": ModuleNotFoundError: No module named 'a': it failed" in caplog.text


def test_ranks_that_start_are_watched_anew(
    replica: _Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_pauses, started = 0, []

    def pause(agent: object) -> None:
        nonlocal num_pauses
        num_pauses += 1
        assert num_pauses < 9, "it waits for ranks that have started"

    monkeypatch.setattr(rank_agent.ProcessAgent, "_pause", pause)
    agent: Any = replica.agent
    monkeypatch.setattr(agent, "_environment", lambda worker, group: {})
    for one in replica.ranks:
        one.state = RankState.STANDBY
        monkeypatch.setattr(
            one, "start_training", lambda *given, process=one: started.append(process), False
        )
    workers = [SimpleNamespace(local_rank=number) for number in range(2)]
    agent._ended_at_s = 5.0
    agent._start_workers(SimpleNamespace(workers=workers))
    assert started == replica.ranks and agent._ended_at_s == 0.0


def test_only_the_ranks_that_were_lost_are_replaced(replica: _Replica) -> None:
    agent: Any = replica.agent
    for one in replica.ranks:
        one.state = RankState.STANDBY
        one.abort_training = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    lost = replica.ranks[1]
    agent._lost = {1}
    agent._stop_workers(agent._worker_group)
    assert lost.state is RankState.EXITED and list(agent._ranks) == [0]
    agent._ranks[1] = new = FakeProcess()
    new.state = RankState.STANDBY
    new.abort_training = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    agent._stop_workers(agent._worker_group)
    assert new.state is RankState.STANDBY and list(agent._ranks) == [0, 1]


def test_a_process_that_trains_again_has_no_exit_status() -> None:
    sent: list[dict[str, Any]] = []
    process: Any = object.__new__(RankProcess)
    process._channel = SimpleNamespace(
        send=lambda *fds, **message: sent.append(message | {"fds": fds})
    )
    process._lease_until_s, process.status = None, ExitStatus(1)
    process.start_training({"RANK": "1"}, ["--x"])
    assert process.status is None and process.state is RankState.TRAINING
    start = {"start": {"RANK": "1"}, "arguments": ["--x"]}
    with socket.socket() as listener:
        process.start_training({"RANK": "1"}, ["--x"], listener)
        with_listener = start | {"has_listener": True, "fds": (listener.fileno(),)}
    assert sent == [start | {"has_listener": False, "fds": ()}, with_listener]


def test_each_signal_is_forwarded_once(replica: _Replica) -> None:
    for one in replica.ranks:
        vars(one)["signal"] = one.signals.append
    for num_stops in (1, 1, 2):
        replica.stops[:] = [signal.SIGTERM] * num_stops
        replica.tick()
        assert [len(one.signals) for one in replica.ranks] == [num_stops] * 2


def test_an_error_of_a_user_waits_until_the_other_ranks_have_ended(replica: _Replica) -> None:
    failing, other = replica.ranks
    failing.state, failing.status = RankState.ENDED, ExitStatus(2)
    assert replica.tick().state is WorkerState.HEALTHY
    other.error = "connection closed"
    assert replica.tick().state is WorkerState.FAILED


@pytest.mark.parametrize("num_spares", [0, 1])
def test_only_the_configured_spares_remain_the_warm_ones_first(
    replica: _Replica, num_spares: int
) -> None:
    killed: list[Any] = []
    agent: Any = replica.agent
    agent._num_spares, agent._kill = num_spares, killed.extend
    starting, warm, other = (FakeProcess() for _ in range(3))
    starting.state, warm.state, other.state = (
        RankState.STARTING,
        RankState.STANDBY,
        RankState.STARTING,
    )
    agent._spares = [starting, warm, other]
    agent._end_surplus_spares()
    assert agent._spares == [warm][:num_spares]
    assert len(killed) == 3 - num_spares and starting in killed and other in killed
