"""Which machine is for which replica, on a clock of the test."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.fault_tolerance.supervision.coordinator.rig import Rig, depart, fail
from torchtitan_lite.core.errors import MACHINE_FAULT
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    FailureKind,
    NodeState,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.replica_coordinator import (
    Busy,
    Rejected,
    ReplicaCoordinator,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    ALL_LOST_S,
    LEARN_S,
    LOST_S,
    SUSPECT_S,
)


def _rig(names: str, *, machines: int = 4, replicas: int = 2) -> Rig:
    rig = Rig()
    for name in names:
        rig.add(name, num_machines=machines, num_replicas=replicas)
    rig.run(LEARN_S + 3)
    return rig


def _members(rig: Rig, num_replicas: int = 2) -> list[list[str]]:
    """Return the members of each replica, by node rank."""
    places = sorted((a.replica, a.node_rank, name) for name, a in rig.answers.items())
    return [
        [name for replica, rank, name in places if replica == number and rank >= 0]
        for number in range(num_replicas)
    ]


def _generations(rig: Rig, names: Sequence[str]) -> list[int]:
    return [rig.answers[name].generation for name in names]


def _lose(rig: Rig, *names: str) -> float:
    """Let machines fall silent, and return the time until another has a place."""
    before, began_s = _members(rig), rig.now_s
    rig.silent |= {*names}
    for name in names:
        del rig.answers[name]
    rig.run(2 * ALL_LOST_S, until=lambda: _members(rig) != before and not _vacant(rig, before))
    return rig.now_s - began_s


def _vacant(rig: Rig, before: Sequence[Sequence[str]]) -> bool:
    return [*map(len, _members(rig))] != [*map(len, before)]


def test_replicas_become_complete_one_after_the_other_and_the_rest_are_spares() -> None:
    rig = _rig("abc")
    assert rig.answers["a"].state is RunState.RUNNING
    assert _members(rig) == [["a", "b"], []] and rig.answers["c"].state is RunState.FORMING
    rig.add("d", num_machines=4, num_replicas=2)
    rig.add("e", num_machines=4, num_replicas=2)
    rig.run(3)
    assert _members(rig) == [["a", "b"], ["c", "d"]]
    assert rig.answers["e"].state is RunState.RUNNING and rig.answers["e"].node_rank < 0
    rig.add("f", num_machines=4, num_replicas=2)
    rig.run(1)
    assert {rig.answers["e"].replica, rig.answers["f"].replica} == {0, 1}


@pytest.mark.parametrize(("lost", "left"), [("b", ["a"]), ("d", ["c"])])
def test_a_spare_machine_is_for_whichever_replica_needs_it(lost: str, left: list[str]) -> None:
    rig = _rig("abcde")
    rig.train(*"abcd")
    others = {"b": "cd", "d": "ab"}[lost]
    before = _generations(rig, others)
    waited_s = _lose(rig, lost)
    assert SUSPECT_S < waited_s < SUSPECT_S + 3
    assert sorted(map(sorted, _members(rig))) == sorted([sorted([*left, "e"]), [*others]])
    # The other replica trains on.
    assert _generations(rig, others) == before
    assert rig.answers[others[0]].reason == ""


def test_a_silent_spare_machine_of_another_replica_replaces_nobody() -> None:
    rig = _rig("abcde")
    rig.train(*"abcd")
    for lost in ("b", "d"):
        rig.silent = {lost, "e"}
        rig.run(SUSPECT_S + 2)
        assert set(_generations(rig, "abcd")) == {1}
        rig.silent = set()
        rig.run(2)


def test_a_replica_without_any_machine_is_formed_anew() -> None:
    """No machine of it reports; those of the other replica show that it is no outage."""
    rig = _rig("abc", machines=2)
    assert _members(rig) == [["a"], ["b"]]
    assert _lose(rig, "b") < LOST_S + 4
    assert _members(rig) == [["a"], ["c"]]
    assert rig.answers["c"].generation > 1 and "lost b" in rig.answers["c"].reason


def test_all_machines_silent_at_once_is_an_outage() -> None:
    rig = _rig("abcd", machines=2)
    assert _lose(rig, "a", "b") > ALL_LOST_S
    assert sorted(map(tuple, _members(rig))) == [("c",), ("d",)]


def test_a_machine_that_served_another_replica_has_a_later_generation() -> None:
    rig = _rig("abc", machines=2)
    for _ in range(2):
        fail(rig, "a", FailureKind.DEATH, "rank 0: killed")
        rig.run(5)
        rig.train("a")
    assert rig.answers["a"].generation >= 3 and rig.answers["b"].generation == 1
    # a is cut off, returns as a spare machine, and takes the place of b.
    _lose(rig, "a")
    rig.machines["a"] = replace(rig.machines["a"], phase=NodeState.STANDBY)
    rig.silent.clear()
    rig.run(2)
    assert rig.answers["a"].node_rank < 0
    _lose(rig, "b")
    assert [sorted(members) for members in _members(rig)] == [["c"], ["a"]]
    assert rig.machines["a"].generation == rig.answers["a"].generation >= 4
    assert rig.machines["a"].phase is NodeState.JOINED


def test_a_restarted_coordinator_learns_all_replicas() -> None:
    rig = _rig("abcde")
    fail(rig, "c", FailureKind.DEATH, "rank 0: killed")
    rig.run(5)
    members, generations = _members(rig), _generations(rig, "abcd")
    assert generations[2] == generations[0] + 1
    rig.restart_server(outage_s=2.0)
    # The spare machine reports first.
    rig.machines = dict(sorted(rig.machines.items(), reverse=True))
    rig.run(LEARN_S + 4)
    assert _members(rig) == members and _generations(rig, "abcd") == generations
    assert {rig.answers[name].state for name in "abcde"} == {RunState.RUNNING}


def test_machines_of_the_run_precede_others_at_a_restarted_coordinator_in_all_replicas() -> None:
    rig = _rig("abcd")
    members = _members(rig)
    rig.restart_server()
    rig.add("x", num_machines=4, num_replicas=2, run_id="next")
    assert rig.send("x").replica == 0
    # It is evicted by a member of the other replica, too.
    rig.send("d")
    with pytest.raises(Rejected, match="--rdzv-id is next"):
        rig.send("x")
    del rig.machines["x"], rig.answers["x"]
    rig.run(LEARN_S + 4)
    assert _members(rig) == members


def test_a_replica_that_is_given_up_ends_alone() -> None:
    rig = _rig("ab", machines=2)
    fail(rig, "b", FailureKind.USER_ERROR, "rank 0: no such file", status=2)
    rig.machines["b"] = replace(rig.machines["b"], phase=NodeState.STANDBY)
    rig.run(2)
    assert (rig.answers["b"].state, rig.answers["b"].status) == (RunState.ENDED, 2)
    assert rig.answers["a"].state is RunState.RUNNING


def test_spares_of_a_replica_that_has_finished_are_for_the_others() -> None:
    rig = _rig("abc", machines=2)
    assert rig.answers["c"].replica == 0
    rig.machines["a"] = replace(rig.machines["a"], phase=NodeState.ENDED, has_progress=True)
    rig.run(1)
    assert rig.answers["a"].state is RunState.ENDED
    assert (rig.answers["c"].replica, rig.answers["c"].state) == (1, RunState.RUNNING)
    rig.leave("a")
    assert _lose(rig, "b") < LOST_S + 4
    assert rig.answers["c"].node_rank == 0
    rig.machines["c"] = replace(rig.machines["c"], phase=NodeState.ENDED, has_progress=True)
    rig.run(1)
    assert rig.answers["c"].state is RunState.ENDED and rig.answers["c"].status == 0
    rig.add("d", num_machines=2, num_replicas=2)
    with pytest.raises(Busy):
        rig.send("d")


def test_a_machine_at_fault_trains_for_no_replica() -> None:
    rig = _rig("abc", machines=2)
    fail(rig, "b", FailureKind.USER_ERROR, "rank 0: a device is at fault", status=MACHINE_FAULT)
    rig.machines["b"] = replace(rig.machines["b"], phase=NodeState.STANDBY)
    with pytest.raises(Rejected, match="at fault"):
        rig.run(2)
    rig.silent.add("b")
    rig.run(3)
    assert _members(rig)[1] == ["c"]


def test_a_machine_that_has_left_is_late() -> None:
    rig = _rig("abc", machines=2)
    rig.leave("c")
    with pytest.raises(Rejected, match="late"):
        rig.send("c")


def test_another_machine_takes_the_place_of_one_that_was_asked_to_stop() -> None:
    rig = _rig("abcde")
    rig.train(*"abcd")
    others = _generations(rig, "cd")
    depart(rig, "b", others="a")
    rig.run(3)
    assert sorted(map(sorted, _members(rig))) == [["a", "e"], ["c", "d"]]
    assert rig.answers["b"].node_rank < 0 and rig.answers["a"].reason == "a stop was requested on b"
    # The other replica trains on.
    assert _generations(rig, "cd") == others
    before = _generations(rig, "acd")
    rig.leave("b")
    rig.run(3)
    assert _generations(rig, "acd") == before and rig.machines["e"].phase is NodeState.JOINED


def test_a_replica_waits_for_a_machine_while_others_train() -> None:
    rig = _rig("abcd")
    rig.train(*"abcd")
    depart(rig, "b", others="a")
    rig.run(3)
    assert rig.answers["a"].state is RunState.FORMING and rig.answers["a"].num_joined == 2
    assert rig.answers["c"].state is RunState.RUNNING
    rig.leave("b")
    del rig.answers["b"]
    rig.add("e", num_machines=4, num_replicas=2)
    rig.run(3)
    assert sorted(map(sorted, _members(rig))) == [["a", "e"], ["c", "d"]]
    assert rig.machines["e"].phase is NodeState.JOINED


def test_a_machine_that_was_asked_to_stop_may_leave_before_the_others_have_saved() -> None:
    rig = _rig("abcde")
    depart(rig, "b", others="")
    rig.leave("b")
    rig.run(1)
    assert rig.answers["a"].state is RunState.RUNNING
    rig.machines["a"] = replace(rig.machines["a"], phase=NodeState.ENDED, was_stopped=True)
    del rig.answers["b"]
    rig.run(3)
    assert sorted(map(sorted, _members(rig))) == [["a", "e"], ["c", "d"]]
    assert rig.answers["a"].reason == "a stop was requested on b"
    # The stop is not that of the next generation.
    for name in "ae":
        rig.machines[name] = replace(rig.machines[name], phase=NodeState.ENDED)
    rig.run(1)
    assert rig.answers["a"].state is RunState.ENDED


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_last_machine_of_a_replica_may_leave_after_it_was_asked_to_stop(
    num_replicas: int,
) -> None:
    """It has no lease, and does not wait for an answer."""
    rig = _rig("ab"[:num_replicas], machines=num_replicas, replicas=num_replicas)
    name = next(iter(rig.places()))
    stopped = replace(rig.machines[name], phase=NodeState.ENDED, is_stopping=True, was_stopped=True)
    rig.machines[name] = stopped
    rig.leave(name)
    rig.run(2)
    if num_replicas == 2:
        other = next(answer for key, answer in rig.answers.items() if key != name)
        assert other.state is RunState.RUNNING
        rig.add("c", num_machines=2, num_replicas=2)
        rig.run(2)
        assert rig.machines["c"].phase is NodeState.JOINED


def test_all_machines_of_a_replica_may_be_asked_to_stop() -> None:
    rig = _rig("abcdef")
    depart(rig, "b", others="a")
    rig.run(1)
    # The next generation starts on "a" and a spare machine, when the signal reaches "a", too.
    rig.send("a", is_stopping=True)
    rig.machines["a"] = replace(rig.machines["a"], phase=NodeState.STANDBY)
    rig.run(3)
    assert sorted(map(sorted, _members(rig))) == [["c", "d"], ["e", "f"]]
    assert rig.answers["e"].reason == "a stop was requested on a"


def test_a_machine_that_finishes_while_it_is_asked_to_stop_ends_its_replica() -> None:
    rig = _rig("abcd")
    for name in "ab":
        rig.machines[name] = replace(
            rig.machines[name], phase=NodeState.ENDED, is_stopping=name == "b"
        )
    rig.run(1)
    assert (rig.answers["a"].state, rig.answers["a"].status) == (RunState.ENDED, 0)


def test_ranks_that_finish_after_a_restart_of_the_coordinator_end_their_replica() -> None:
    rig = _rig("abcd")
    rig.restart_server()
    rig.run(LEARN_S + 4)
    for name in "ab":
        rig.machines[name] = replace(rig.machines[name], phase=NodeState.ENDED)
    rig.run(1)
    assert (rig.answers["a"].state, rig.answers["a"].status) == (RunState.ENDED, 0)


def test_a_machine_leaves_its_own_replica_though_a_restarted_coordinator_does_not_know_it() -> None:
    rig = _rig("abcd")
    members = _members(rig)
    rig.restart_server()
    first = members[1][0]
    rig.machines[first] = replace(
        rig.machines[first], phase=NodeState.ENDED, is_stopping=True, was_stopped=True
    )
    before = _generations(rig, members[0])
    rig.leave(first)
    del rig.answers[first]
    rig.run(LEARN_S + 4)
    assert _generations(rig, members[0]) == before
    assert {rig.answers[name].state for name in members[0]} == {RunState.RUNNING}


def test_a_failure_while_a_machine_stops_does_not_end_its_replica() -> None:
    rig = _rig("abcde")
    fail(rig, "a", FailureKind.DEATH, "rank 0: killed", age_s=1.0)
    rig.send("b", is_stopping=True)
    rig.run(5)
    assert sorted(map(sorted, _members(rig))) == [["a", "e"], ["c", "d"]]
    assert rig.answers["b"].node_rank < 0


def test_a_replica_whose_ranks_were_asked_to_stop_trains_again_on_the_same_machines() -> None:
    """The signal came from a memory daemon, and not to the agent."""
    rig = _rig("abcd")
    for name in "ab":
        rig.machines[name] = replace(
            rig.machines[name], phase=NodeState.ENDED, was_stopped=True, has_progress=True
        )
    before = _members(rig)
    rig.run(3)
    assert _members(rig) == before and _generations(rig, "abcd") == [2, 2, 1, 1]
    assert rig.answers["a"].reason == "a stop was requested on a rank"


def test_a_replica_that_waits_for_a_machine_ends_when_another_has_finished_the_run() -> None:
    rig = _rig("abcd")
    rig.train(*"abcd")
    depart(rig, "b", others="a")
    rig.run(1)
    rig.leave("b")
    del rig.answers["b"]
    assert rig.answers["a"].state is RunState.FORMING
    for name in "cd":
        rig.machines[name] = replace(rig.machines[name], phase=NodeState.ENDED)
    rig.run(2)
    assert rig.answers["c"].state is RunState.ENDED
    assert (rig.answers["a"].state, rig.answers["a"].status) == (RunState.ENDED, 0)
    assert rig.answers["a"].reason == "another replica has finished the run"


def test_a_spare_machine_that_was_asked_to_stop_is_for_no_replica() -> None:
    rig = _rig("abcd", machines=2)
    rig.send("c", is_stopping=True)
    _lose(rig, "b")
    assert _members(rig) == [["a"], ["d"]]


def test_a_machine_that_cannot_save_before_it_stops_is_lost() -> None:
    """The replica was forming when the machine was asked to stop."""
    rig = _rig("abcde")
    fail(rig, "a", FailureKind.DEATH, "rank 0: killed")
    rig.silent.add("b")
    rig.coordinator.leave(replace(rig.machines["b"], is_stopping=True), "asked to stop", rig.now_s)
    del rig.answers["b"]
    rig.run(3)
    assert sorted(map(sorted, _members(rig))) == [["a", "e"], ["c", "d"]]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_machines": 3}, "--nnodes must be a multiple"),
        ({"num_machines": 4096, "num_replicas": 4096}, "at most 1024"),
        ({"num_machines": 8}, "--nnodes is 8"),
        ({"num_replicas": 4}, "--replicas is 4"),
        ({"fingerprint": "other"}, "fingerprint"),
        ({"dump_folder": "runs/b"}, "job.dump_folder is runs/b here"),
    ],
)
def test_machines_of_another_run_are_rejected(changes: dict[str, object], text: str) -> None:
    rig = _rig("ab")
    rig.add("x", **{"num_machines": 4, "num_replicas": 2, **changes})
    with pytest.raises(Rejected, match=text):
        rig.send("x")


def test_in_a_large_run_a_report_without_news_concerns_its_machine_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the work per second would grow with the square of the number of machines."""
    names = [f"m{number}" for number in range(80)]
    rig = Rig()
    for name in (*names, "spare"):
        rig.add(name, num_machines=80, num_replicas=40)
    rig.run(LEARN_S + 3)
    assert [len(members) for members in _members(rig, 40)] == [2] * 40
    advanced: list[int] = []
    advance = ReplicaCoordinator.advance

    def counted(replica: ReplicaCoordinator, now_s: float) -> None:
        advanced.append(replica._replica)
        advance(replica, now_s)

    monkeypatch.setattr(ReplicaCoordinator, "advance", counted)
    rig.now_s += 1
    for name in names:
        rig.send(name)
    assert sorted(advanced) == list(range(40))
    # News concern their replica at once, and the others soon.
    advanced.clear()
    rig.train("m0")
    rig.send("m0")
    assert advanced == [rig.answers["m0"].replica]
    rig.silent.add("m3")
    del rig.answers["m3"]
    rig.run(LEARN_S + 3)
    assert rig.answers["spare"].node_rank >= 0
