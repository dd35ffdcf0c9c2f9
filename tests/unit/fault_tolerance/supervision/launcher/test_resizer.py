"""When and how all replicas move to another mesh: in their processes, or by starting again."""

import json
import sys
import time
from pathlib import Path
from typing import cast

import pytest

from torchtitan_lite.fault_tolerance.supervision.launcher.replica import Replica, ReplicaState
from torchtitan_lite.fault_tolerance.supervision.launcher.resize import (
    ResizePolicy,
    Resizer,
    SlotsFile,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    RequestInbox,
    ResizeRequest,
    ResizeState,
    RunMesh,
    read_answer,
    send_request,
)

_TP = RunMesh(4, ("--parallelism.tensor_parallel_degree=2",))


class _Replica:
    """A replica that is in the state that the test says."""

    def __init__(self, number: int) -> None:
        self.number, self.state, self.is_training = number, ReplicaState.TRAINING, True
        self.is_over = self.has_left = self.stays = False
        self.num_leaves = self.num_kills = 0

    def leave_to_resize(self) -> None:
        self.num_leaves += 1
        self.has_left = not self.stays

    def kill(self) -> None:
        self.num_kills += 1
        self.has_left = True


class _Run:
    """Two replicas of up to four ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.slots, self.printed = folder, folder / "slots", '{"refusal": ""}'
        self.slots.write_text("{}")
        self.events: list[str] = []
        self.replicas = [_Replica(number) for number in range(2)]
        self.resizer = Resizer(
            ResizePolicy([1, 2, 4], 2, regrow_after_s=100),
            SlotsFile(self.slots, self.events.append),
            RequestInbox(folder),
            check_command=self._check,
            environment={},
            grace_s=30,
            report_event=self.events.append,
        )
        self.now_s, self.num_starts = 0.0, 0
        self.poll()

    def _check(self, mesh: RunMesh) -> list[str]:
        return [sys.executable, "-c", f"print({self.printed!r})", mesh.to_text()]

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.now_s += 1
            if self.resizer.poll(cast("list[Replica]", self.replicas), self.now_s):
                self.num_starts += 1
                for replica in self.replicas:
                    replica.has_left = False

    def limit(self, ranks: int) -> None:
        self.slots.write_text(f'{{"1": {ranks}}}')
        self.poll(2)

    def follow(self, mesh: RunMesh) -> None:
        """Let the members resize to a mesh, as their coordinator decides."""
        assert self.resizer.request is not None and self.resizer.request.mesh == mesh
        for state in (ResizeState.READY, ResizeState.LEFT, ResizeState.DONE):
            self.resizer.answer(state)
        self.poll()
        assert self.resizer.mesh == mesh and self.resizer.request is None

    def request(self, mesh: RunMesh) -> ResizeRequest:
        request = ResizeRequest(mesh=mesh)
        send_request(self.folder, request)
        # The first poll after an answer reads nothing.
        self.poll(3)
        return request

    def outcome(self, request: ResizeRequest) -> tuple[ResizeState, str]:
        answer = read_answer(self.folder, request)
        assert answer is not None
        return answer.state, answer.reason

    def refusal(self, request_id: str = "r1") -> str:
        """Return the answer of the check, which all members ask for."""
        deadline_s = time.monotonic() + 30
        while (refusal := self.resizer.refusal(request_id, _TP.to_text())) is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert self.resizer.refusal(request_id, _TP.to_text()) == refusal
        assert not self.resizer.pids
        return refusal


@pytest.fixture
def run(tmp_path: Path) -> _Run:
    return _Run(tmp_path)


def test_replicas_that_train_resize_in_their_processes(run: _Run) -> None:
    run.limit(2)
    run.follow(RunMesh(2))
    assert run.num_starts == 0 and not any(replica.num_leaves for replica in run.replicas)
    assert run.events == [
        "all replicas resize to 2 ranks each in their processes: replica 1 has slots for 2"
    ]


def test_a_lost_slot_is_followed_at_once_and_a_new_one_when_all_train(run: _Run) -> None:
    first = run.replicas[0]
    first.state, first.is_training = ReplicaState.RESTARTING, False
    run.limit(2)
    run.poll()
    assert run.resizer.mesh == RunMesh(2) and run.num_starts == 1
    run.limit(4)
    assert run.resizer.mesh == RunMesh(2) and run.resizer.request is None
    first.state, first.is_training = ReplicaState.TRAINING, True
    run.poll()
    run.follow(RunMesh(4))
    assert run.events[-1].endswith("in their processes: slots are available again")


def test_a_requested_mesh_stays_while_there_are_slots(run: _Run) -> None:
    request = run.request(_TP)
    run.follow(_TP)
    assert run.outcome(request) == (ResizeState.DONE, "")
    for ranks, mesh in ((2, RunMesh(2)), (4, _TP)):
        run.limit(ranks)
        run.follow(mesh)
    # A request for the present mesh keeps it, too.
    assert run.outcome(run.request(_TP)) == (ResizeState.DONE, "")
    run.limit(2)
    run.follow(RunMesh(2))
    assert run.outcome(run.request(RunMesh(2))) == (ResizeState.DONE, "")
    run.limit(4)
    assert run.resizer.mesh == RunMesh(2) and run.num_starts == 0


def test_requests_without_slots_change_nothing(run: _Run) -> None:
    assert run.outcome(run.request(RunMesh(8))) == (
        ResizeState.REJECTED,
        "each replica can have 4 ranks: --nproc-per-replica allows 4",
    )
    assert run.resizer.request is None and not run.events


def test_a_request_waits_until_all_replicas_train(run: _Run) -> None:
    run.replicas[1].state = ReplicaState.HEALING
    request = run.request(_TP)
    assert read_answer(run.folder, request) is None
    run.replicas[1].state = ReplicaState.TRAINING
    run.poll()
    assert run.outcome(request) == (ResizeState.ACCEPTED, "")


@pytest.mark.parametrize("state", [ResizeState.REJECTED, ResizeState.FAILED])
@pytest.mark.parametrize("is_requested", [False, True])
def test_after_a_failure_slots_count_and_requests_do_not(
    run: _Run, is_requested: bool, state: ResizeState
) -> None:
    request = run.request(RunMesh(2)) if is_requested else None
    if not is_requested:
        run.limit(2)
    run.resizer.answer(state, "a rank has failed")
    # The outcome of one member is that of all.
    run.resizer.answer(ResizeState.DONE)
    run.poll(3)
    why = "resizing in their processes was not possible: a rank has failed"
    assert run.events.count(why) == 1
    if request is not None:
        assert run.outcome(request) == (state, "a rank has failed")
        assert run.resizer.mesh == RunMesh(4) and run.num_starts == 0
    else:
        assert run.resizer.mesh == RunMesh(2) and run.num_starts == 1
        assert run.events[-1] == "all replicas resize to 2 ranks each: replica 1 has slots for 2"


def test_a_replica_that_does_not_leave_in_time_is_killed(run: _Run) -> None:
    run.replicas[0].is_training, run.replicas[1].stays = False, True
    run.limit(2)
    assert run.num_starts == 0 and run.replicas[1].num_kills == 0
    run.now_s += 30
    run.poll(2)
    assert run.num_starts == 1 and run.replicas[1].num_kills == 1


@pytest.mark.parametrize("has_left", [False, True])
def test_a_replica_that_fails_while_all_resize_for_slots_starts_again_on_them(
    run: _Run, has_left: bool
) -> None:
    """It may have lost its slot before it was told to leave it."""
    run.limit(2)
    if has_left:
        run.resizer.answer(ResizeState.LEFT)
    run.replicas[1].state, run.replicas[1].is_training = ReplicaState.ENDING, False
    run.poll(2)
    assert (run.resizer.request is None) == (run.num_starts == 1) == (not has_left)


def test_no_resize_begins_once_a_replica_has_ended(run: _Run) -> None:
    run.replicas[1].is_over = True
    run.limit(2)
    assert run.resizer.request is None and run.num_starts == 0


def test_the_end_of_a_run_answers_a_request_once(run: _Run) -> None:
    request = run.request(_TP)
    for reason in ("the replicas stop", "the run has ended"):
        run.resizer.end(reason)
        assert run.outcome(request) == (ResizeState.FAILED, "the replicas stop")


def test_a_mesh_is_checked_once_for_all_replicas(run: _Run) -> None:
    assert run.resizer.refusal("r0", _TP.to_text()) is None and len(run.resizer.pids) == 1
    assert run.refusal("r0") == ""
    run.printed = json.dumps({"refusal": "it has no snapshots"})
    assert run.refusal("r0") == "" and run.refusal("r1") == "it has no snapshots"
    run.printed = 'a warning\n{"refusal": "too large"}\nanother one\n1'
    assert run.refusal("r3") == "too large"
    run.printed = "Traceback: no module named a"
    assert run.refusal("r2") == "it cannot be checked: Traceback: no module named a"


def test_numbers_that_were_checked_at_the_start_need_no_process(run: _Run) -> None:
    assert run.resizer.refusal("r0", "2") == "" and not run.resizer.pids
    run.resizer._own_refusal = "it has no snapshots"
    assert run.resizer.refusal("r1", "2") == "it has no snapshots" and not run.resizer.pids
    assert run.resizer.refusal("r2", "3") is None and len(run.resizer.pids) == 1
    run.resizer.end("")


def test_a_check_ends_with_the_run(run: _Run) -> None:
    assert run.resizer.refusal("r0", _TP.to_text()) is None
    run.resizer.end("the run has ended")
    assert run.resizer.pids == []
