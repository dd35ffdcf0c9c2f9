"""Replicas go through the phases of a resize together; what fails leaves them on one mesh."""

from pathlib import Path
from typing import cast

import pytest

from torchtitan_lite.fault_tolerance.supervision.launcher.replica_process import (
    ReplicaProcess,
    ReplicaState,
)
from torchtitan_lite.fault_tolerance.supervision.launcher.resize import (
    ResizePolicy,
    Resizer,
    SlotsFile,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    Permission,
    RequestInbox,
    ResizeAnswer,
    ResizeRequest,
    ResizeState,
    RunMesh,
    read_answer,
    send_request,
)

_TP = RunMesh(4, ("--parallelism.tensor_parallel_degree=2",))


class _Replica:
    """A replica whose agent answers what the test says."""

    def __init__(self, number: int) -> None:
        self.number, self.state = number, ReplicaState.TRAINING
        self.has_agent = self.is_running = self.is_training = True
        self.is_over = self.has_left = self.is_unreachable = False
        self.request: ResizeRequest | None = None
        self.answer: ResizeAnswer | None = None
        self.permissions: list[Permission] = []
        self.num_restarts = 0

    def resize_in_place(self, request: ResizeRequest) -> None:
        if self.is_unreachable:
            raise OSError("no space left on device")
        self.request, self.answer, self.permissions = request, None, []

    def say(self, state: ResizeState, reason: str = "") -> None:
        assert self.request is not None
        self.answer = ResizeAnswer(id=self.request.id, state=state, reason=reason)

    def resize_answer(self, request: ResizeRequest) -> ResizeAnswer | None:
        return self.answer if request is self.request else None

    def permit(self, request: ResizeRequest, permission: Permission, now_s: float) -> None:
        if self.is_unreachable:
            raise OSError("no space left on device")
        assert request is self.request
        self.permissions.append(permission)

    def resize(self) -> None:
        self.has_left = True

    def start_generation(self) -> None:
        self.num_restarts += 1
        self.has_left = False


class _Run:
    """Two replicas of up to four ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.slots = folder, folder / "slots"
        self.slots.write_text("{}")
        self.events: list[str] = []
        self.replicas = [_Replica(number) for number in range(2)]
        self.resizer = Resizer(
            ResizePolicy([1, 2, 4], 2, regrow_after_s=100),
            SlotsFile(self.slots, self.events.append),
            RequestInbox(folder),
            grace_s=30,
            report_event=self.events.append,
        )
        self.now_s = 0.0
        self.poll()

    def poll(self) -> None:
        self.now_s += 1
        self.resizer.poll(cast("list[ReplicaProcess]", self.replicas), self.now_s)

    def say(self, state: ResizeState) -> None:
        for one in self.replicas:
            one.say(state)
        self.poll()

    def permissions(self) -> list[list[Permission]]:
        return [one.permissions for one in self.replicas]

    def restarts(self) -> list[int]:
        return [one.num_restarts for one in self.replicas]

    def limit(self, ranks: int) -> None:
        self.slots.write_text(f'{{"1": {ranks}}}')
        self.poll()
        self.poll()

    def request(self, mesh: RunMesh) -> ResizeRequest:
        request = ResizeRequest(mesh=mesh)
        send_request(self.folder, request)
        for _ in range(3):
            # The first poll after an answer reads nothing.
            self.poll()
        return request

    def outcome(self, request: ResizeRequest) -> tuple[ResizeState, str]:
        answer = read_answer(self.folder, request)
        assert answer is not None
        return answer.state, answer.reason


@pytest.fixture
def run(tmp_path: Path) -> _Run:
    return _Run(tmp_path)


def test_no_replica_leaves_or_starts_before_all_can(run: _Run) -> None:
    run.limit(2)
    first, last = run.replicas
    for state, permission in (
        (ResizeState.READY, Permission.LEAVE),
        (ResizeState.LEFT, Permission.START),
    ):
        first.say(state)
        run.poll()
        assert permission not in first.permissions
        last.say(state)
        run.poll()
        assert run.permissions() == [[*first.permissions]] * 2 and first.permissions[-1:] == [
            permission
        ]
    # A replica that is started again now has the new mesh.
    assert run.resizer.mesh == RunMesh(2)
    run.say(ResizeState.DONE)
    assert run.restarts() == [0, 0]
    assert run.events == [
        "all replicas resize to 2 ranks each in their processes: replica 1 has slots for 2"
    ]


def test_a_lost_slot_is_followed_at_once_and_a_new_one_when_all_train(run: _Run) -> None:
    first = run.replicas[0]
    first.state, first.is_training = ReplicaState.RESTARTING, False
    run.limit(2)
    assert run.resizer.mesh == RunMesh(2) and run.restarts() == [1, 1]
    run.limit(4)
    assert run.resizer.mesh == RunMesh(2) and first.request is None
    first.state, first.is_training = ReplicaState.TRAINING, True
    run.poll()
    run.poll()
    assert first.request is not None and first.request.mesh == RunMesh(4)
    assert run.events[-1].endswith("in their processes: slots are available again")


def test_a_requested_mesh_stays_while_there_are_slots(run: _Run) -> None:
    request = run.request(_TP)
    for state in (ResizeState.READY, ResizeState.LEFT, ResizeState.DONE):
        run.say(state)
    assert run.outcome(request) == (ResizeState.DONE, "") and run.resizer.mesh == _TP
    for ranks, mesh in ((2, RunMesh(2)), (4, _TP)):
        run.limit(ranks)
        for state in (ResizeState.READY, ResizeState.LEFT, ResizeState.DONE):
            run.say(state)
        assert run.resizer.mesh == mesh
    assert run.outcome(run.request(_TP)) == (ResizeState.DONE, "")
    # A request for the present mesh keeps it, too.
    run.limit(2)
    for state in (ResizeState.READY, ResizeState.LEFT, ResizeState.DONE):
        run.say(state)
    assert run.outcome(run.request(RunMesh(2))) == (ResizeState.DONE, "")
    run.limit(4)
    assert run.resizer.mesh == RunMesh(2) and run.restarts() == [0, 0]


def test_requests_that_cannot_be_followed_change_nothing(run: _Run) -> None:
    assert run.outcome(run.request(RunMesh(8))) == (
        ResizeState.REJECTED,
        "each replica can have 4 ranks: --nproc-per-replica allows 4",
    )
    run.replicas[1].has_agent = False
    assert "--spares" in run.outcome(run.request(RunMesh(2)))[1]
    assert run.permissions() == [[], []] and run.restarts() == [0, 0] and not run.events


def test_the_end_of_a_run_answers_a_request_once(run: _Run) -> None:
    request = run.request(_TP)
    for reason in ("the replicas stop", "the run has ended"):
        run.resizer.end(reason)
        assert run.outcome(request) == (ResizeState.FAILED, "the replicas stop")


@pytest.mark.parametrize("is_unreachable", [False, True])
def test_a_mesh_that_is_rejected_is_cancelled(is_unreachable: bool, run: _Run) -> None:
    run.replicas[1].is_unreachable = is_unreachable
    request = run.request(_TP)
    if not is_unreachable:
        run.replicas[0].say(ResizeState.READY)
        run.replicas[1].say(ResizeState.REJECTED, "why")
        run.poll()
        assert run.outcome(request) == (ResizeState.REJECTED, "replica 1: why")
    else:
        assert run.outcome(request)[0] is ResizeState.FAILED
    assert run.replicas[0].permissions == [Permission.CANCEL]
    assert run.restarts() == [0, 0] and run.resizer.mesh == RunMesh(4)


@pytest.mark.parametrize("is_requested", [False, True])
@pytest.mark.parametrize("phase", [ResizeState.READY, ResizeState.LEFT, ResizeState.DONE])
def test_all_replicas_start_again_on_one_mesh_after_a_failure(
    phase: ResizeState, is_requested: bool, run: _Run
) -> None:
    if is_requested:
        request = run.request(RunMesh(2))
    else:
        request = None
        run.limit(2)
    for state in (ResizeState.READY, ResizeState.LEFT, ResizeState.DONE):
        if state is phase:
            break
        run.say(state)
    run.replicas[1].is_running = run.replicas[1].is_training = False
    run.poll()
    run.replicas[1].is_running = run.replicas[1].is_training = True
    run.poll()
    run.poll()
    has_left, has_started = phase is not ResizeState.READY, phase is ResizeState.DONE
    if request is not None:
        state, reason = run.outcome(request)
        assert (state, reason) == (ResizeState.FAILED, "replica 1 has failed")
        assert run.resizer.mesh == RunMesh(4)
        assert run.restarts() == [has_left, has_left]
    else:
        assert run.resizer.mesh == RunMesh(2)
        # Its own failure starts a replica again.
        assert run.restarts() == [not has_started, not has_started]


def test_a_replica_that_does_not_leave_is_started_again(run: _Run) -> None:
    run.limit(2)
    run.say(ResizeState.READY)
    run.now_s += 1000
    run.poll()
    run.poll()
    assert run.restarts() == [1, 1] and run.resizer.mesh == RunMesh(2)
    assert "replica 0 did not leave its training within 120 s" in run.events[-1]


def test_a_permission_that_cannot_be_written_is_written_later(run: _Run) -> None:
    run.limit(2)
    for state, permission in (
        (ResizeState.READY, Permission.LEAVE),
        (ResizeState.LEFT, Permission.START),
    ):
        run.replicas[1].is_unreachable = True
        run.say(state)
        run.poll()
        assert permission not in run.replicas[1].permissions
        run.replicas[1].is_unreachable = False
        run.poll()
        assert [one.permissions.count(permission) for one in run.replicas] == [1, 1]
    run.say(ResizeState.DONE)
    assert run.restarts() == [0, 0] and run.resizer.mesh == RunMesh(2)


def test_a_run_that_stops_answers_the_request(run: _Run) -> None:
    request = run.request(_TP)
    run.resizer.end("the run was asked to stop")
    assert run.outcome(request) == (ResizeState.FAILED, "the run was asked to stop")


def test_replicas_that_have_finished_take_no_part(run: _Run) -> None:
    run.limit(2)
    run.say(ResizeState.READY)
    first, last = run.replicas
    last.is_over, last.is_running = True, False
    first.say(ResizeState.LEFT)
    run.poll()
    assert first.permissions[-1] is Permission.START
    first.say(ResizeState.DONE)
    run.poll()
    run.poll()
    assert run.restarts() == [0, 0]
