"""How the coordinator resizes a run on several machines, on a clock of the test."""

from dataclasses import replace

import pytest

from tests.unit.fault_tolerance.supervision.coordinator.rig import Rig, fail, stand_by
from torchtitan_lite.core.errors import MACHINE_FAULT
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    FailureKind,
    NodeState,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    HOLD_S,
    LEARN_S,
    LEASE_S,
    REPORT_S,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import LEAVE_S, ResizeState

_MESH = "2 --parallelism.tensor_parallel_degree=2"


def _training() -> Rig:
    """Return two machines whose ranks train, and a spare machine."""
    rig = Rig("a", "b", "c")
    rig.start()
    rig.train("a", "b")
    rig.run(1)
    return rig


def _request(rig: Rig, name: str = "b", key: str = "r1", mesh: str = _MESH) -> None:
    rig.machines[name] = replace(rig.machines[name], request=key, request_mesh=mesh)


def _resize_and_lose_b(rig: Rig) -> None:
    """Resize the run, train on the new mesh, and replace a machine by the spare one."""
    _request(rig)
    rig.run(5)
    rig.train("a", "b")
    rig.run(2)
    rig.silent.add("b")
    rig.run(LEARN_S + 5)
    assert rig.places()["c"] == 1


def _present(rig: Rig) -> tuple[str, ResizeState]:
    answer = rig.answers["a"]
    return answer.resize, answer.resize_state


def test_all_machines_resize_together() -> None:
    rig = _training()
    rig.slow.add("a")
    _request(rig)
    rig.run(20)
    assert _present(rig) == ("r1", ResizeState.ACCEPTED) and rig.generation() == 1
    rig.slow.clear()
    # The ranks of a machine are late, and nothing starts before they have left.
    rig.stays.add("b")
    rig.run(20)
    assert rig.machines["a"].has_left and rig.generation() == 1
    assert rig.answers["b"].request_state is ResizeState.READY
    rig.stays.clear()
    rig.run(3)
    assert rig.generation() == 2 and rig.places() == {"a": 0, "b": 1}
    assert {one.mesh for one in rig.answers.values()} == {_MESH}
    assert _present(rig) == ("r1", ResizeState.LEFT)
    rig.train("a")
    rig.run(2)
    assert _present(rig) == ("r1", ResizeState.LEFT)
    rig.train("b")
    rig.run(2)
    assert rig.ended["r1"] == (ResizeState.DONE, "") and not rig.answers["a"].resize
    # It is not followed again, and later generations keep the mesh.
    rig.run(5)
    fail(rig, "a", FailureKind.DEATH, "rank 0: killed by SIGKILL")
    rig.run(5)
    assert rig.generation() == 3 and rig.answers["a"].mesh == _MESH


def test_a_spare_machine_joins_on_the_new_mesh() -> None:
    rig = _training()
    _resize_and_lose_b(rig)
    assert rig.machines["c"].mesh == _MESH


def test_a_lost_lease_ends_a_resize_that_not_all_machines_have_joined() -> None:
    rig = _training()
    _request(rig)
    rig.run(5, until=lambda: rig.generation() == 2)
    rig.silent = {"a"}
    rig.run(1)
    rig.send("b", phase=NodeState.STANDBY, has_lost_lease=True)
    rig.silent = set()
    rig.run(5)
    assert rig.ended.get("r1") == (ResizeState.FAILED, "b was cut off")
    assert rig.generation() == 3 and rig.answers["a"].mesh == "1"


def test_a_request_that_one_machine_refuses_is_rejected() -> None:
    rig = _training()
    rig.slow.add("a")
    _request(rig)
    rig.run(2)
    rig.machines["a"] = replace(rig.machines["a"], refused="r1", refusal="it has one GPU")
    rig.run(2)
    assert rig.ended["r1"] == (ResizeState.REJECTED, "it has one GPU") and rig.generation() == 1
    # The next request is followed.
    rig.slow.clear()
    _request(rig, key="r2")
    rig.run(5)
    assert _present(rig) == ("r2", ResizeState.LEFT)


def test_the_present_mesh_needs_no_resize() -> None:
    rig = _training()
    _request(rig, mesh="1")
    rig.run(3)
    assert rig.ended["r1"] == (ResizeState.DONE, "") and rig.generation() == 1


def test_machines_that_do_not_become_ready_end_the_request() -> None:
    rig = _training()
    rig.slow.add("a")
    _request(rig)
    rig.run(600)
    assert _present(rig) == ("r1", ResizeState.ACCEPTED)
    rig.send("a")
    rig.send("b")
    state, reason = rig.ended["r1"]
    assert state is ResizeState.FAILED and "a did not start missing processes in 600 s" in reason
    assert rig.generation() == 1


@pytest.mark.parametrize("is_restarted", [False, True])
def test_requests_of_two_machines_are_followed_one_after_the_other(is_restarted: bool) -> None:
    rig = _training()
    rig.slow.add("a")
    _request(rig)
    rig.run(2)
    _request(rig, name="a", key="r2", mesh="3")
    rig.run(2)
    assert _present(rig) == ("r1", ResizeState.ACCEPTED)
    if is_restarted:
        rig.restart_server()
    rig.slow.clear()
    meshes = []
    for _ in range(2):
        rig.run(5)
        for answer in (rig.answers[name] for name in "ab"):
            is_followed = answer.request == answer.resize
            state = ResizeState.LEFT if is_followed else ResizeState.ACCEPTED
            assert (answer.resize_state, answer.request_state) == (ResizeState.LEFT, state)
        meshes.append(rig.answers["a"].mesh)
        rig.train("a", "b")
        rig.run(2)
    rig.run(30)
    assert sorted(meshes) == [_MESH, "3"] and rig.generation() == 3
    assert {state for state, _ in rig.ended.values()} == {ResizeState.DONE} and len(rig.ended) == 2


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("kind", [FailureKind.EXCEPTION, FailureKind.USER_ERROR])
def test_a_mesh_whose_first_step_fails_is_left_again(kind: FailureKind, is_restarted: bool) -> None:
    rig = _training()
    _request(rig)
    rig.run(5)
    rig.train("a")
    rig.run(1)
    if is_restarted:
        rig.restart_server()
        rig.run(1)
    fail(rig, "b", kind, "rank 2: out of memory", "memory", status=1)
    rig.run(3)
    assert rig.generation() == 3 and rig.answers["a"].mesh == "1"
    rig.train("a", "b")
    rig.run(2)
    assert rig.ended["r1"] == (ResizeState.FAILED, "b: rank 2: out of memory")
    # It does not count as a failure of the run or of the machine.
    fail(rig, "b", FailureKind.EXCEPTION, "rank 1: out of memory", "memory", status=1)
    rig.run(3)
    assert rig.generation() == 4 and rig.places() == {"a": 0, "b": 1}


def test_a_machine_at_fault_is_replaced_and_the_run_returns_to_its_mesh() -> None:
    rig = _training()
    _request(rig)
    rig.run(5)
    fail(rig, "b", FailureKind.USER_ERROR, "rank 2: a faulty GPU", status=MACHINE_FAULT)
    rig.silent.add("b")
    rig.send("b", phase=NodeState.STANDBY)
    rig.run(5)
    assert rig.places()["c"] == 1 and rig.answers["a"].mesh == "1"


def test_a_machine_that_is_lost_while_others_leave_delays_the_resize() -> None:
    rig = _training()
    rig.stays.add("b")
    _request(rig, name="a")
    rig.run(2)
    assert rig.machines["a"].has_left
    rig.silent.add("b")
    rig.run(LEARN_S + 4)
    assert rig.generation() == 2 and rig.places()["c"] == 1 and rig.answers["a"].mesh == "1"
    assert _present(rig) == ("r1", ResizeState.ACCEPTED)
    rig.train("a", "c")
    rig.run(3)
    assert rig.generation() == 3 and rig.answers["a"].mesh == _MESH


def test_generations_that_fail_instead_of_being_left_end_the_resize() -> None:
    rig = _training()
    rig.stays = {"a", "b"}
    _request(rig, name="a")
    for generation in (1, 2):
        rig.run(3)
        assert _present(rig) == ("r1", ResizeState.READY)
        fail(rig, "b", FailureKind.DEATH, "rank 1: killed by SIGKILL")
        rig.run(5)
        assert rig.generation() == generation + 1
        rig.train("a", "b")
        rig.run(1)
    rig.run(3)
    assert rig.ended["r1"][0] is ResizeState.FAILED and rig.answers["a"].mesh == "1"


def test_ranks_that_do_not_leave_are_stopped() -> None:
    rig = _training()
    rig.stays = {"a", "b"}
    _request(rig)
    rig.run(3, until=lambda: _present(rig)[1] is ResizeState.READY)
    ordered_s = rig.now_s - REPORT_S
    rig.run(LEAVE_S - REPORT_S)
    assert rig.now_s == ordered_s + LEAVE_S and rig.state() is RunState.RUNNING
    assert rig.send("a").state is RunState.FORMING
    rig.run(3)
    assert rig.generation() == 2 and rig.answers["a"].mesh == _MESH


def test_a_late_leave_explains_no_later_failure() -> None:
    rig = _training()
    rig.stays = {"a", "b"}
    _request(rig, name="a")
    rig.run(LEAVE_S + 10, until=lambda: rig.state() is RunState.FORMING)
    rig.send(
        "b",
        phase=NodeState.STANDBY,
        failure=FailureKind.DEATH,
        failure_text="rank 1: out of memory",
    )
    rig.run(5)
    assert rig.generation() == 2 and _present(rig) == ("r1", ResizeState.ACCEPTED)
    rig.stays, rig.slow = set(), {"b"}
    rig.train("a", "b")
    rig.run(2)
    fields = {"failure": FailureKind.EXCEPTION, "failure_text": "rank 1: InjectedError"}
    rig.send("b", phase=NodeState.FAILED, ready_for="r1", **fields)
    rig.run(5)
    assert rig.generation() == 3 and rig.answers["b"].is_blamed
    assert rig.answers["a"].reason == "b: rank 1: InjectedError"


@pytest.mark.parametrize("state", ["preparing", "leaving", "left"])
def test_a_machine_asked_to_stop_ends_a_resize(state: str) -> None:
    rig = _training()
    if state == "preparing":
        rig.slow.add("a")
    elif state == "leaving":
        rig.stays = {"a", "b"}
    _request(rig)
    rig.run(3)
    rig.machines["b"] = replace(rig.machines["b"], is_stopping=True)
    rig.run(HOLD_S / 2 - 2)
    assert rig.generation() == 1 + (state == "left")
    rig.run(7)
    assert rig.state() is RunState.RUNNING
    if state == "preparing":
        assert rig.generation() == 1
        assert rig.ended["r1"] == (ResizeState.FAILED, "b was asked to stop")
    else:
        # Its ranks save and exit in the next generation.
        assert rig.generation() == 2
        is_followed = rig.answers["a"].mesh == _MESH
        assert is_followed == (state == "left")


def test_an_outage_while_ranks_leave_blames_no_machine() -> None:
    rig = _training()
    rig.stays.add("b")
    _request(rig, name="a")
    rig.run(2)
    rig.now_s += LEASE_S + 1
    rig.machines["b"] = replace(rig.machines["b"], has_lost_lease=True)
    stand_by(rig, "b")
    rig.run(3)
    rig.train("a", "b")
    # It would be the second failure of this machine, which a spare one replaces.
    fail(rig, "b", FailureKind.DEATH, "rank 1: killed by SIGKILL")
    rig.run(3)
    assert rig.state() is RunState.RUNNING and rig.places()["b"] == 1


@pytest.mark.parametrize("has_started", [False, True], ids=["while ranks leave", "on the new mesh"])
@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_restarted_coordinator_continues_a_resize(has_started: bool, is_stopping: bool) -> None:
    rig = _training()
    rig.stays = set() if has_started else {"b"}
    _request(rig)
    rig.run(3)
    rig.restart_server()
    rig.run(3)
    assert rig.generation() == 1 + has_started
    rig.stays.clear()
    if is_stopping:
        rig.machines["b"] = replace(rig.machines["b"], is_stopping=True)
    rig.run(LEARN_S + 2)
    assert rig.state() is RunState.RUNNING and rig.generation() == 2
    # Ranks that have left for a machine that stops train on the former mesh, to save and exit.
    is_followed = has_started or not is_stopping
    assert rig.answers["a"].mesh == (_MESH if is_followed else "1")
    rig.train("a", "b")
    rig.run(3)
    assert rig.ended["r1"][0] is (ResizeState.DONE if is_followed else ResizeState.FAILED)


def test_a_coordinator_restarted_before_all_have_joined_knows_the_former_mesh() -> None:
    rig = _training()
    _request(rig)
    rig.run(10, until=lambda: rig.machines["b"].has_left)
    former = rig.machines["b"]
    rig.run(3, until=lambda: rig.machines["a"].generation == 2)
    # The answer has not reached it.
    rig.machines["b"] = replace(former, sequence=rig.machines["b"].sequence)
    rig.restart_server()
    rig.run(LEARN_S + 2)
    assert rig.generation() == 3 and rig.answers["a"].mesh == _MESH
    fail(rig, "b", FailureKind.USER_ERROR, "rank 2: it needs 3 ranks", status=1)
    rig.run(3)
    assert rig.state() is RunState.RUNNING and rig.answers["a"].mesh == "1"


def test_a_mesh_that_was_trained_on_before_is_kept() -> None:
    """A spare machine without a step on it takes a place, and the coordinator is restarted."""
    rig = _training()
    rig.machines["c"] = replace(rig.machines["c"], trained_mesh="1")
    _resize_and_lose_b(rig)
    rig.restart_server()
    rig.run(2)
    fail(rig, "c", FailureKind.DEATH, "rank 2: killed by SIGKILL")
    rig.run(4)
    assert rig.answers["a"].mesh == _MESH
