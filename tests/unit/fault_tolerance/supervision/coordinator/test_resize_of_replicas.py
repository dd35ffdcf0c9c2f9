"""How the coordinator resizes several replicas together, on a clock of the test."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.unit.fault_tolerance.supervision.coordinator.rig import Rig, depart, fail
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    Answer,
    FailureKind,
    NodeState,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import LEARN_S
from torchtitan_lite.fault_tolerance.supervision.resize_request import LEAVE_S, ResizeState

_FAILURES = (FailureKind.DEATH, FailureKind.EXCEPTION)
_MESH = "2 --parallelism.tensor_parallel_degree=2"


class _Rig(Rig):
    """Machines of two replicas. No two replicas may train on different meshes."""

    def send(self, name: str, **changes: Any) -> Answer:
        answer = super().send(name, **changes)
        training = {
            report.mesh
            for report in self.machines.values()
            if report.phase is NodeState.JOINED and report.machine not in self.silent
        }
        assert len(training) <= 1, f"replicas train on {training}"
        return answer

    def generations(self, names: str) -> list[int]:
        """Return the generations of machines."""
        return [self.answers[name].generation for name in names]

    def meshes(self) -> set[str]:
        """Return the meshes of the machines that have a place."""
        return {answer.mesh for answer in self.answers.values() if answer.node_rank >= 0}

    def request(self, name: str) -> None:
        """Request the mesh on a machine."""
        self.machines[name] = replace(self.machines[name], request="r1", request_mesh=_MESH)

    def resize(self) -> tuple[str, ResizeState]:
        """Return the present resize as the machine "a" knows it."""
        return self.answers["a"].resize, self.answers["a"].resize_state


@pytest.fixture
def rig() -> _Rig:
    """Two replicas of two machines, a and b, c and d, and the spare machine e."""
    rig = _Rig()
    for name in "abcde":
        rig.add(name, num_machines=4, num_replicas=2)
    rig.run(LEARN_S + 3)
    rig.train(*"abcd")
    rig.run(1)
    assert rig.generations("abcd") == [1] * 4
    return rig


@pytest.mark.parametrize("requester", ["a", "d"])
def test_all_replicas_change_their_mesh_together(rig: _Rig, requester: str) -> None:
    rig.slow.add("d")
    rig.request(requester)
    rig.run(20)
    assert rig.resize() == ("r1", ResizeState.ACCEPTED), "d has no warm processes"
    rig.slow.clear()
    rig.stays.add("d")
    rig.run(20)
    # The first replica has left, and waits for the other one.
    assert rig.answers["a"].state is RunState.FORMING and rig.answers["c"].generation == 1
    rig.stays.clear()
    rig.run(3)
    assert rig.generations("abcd") == [2] * 4 and rig.meshes() == {_MESH}
    rig.train("a", "b")
    rig.run(2)
    assert rig.resize()[1] is ResizeState.LEFT, "the other replica has not committed a step"
    rig.train("c", "d")
    rig.run(2)
    assert rig.ended["r1"] == (ResizeState.DONE, "") and rig.resize()[0] == ""
    # A spare machine joins on the new mesh, and the other replica trains on.
    rig.silent.add("b")
    rig.run(LEARN_S + 3)
    assert rig.answers["e"].node_rank == 1 and rig.answers["e"].mesh == _MESH
    assert rig.answers["c"].generation == 2


@pytest.mark.parametrize("is_first", [True, False], ids=["before a step", "after a step"])
def test_all_replicas_return_if_the_first_generation_of_one_fails(
    rig: _Rig, is_first: bool
) -> None:
    rig.request("a")
    rig.run(4)
    assert rig.meshes() == {_MESH}
    if not is_first:
        rig.train("a", "b")
        rig.run(1)
    fail(rig, "d", FailureKind.EXCEPTION, "rank 3: out of memory", "memory", status=1)
    rig.run(5)
    assert rig.meshes() == {"1"} and rig.generations("ac") == [3, 3]
    assert {rig.answers[name].state for name in "abcd"} == {RunState.RUNNING}
    # A failure on the former mesh is an ordinary one: that mesh is not left again.
    fail(rig, "d", FailureKind.DEATH, "rank 3: killed by SIGKILL")
    rig.run(3)
    rig.train(*"abcd")
    rig.run(3)
    assert rig.ended["r1"] == (ResizeState.FAILED, "d: rank 3: out of memory")
    assert rig.meshes() == {"1"} and rig.generations("ac") == [3, 4]


def test_a_replica_that_fails_while_all_leave_delays_the_resize(rig: _Rig) -> None:
    rig.stays.add("d")
    rig.request("a")
    rig.run(4)
    assert rig.machines["a"].has_left and rig.answers["c"].generation == 1
    fail(rig, "d", FailureKind.DEATH, "rank 3: killed by SIGKILL")
    rig.stays.clear()
    rig.run(3)
    # Both train on the former mesh until all can leave again.
    assert rig.meshes() == {"1"} and rig.resize() == ("r1", ResizeState.ACCEPTED)
    rig.train(*"abcd")
    rig.run(4)
    assert rig.meshes() == {_MESH}


def test_ranks_that_do_not_leave_in_time_are_stopped_in_all_replicas(rig: _Rig) -> None:
    rig.stays = {"c", "d"}
    rig.request("a")
    rig.run(LEAVE_S + 5)
    assert rig.meshes() == {_MESH} and rig.generations("abcd") == [2] * 4


def test_a_replica_without_machines_does_not_delay_the_others(rig: _Rig) -> None:
    rig.silent |= {"b", "e"}
    for name in "be":
        del rig.answers[name]
    rig.run(LEARN_S + 3)
    assert rig.answers["a"].state is RunState.FORMING
    rig.request("c")
    rig.run(5)
    assert rig.answers["c"].mesh == _MESH
    rig.train("c", "d")
    rig.run(2)
    assert rig.ended["r1"][0] is ResizeState.DONE
    # It gets the present mesh once it is complete.
    rig.add("f", num_machines=4, num_replicas=2)
    rig.run(3)
    assert rig.answers["a"].state is RunState.RUNNING and rig.meshes() == {_MESH}


def test_a_replica_that_starts_delays_the_resize(rig: _Rig) -> None:
    fail(rig, "b", FailureKind.DEATH, "rank 1: killed by SIGKILL")
    rig.run(3)
    rig.request("c")
    rig.run(30)
    assert rig.answers["c"].resize == "" and rig.generations("ac") == [2, 1]
    rig.train("a", "b")
    rig.run(5)
    assert rig.meshes() == {_MESH}


def test_a_machine_that_is_asked_to_stop_ends_a_resize_that_has_not_begun(rig: _Rig) -> None:
    rig.slow.add("c")
    rig.request("a")
    rig.run(2)
    rig.machines["b"] = replace(rig.machines["b"], is_stopping=True)
    rig.run(2)
    assert rig.ended["r1"] == (ResizeState.FAILED, "b was asked to stop")
    depart(rig, "b", others="a")
    rig.run(5)
    assert rig.answers["e"].node_rank == 1 and rig.meshes() == {"1"}
    assert rig.answers["c"].generation == 1


def test_a_machine_that_is_asked_to_stop_while_all_leave_is_replaced(rig: _Rig) -> None:
    rig.stays.add("c")
    rig.request("a")
    rig.run(3)
    rig.machines["b"] = replace(rig.machines["b"], is_stopping=True)
    rig.stays.clear()
    rig.run(4)
    assert rig.meshes() == {_MESH} and rig.answers["e"].node_rank == 1


@pytest.mark.parametrize("phase", ["leaving", "half left", "left"])
def test_a_restarted_coordinator_continues_the_resize_of_all_replicas(
    rig: _Rig, phase: str
) -> None:
    if phase != "left":
        rig.stays = {"c", "d"} if phase == "half left" else {*"abcd"}
    rig.request("a")
    rig.run(3 if phase != "left" else 4)
    assert rig.machines["a"].has_left == (phase == "half left")
    rig.restart_server()
    rig.stays.clear()
    rig.run(LEARN_S + 5)
    assert rig.meshes() == {_MESH} and rig.generations("abcd") == [2] * 4
    rig.train(*"abcd")
    rig.run(2)
    assert rig.ended["r1"][0] is ResizeState.DONE


def test_a_coordinator_restarted_while_replicas_start_on_a_new_mesh_knows_it(rig: _Rig) -> None:
    rig.request("a")
    rig.run(10, until=lambda: all(rig.machines[name].has_left for name in "abcd"))
    left = {name: rig.machines[name] for name in "cd"}
    rig.run(3, until=lambda: rig.machines["a"].generation == 2)
    # The answers have not reached the other replica.
    for name, report in left.items():
        rig.machines[name] = replace(report, sequence=rig.machines[name].sequence)
    rig.restart_server()
    rig.run(LEARN_S + 3)
    assert rig.meshes() == {_MESH}


@pytest.mark.parametrize("kind", _FAILURES)
@pytest.mark.parametrize("pause_s", [0.0, 0.5])
def test_a_mesh_on_which_all_replicas_fail_is_left_again(
    rig: _Rig, kind: FailureKind, pause_s: float
) -> None:
    rig.request("a")
    rig.run(4)
    assert rig.meshes() == {_MESH}
    for name in "bd":
        if rig.machines[name].phase is NodeState.JOINED:
            fail(rig, name, kind, "rank 1: out of memory", "memory", status=1)
        rig.run(pause_s)
    rig.run(5)
    rig.train(*"abcd")
    rig.run(3)
    assert rig.meshes() == {"1"} and rig.resize()[0] == ""
    assert [rig.answers[name].state for name in "ac"] == [RunState.RUNNING] * 2
    assert rig.ended["r1"][0] is ResizeState.FAILED
    # It does not count as a failure of the run.
    fail(rig, "b", kind, "rank 1: out of memory", "memory", status=1)
    rig.run(5)
    assert rig.answers["a"].state is RunState.RUNNING


def test_a_resize_ends_if_a_replica_does_not_train_in_time(rig: _Rig) -> None:
    rig.slow.add("a")
    rig.request("a")
    rig.run(2)
    fail(rig, "d", FailureKind.DEATH, "rank 1: killed by SIGKILL")
    rig.run(590)
    assert rig.resize() == ("r1", ResizeState.ACCEPTED)
    rig.run(15)
    state, reason = rig.ended["r1"]
    assert state is ResizeState.FAILED and "not all replicas have committed a step" in reason


def test_an_outcome_is_kept_until_its_machine_has_it(rig: _Rig) -> None:
    rig.request("b")
    rig.run(4)
    # The machine with the request does not report while its replica fails and waits.
    rig.silent = {"b"}
    fail(rig, "a", FailureKind.DEATH, "rank 0: killed by SIGKILL")
    rig.train("c", "d")
    rig.run(3)
    rig.silent.clear()
    rig.machines["b"] = replace(rig.machines["b"], phase=NodeState.STANDBY)
    rig.run(5)
    rig.train(*"abcd")
    rig.run(3)
    assert rig.ended["r1"][0] is ResizeState.FAILED and rig.meshes() == {"1"}


@pytest.mark.parametrize("seed", range(40))
def test_faults_at_any_time_leave_all_replicas_on_one_mesh(rig: _Rig, seed: int) -> None:
    random = Random(seed)
    for number in range(12):
        match random.randrange(6):
            case 0:
                training = [n for n in "abcd" if rig.machines[n].phase is NodeState.JOINED]
                if training:
                    name = random.choice(training)
                    fail(rig, name, random.choice(_FAILURES), "rank 0: failed", status=1)
            case 1:
                rig.restart_server(outage_s=random.choice([0.0, 1.0]))
            case 2:
                rig.silent = {random.choice("abcd")}
                rig.run(random.choice([1.0, 3.0]))
                rig.silent.clear()
            case 3:
                rig.stays = {random.choice("abcd")}
            case 4:
                rig.slow = {random.choice("abcd")}
            case 5:
                name, mesh = random.choice("abcd"), random.choice(["1", "2", _MESH])
                if not rig.machines[name].request:
                    changes = {"request": f"r{number}", "request_mesh": mesh}
                    rig.machines[name] = replace(rig.machines[name], **changes)
        rig.run(random.choice([0.5, 1.0, 4.0]))
        if random.random() < 0.5:
            rig.train(*random.sample("abcd", random.randrange(5)))
        if random.random() < 0.5:
            rig.slow.clear()
            rig.stays.clear()
    rig.slow.clear()
    rig.stays.clear()
    for _ in range(12):
        rig.run(LEARN_S)
        rig.train(*(n for n in "abcde" if rig.machines[n].phase is NodeState.JOINED))
    assert [rig.answers[name].state for name in "abcde"] == [RunState.RUNNING] * 5
    assert len(rig.meshes()) == 1 and rig.resize()[0] == ""
    # The agent of a machine that is a spare one now ends its request.
    members = [name for name, answer in rig.answers.items() if answer.node_rank >= 0]
    assert not any(rig.machines[name].request for name in members)
