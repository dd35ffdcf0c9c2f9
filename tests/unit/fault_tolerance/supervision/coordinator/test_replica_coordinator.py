"""Decisions of the coordinator, on a clock of the test."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.fault_tolerance.supervision.coordinator.rig import Rig, fail, stand_by
from torchtitan_lite.core.errors import GIVEN_UP, MACHINE_FAULT
from torchtitan_lite.fault_tolerance.supervision.coordinator import replica_coordinator
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    Answer,
    FailureKind,
    NodeState,
    Report,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.replica_coordinator import (
    Busy,
    Rejected,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    ALL_LOST_S,
    BLOCKED_S,
    BROKEN_S,
    CALL_S,
    LEARN_S,
    LEASE_S,
    LOST_S,
    OUTAGE_S,
    REPORT_S,
    STANDBY_S,
    STOP_S,
    SUSPECT_S,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import HEALTHY_S


def test_a_lease_ends_before_a_machine_counts_as_lost() -> None:
    assert LEASE_S + STOP_S < LOST_S < ALL_LOST_S and STANDBY_S < STOP_S
    # One report of a lease may fail, and an agent that is blocked reports no more.
    assert REPORT_S + CALL_S < LEASE_S and BLOCKED_S < LEASE_S and OUTAGE_S < LOST_S


def test_the_first_machines_train_and_the_next_is_a_spare() -> None:
    rig = Rig("a", "b")
    waiting = Answer(
        state=RunState.REBUILDING,
        generation=0,
        num_joined=1,
        joined="a",
        mesh="1",
        withholds_outputs=True,
    )
    assert rig.send("a") == waiting
    # Machines of an earlier run may report until then.
    rig.now_s += LEARN_S - 0.5
    assert rig.send("b").state is RunState.REBUILDING
    rig.now_s += 0.5
    assert rig.send("a").state is RunState.RUNNING
    rig.add("c")
    rig.run(2)
    assert rig.places() == {"a": 0, "b": 1} and rig.generation() == 1
    assert rig.answers["b"].reason == ""
    answer = rig.answers["b"]
    assert (answer.store_address, answer.store_port) == ("10.0.0.1", 29001)
    assert rig.answers["c"].state is RunState.RUNNING


def test_too_few_machines_are_named() -> None:
    rig = Rig("a")
    rig.run(20)
    answer = rig.answers["a"]
    assert answer.state is RunState.FORMING and (answer.num_joined, answer.joined) == (1, "a")


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_spare_takes_the_place_of_a_lost_machine_and_writes_only_after_its_lease(
    is_broken: bool,
) -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.silent.add("b")
    silent_since_s, limit_s = rig.now_s - REPORT_S, SUSPECT_S
    if is_broken:
        rig.disconnect("b")
        silent_since_s, limit_s = rig.now_s, BROKEN_S
    rig.run(60, until=lambda: rig.generation() == 2)
    assert limit_s <= rig.now_s - silent_since_s <= limit_s + 4 * REPORT_S
    while rig.now_s - silent_since_s < LOST_S - 2 * REPORT_S:
        assert rig.answers["a"].withholds_outputs and rig.answers["c"].withholds_outputs
        rig.run(REPORT_S)
    rig.run(2)
    assert rig.places() == {"a": 0, "b": 1, "c": 1} and rig.generation() == 2
    assert "lost b" in rig.answers["a"].reason
    assert not rig.answers["a"].withholds_outputs
    # It returns, and neither is a member nor ends the generation.
    rig.silent.clear()
    rig.machines["b"] = replace(rig.machines["b"], phase=NodeState.STANDBY)
    rig.run(5)
    assert rig.places() == {"a": 0, "c": 1} and rig.generation() == 2


def test_a_machine_without_a_spare_is_lost_only_after_its_lease() -> None:
    rig = Rig("a", "b")
    rig.start()
    rig.silent.add("b")
    rig.disconnect("b")
    silent_since_s = rig.now_s - REPORT_S
    rig.run(60, until=lambda: rig.answers["a"].state is RunState.FORMING)
    assert LEASE_S + STOP_S < rig.now_s - silent_since_s < LOST_S + 3 * REPORT_S


@pytest.mark.parametrize("pause_s", [1.0, SUSPECT_S - 2 * REPORT_S])
def test_a_machine_that_was_paused_keeps_its_place(pause_s: float) -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.silent.add("b")
    rig.run(pause_s)
    rig.silent.clear()
    rig.run(2 * LOST_S)
    assert rig.generation() == 1 and not rig.answers["a"].withholds_outputs


def test_a_machine_whose_connection_broke_keeps_its_place_if_it_reports() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.disconnect("b")
    rig.send("b")
    rig.run(2 * LOST_S)
    assert rig.generation() == 1


def test_connections_of_several_machines_that_break_at_once_are_no_reason() -> None:
    rig = Rig("a", "b", "c", num_machines=2)
    rig.start()
    for name in "abc":
        rig.disconnect(name)
    rig.silent.add("b")
    rig.run(SUSPECT_S - 2 * REPORT_S)
    assert rig.generation() == 1
    rig.run(3 * REPORT_S + 1)
    assert rig.generation() == 2


def test_a_pause_of_the_coordinator_is_no_silence_of_its_machines() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.now_s += SUSPECT_S + 1
    rig.coordinator.check_breaks(rig.now_s)
    rig.send("a")
    rig.coordinator.check_breaks(rig.now_s)
    assert rig.send("c").generation == 1
    rig.run(5)
    assert rig.generation() == 1


def test_a_silent_spare_replaces_no_machine() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.silent |= {"b", "c"}
    silent_since_s = rig.now_s - REPORT_S
    rig.run(60, until=lambda: rig.answers["a"].state is RunState.FORMING)
    assert rig.now_s - silent_since_s > LEASE_S + STOP_S


def test_the_next_run_waits_for_the_leases_of_machines_whose_places_were_given_away() -> None:
    """All other machines leave before a machine that was cut off has stopped."""
    rig = Rig("a", "c", num_machines=1)
    rig.machines = {n: replace(r, num_machines=1) for n, r in rig.machines.items()}
    rig.start()
    rig.silent.add("a")
    lost_at_s = rig.now_s - REPORT_S
    rig.disconnect("a")
    rig.run(2)
    rig.leave("c")
    rig.add("d", num_machines=1)
    rig.run(60, until=lambda: "d" in rig.places())
    assert rig.now_s < lost_at_s + LOST_S and rig.answers["d"].withholds_outputs
    rig.run(LOST_S)
    assert not rig.answers["d"].withholds_outputs


def test_a_probably_lost_machine_that_reports_again_returns_as_a_spare() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.silent.add("b")
    rig.run(60, until=lambda: rig.generation() == 2)
    rig.silent.clear()
    # Its ranks train until it has the answer.
    assert rig.machines["b"].phase is NodeState.JOINED
    assert rig.send("b").node_rank == -1
    stand_by(rig, "b")
    rig.run(2 * LOST_S)
    assert rig.places() == {"a": 0, "c": 1} and rig.generation() == 2
    assert not rig.answers["a"].withholds_outputs


def test_outputs_wait_for_a_machine_whose_lease_a_new_coordinator_has_renewed() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.silent.add("b")
    rig.run(60, until=lambda: rig.generation() == 2)
    rig.restart_server()
    rig.run(LEARN_S + 1)
    # It was cut off from the others' coordinator.
    rig.silent.clear()
    before = rig.machines["b"]
    rig.send("b")
    rig.machines["b"] = before
    rig.silent.add("b")
    assert rig.send("a").withholds_outputs
    rig.run(LOST_S + 1)
    assert not rig.send("a").withholds_outputs and rig.generation() == 2


def test_a_dead_rank_keeps_all_machines_in_their_places() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    fail(rig, "a", FailureKind.DEATH, "rank 0: killed by SIGKILL")
    # Its consequence on another machine.
    fail(rig, "b", FailureKind.EXCEPTION, "rank 1: Connection closed by peer", age_s=1)
    rig.run(5)
    assert rig.places() == {"a": 0, "b": 1} and rig.generation() == 2
    assert rig.answers["a"].is_blamed and not rig.answers["b"].is_blamed
    assert rig.answers["b"].reason == "a: rank 0: killed by SIGKILL"


def test_one_member_that_is_silent_is_replaced_although_no_other_answers() -> None:
    rig = Rig("a", "b", num_machines=1)
    rig.start()
    rig.silent = {"a"}
    rig.run(LEARN_S + 2)
    assert rig.places() == {"a": 0, "b": 0} and rig.generation() == 2


@pytest.mark.parametrize("gap_s", [OUTAGE_S, OUTAGE_S + 0.5], ids=["no outage", "outage"])
def test_silent_machines_get_the_time_of_a_lease_after_an_outage(gap_s: float) -> None:
    rig = Rig("a", "b", num_machines=3)
    rig.run(LEARN_S + 2)
    rig.send("a")
    rig.send("b")
    ended_s = silent_since_s = rig.now_s
    rig.now_s += gap_s
    rig.send("a")
    if gap_s > OUTAGE_S:
        ended_s = rig.now_s
    lost_s = ended_s + LOST_S
    for rig.now_s in sorted((silent_since_s + LOST_S - 0.5, lost_s - 3, lost_s, lost_s + OUTAGE_S)):
        assert rig.send("a").num_joined == (2 if rig.now_s <= lost_s else 1)


def test_an_exception_that_a_lost_machine_explains_blames_nobody() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.silent.add("b")
    fail(rig, "a", FailureKind.EXCEPTION, "rank 0: Connection closed by peer", "closed")
    # A decision before b is probably lost would not know the cause.
    rig.run(SUSPECT_S - REPORT_S)
    assert rig.generation() == 1
    rig.run(LEARN_S)
    assert rig.generation() == 2 and rig.places()["c"] == 1
    assert not rig.answers["a"].is_blamed and "lost b" in rig.answers["a"].reason


def test_an_exception_that_the_end_of_a_lease_explains_blames_nobody() -> None:
    rig = Rig("a", "b")
    rig.start()
    rig.restart_server(outage_s=LOST_S)
    rig.machines["b"] = replace(rig.machines["b"], phase=NodeState.STANDBY, has_lost_lease=True)
    closed = "rank 0: Connection closed by peer"
    fail(rig, "a", FailureKind.EXCEPTION, closed)
    rig.run(5)
    assert rig.generation() == 2 and not rig.answers["a"].is_blamed
    assert rig.answers["a"].reason == "b was cut off"


def test_the_first_of_several_exceptions_is_the_cause() -> None:
    rig = Rig("a", "b")
    rig.start()
    fail(rig, "a", FailureKind.EXCEPTION, "rank 0: Connection closed", age_s=0.6)
    rig.send(
        "b",
        phase=NodeState.STANDBY,
        failure=FailureKind.EXCEPTION,
        failure_text="rank 1: InjectedError",
        failure_age_s=0.9,
    )
    rig.run(5)
    assert rig.answers["b"].is_blamed and not rig.answers["a"].is_blamed


@pytest.mark.parametrize("silence_s", [OUTAGE_S + 1, LOST_S + 1, 3 * LOST_S])
@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_an_outage_of_the_server_expires_nobody(silence_s: float, first: str) -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.now_s += silence_s
    stand_by(rig, "a", "b")
    # One machine reports for some time before the others do.
    rig.silent = set("abc") - {first}
    rig.run(4)
    rig.silent = set()
    rig.run(5)
    assert rig.places() == {"a": 0, "b": 1} and rig.state() is RunState.RUNNING
    assert "lost" not in rig.answers["a"].reason


def test_machines_that_are_all_lost_are_replaced_in_the_end() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.add("d")
    rig.run(1)
    rig.silent = {"a", "b"}
    rig.run(ALL_LOST_S - 5)
    assert rig.generation() == 1
    rig.run(10)
    assert rig.generation() == 2 and rig.places()["c"] != rig.places()["d"]


@pytest.mark.parametrize("is_standby", [False, True])
def test_a_restarted_server_keeps_members_and_spares(is_standby: bool) -> None:
    rig = Rig("a", "b", "c", "d")
    rig.start()
    rig.restart_server(outage_s=LOST_S if is_standby else 1)
    if is_standby:
        stand_by(rig, "a", "b")
    # The spares come first, alone, and are enough for a generation.
    rig.silent = {"a", "b"}
    rig.run(LEARN_S - 2)
    rig.silent = set()
    rig.run(5)
    assert rig.places() == {"a": 0, "b": 1}
    assert rig.generation() == (2 if is_standby else 1)


@pytest.mark.parametrize("late_s", [0.0, LOST_S + 2])
def test_members_that_reach_a_restarted_server_late_keep_their_places(late_s: float) -> None:
    rig = Rig("a", "b", "c", "d")
    rig.start()
    # Nobody reaches it at first; then the spares do, and are enough for a generation.
    rig.restart_server()
    rig.now_s += LOST_S + 1
    stand_by(rig, "a", "b")
    rig.silent = {"a", "b"}
    rig.send("c")
    rig.send("d")
    rig.run(late_s)
    rig.silent = set()
    rig.run(5)
    assert rig.places() == {"a": 0, "b": 1} and rig.generation() == 2


def test_spares_replace_members_that_never_reach_a_restarted_server() -> None:
    rig = Rig("a", "b", "c", "d")
    rig.start()
    rig.restart_server()
    rig.silent = {"a", "b"}
    rig.run(ALL_LOST_S - 1)
    assert rig.state() is RunState.REBUILDING
    rig.run(3)
    assert rig.generation() == 2 and rig.answers["c"].node_rank != rig.answers["d"].node_rank


def test_new_machines_wait_after_a_restart_of_the_server_until_leases_have_ended() -> None:
    rig = Rig("a", "b")
    rig.start()
    rig.silent = {"a", "b"}
    rig.restart_server()
    rig.add("c")
    rig.add("d")
    rig.run(LEASE_S + STOP_S)
    assert rig.answers["c"].state is RunState.REBUILDING
    rig.run(5)
    assert rig.answers["c"].state is RunState.RUNNING


def test_after_a_restart_of_the_server_the_place_of_a_lost_machine_is_filled() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.restart_server()
    rig.silent = {"b"}
    rig.run(LEARN_S + 5)
    assert rig.generation() == 2 and rig.places() == {"a": 0, "b": 1, "c": 1}
    # It does not know why the generation before has ended.
    assert rig.answers["a"].reason == ""


def test_a_member_of_an_older_generation_does_not_displace_a_newer_one() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.silent = {"b"}
    rig.run(LEARN_S + 5)
    assert rig.generation() == 2
    rig.restart_server()
    rig.silent = set()
    stand_by(rig, "b")
    rig.run(LEARN_S + 5)
    assert rig.places() == {"a": 0, "c": 1} and rig.generation() == 2


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"run_id": "other"}, "--rdzv-id is other here, but run on a"),
        ({"num_machines": 3}, "--nnodes is 3 here, but 2 on a"),
        ({"num_ranks": 8}, "--nproc is 8 here, but 1 on a"),
        ({"fingerprint": "2-def"}, "fingerprint is 2-def here, but 2-abc on a"),
    ],
)
def test_a_machine_of_another_run_is_rejected_with_the_difference(
    changes: dict[str, Any], difference: str
) -> None:
    rig = Rig("a", "b")
    rig.start()
    rig.add("x", **changes)
    with pytest.raises(Rejected, match=difference):
        rig.send("x")
    # Once the machines of the other run are gone, it is the first of its own.
    rig.now_s += ALL_LOST_S + 1
    assert rig.send("x").num_joined == 1


def test_a_machine_of_another_run_that_comes_first_after_a_restart_rejects_no_member() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.restart_server()
    rig.add("x", run_id="other")
    rig.send("x")
    # A spare machine, which cannot prove that it is of the run, waits for a member.
    with pytest.raises(Rejected):
        rig.send("c")
    rig.send("a")
    with pytest.raises(Rejected, match="--rdzv-id is other here, but run on a"):
        rig.send("x")
    rig.silent = {"x"}
    rig.run(LEARN_S + 2)
    assert rig.places() == {"a": 0, "b": 1} and rig.generation() == 1
    assert rig.answers["c"].num_joined == 3


def test_the_next_run_waits_until_the_machines_of_the_last_one_have_left() -> None:
    rig = Rig("a", "b")
    rig.start()
    for name in "ab":
        rig.machines[name] = replace(rig.machines[name], phase=NodeState.ENDED)
    rig.run(1)
    assert rig.state() is RunState.ENDED and rig.answers["a"].status == 0
    rig.add("c", run_id="next")
    with pytest.raises(Busy):
        rig.send("c")
    for name in "ab":
        rig.leave(name)
    assert rig.send("c").state is RunState.REBUILDING


def test_a_machine_that_joins_when_all_ranks_have_finished_is_of_the_next_run() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    for name in "ab":
        rig.machines[name] = replace(rig.machines[name], phase=NodeState.ENDED)
        rig.leave(name)
    # The spare machine has not left yet.
    rig.add("d")
    with pytest.raises(Busy, match="all ranks have finished"):
        rig.send("d")


def test_failures_in_a_row_delay_a_generation_by_at_most_a_second_and_end_the_run() -> None:
    rig = Rig("a", "b")
    rig.start()
    for delay_s in (0.1, 0.2, 0.4, 0.8, *(1.0,) * 6):
        fail(rig, "b", FailureKind.DEATH, "rank 1: killed by SIGKILL")
        # The ranks of the other machine return to standby.
        rig.send("a")
        for name in "bab":
            assert rig.send(name).state is RunState.FORMING
        ended_s = rig.now_s
        rig.now_s = ended_s + delay_s - 0.01
        assert rig.send("a").state is RunState.FORMING
        rig.now_s = ended_s + delay_s
        assert rig.send("a").state is rig.send("b").state is RunState.RUNNING
    fail(rig, "b", FailureKind.DEATH, "rank 1: killed by SIGKILL")
    rig.run(2)
    assert rig.state() is RunState.ENDED and rig.answers["a"].status == GIVEN_UP
    reason = "b: rank 1: killed by SIGKILL: it failed 11 times in a row"
    assert rig.answers["a"].reason == reason


def test_a_machine_that_fails_twice_in_a_row_is_replaced() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    for generation in (2, 3):
        fail(rig, "b", FailureKind.DEATH, "rank 1: killed by SIGKILL")
        rig.run(8)
        assert rig.generation() == generation
    assert rig.places() == {"a": 0, "c": 1}


def test_failures_before_a_healthy_generation_do_not_count() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    for generation, is_healthy in ((2, True), (3, False)):
        fail(rig, "b", FailureKind.DEATH, "rank 1: killed by SIGKILL")
        rig.run(8)
        assert rig.generation() == generation and rig.places() == {"a": 0, "b": 1}
        if is_healthy:
            rig.train("a", "b")
            rig.run(HEALTHY_S + 2)
    # The generation before was not healthy.
    fail(rig, "b", FailureKind.DEATH, "rank 1: killed by SIGKILL")
    rig.run(8)
    assert rig.places() == {"a": 0, "c": 1}


@pytest.mark.parametrize("trained_s", [HEALTHY_S - 1, HEALTHY_S])
def test_failures_count_again_after_a_healthy_generation(trained_s: float) -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    fail(rig, "b", FailureKind.DEATH, "rank 1: killed by SIGKILL")
    rig.run(3)
    rig.train("a", "b")
    rig.send("a")
    rig.send("b")
    healthy_s = rig.now_s + trained_s
    rig.run(trained_s - 1)
    rig.now_s = healthy_s
    fail(rig, "b", FailureKind.DEATH, "rank 1: killed by SIGKILL")
    for name in "aba":
        rig.send(name)
    rig.run(3)
    assert rig.generation() == 3
    assert rig.places() == {"a": 0, "b" if trained_s == HEALTHY_S else "c": 1}


def _cut(rig: Rig, *names: str) -> Mapping[str, int]:
    """Let members lose their leases. Return the node ranks in the next generation."""
    generation = rig.generation()
    for name in names:
        rig.send(name, phase=NodeState.STANDBY, has_lost_lease=True)
    rig.run(4)
    assert rig.generation() == generation + 1
    return rig.places()


def test_a_spare_machine_replaces_one_that_has_failed_more_often() -> None:
    """And not one that has failed as often."""
    rig = Rig("a", "b", "c", "d", num_machines=3)
    rig.start()
    assert _cut(rig, "b") == {"a": 0, "b": 1, "c": 2}
    # b fails for the second time, a for the first.
    assert _cut(rig, "a", "b") == {"a": 0, "d": 1, "c": 2}
    _cut(rig, "c")
    # The spare machine b has failed twice, too.
    assert _cut(rig, "c") == {"a": 0, "d": 1, "c": 2}
    assert _cut(rig, "a", "c") == {"a": 0, "d": 1, "b": 2}
    # Of the two spare machines, c has failed three times, as both members have then.
    rig.add("e", num_machines=3)
    rig.run(1)
    assert _cut(rig, "a", "b") == {"e": 0, "d": 1, "b": 2}


def test_the_worst_spare_machine_does_not_keep_others_from_a_place() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    _cut(rig, "b")
    assert _cut(rig, "b") == {"a": 0, "c": 1}
    rig.add("d")
    _cut(rig, "c")
    assert _cut(rig, "c") == {"a": 0, "d": 1}


def test_of_spare_machines_those_without_a_failure_are_first() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    _cut(rig, "b")
    rig.silent = {"b"}
    rig.run(LEARN_S + 4)
    # It returns, before a new machine joins.
    rig.silent = set()
    rig.run(1)
    rig.add("d")
    rig.run(1)
    assert rig.places() == {"a": 0, "c": 1}
    rig.leave("c")
    rig.run(2)
    assert rig.answers["d"].node_rank == 1


def test_a_machine_that_is_lost_before_the_first_generation_is_forgotten() -> None:
    rig = Rig("a", "b", num_machines=3)
    rig.run(LEARN_S + OUTAGE_S)
    assert rig.answers["a"].num_joined == 2
    rig.silent.add("b")
    rig.run(LEARN_S + 2)
    assert rig.answers["a"].num_joined == 1


def test_a_machine_that_loses_its_lease_twice_in_a_row_is_replaced() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    for generation in (2, 3):
        rig.send("b", phase=NodeState.STANDBY, has_lost_lease=True)
        rig.run(8)
        assert rig.generation() == generation and rig.answers["a"].reason == "b was cut off"
    assert rig.places() == {"a": 0, "c": 1}


def test_a_machine_that_loses_its_lease_again_and_again_without_a_spare_ends_the_run() -> None:
    rig = Rig("a", "b")
    rig.start()
    for _ in range(20):
        rig.send("b", phase=NodeState.STANDBY, has_lost_lease=True)
        rig.run(8, until=lambda: rig.state() is RunState.RUNNING)
        if rig.state() is RunState.ENDED:
            break
    assert rig.state() is RunState.ENDED and "in a row" in rig.answers["a"].reason


def test_leases_that_all_machines_lose_only_delay_the_next_generation() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    for generation in range(2, 20):
        for name in "ab":
            rig.machines[name] = replace(
                rig.machines[name], phase=NodeState.STANDBY, has_lost_lease=True
            )
        rig.run(0.5)
        assert rig.generation() == generation - 1
        rig.run(3)
        assert rig.places() == {"a": 0, "b": 1} and rig.generation() == generation


def test_a_machine_at_fault_is_replaced_at_once_and_does_not_return() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    fail(rig, "b", FailureKind.USER_ERROR, "rank 1: exit status 4", status=MACHINE_FAULT)
    rig.silent = {"b"}
    rig.send("b", phase=NodeState.STANDBY)
    rig.run(5)
    assert rig.places()["c"] == 1 and rig.generation() == 2
    with pytest.raises(Rejected, match="at fault"):
        rig.send("b")


def test_a_fault_without_a_spare_machine_ends_the_run() -> None:
    rig = Rig("a", "b")
    rig.start()
    fail(rig, "b", FailureKind.USER_ERROR, "rank 1: exit status 4", status=MACHINE_FAULT)
    rig.run(5)
    assert rig.state() is RunState.ENDED and rig.answers["a"].status == MACHINE_FAULT


def test_the_same_exception_on_two_machines_ends_the_run() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    for name in ("b", "b", "c"):
        fail(rig, name, FailureKind.EXCEPTION, "rank 1: InjectedError", "InjectedError")
        rig.run(8)
    assert rig.state() is RunState.ENDED and "in the same way" in rig.answers["a"].reason


@pytest.mark.parametrize(("status", "expected"), [(0, 1), (7, 7)])
def test_a_machine_asked_to_stop_ends_the_run_for_all(status: int, expected: int) -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    text = "rank 1: killed by SIGTERM"
    fail(rig, "b", FailureKind.DEATH, text, status=status, is_stopping=True)
    rig.run(3)
    answer = rig.answers["c"]
    assert (answer.state, answer.status) == (RunState.ENDED, expected)
    assert answer.reason == f"b: {text}; b was asked to stop"


def test_a_member_that_leaves_is_replaced_without_a_wait() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.leave("b")
    rig.silent = {"b"}
    rig.run(2)
    assert rig.generation() == 2 and rig.answers["c"].node_rank == 1
    assert rig.answers["a"].reason == "lost b"


def test_the_reason_for_which_a_member_leaves_ends_the_run() -> None:
    rig = Rig("a", "b", "c", "d", "e")
    rig.start()

    def leave(name: str) -> RunState:
        rig.silent.add(name)
        rig.coordinator.leave(rig.machines[name], f"{name} was asked to stop", rig.now_s)
        return rig.send("e").state

    # Neither that of a spare machine nor that of a lost member does.
    assert leave("d") is RunState.RUNNING
    rig.silent.add("b")
    rig.run(LEARN_S + 3)
    assert rig.generation() == 2 and rig.answers["c"].node_rank == 1
    assert leave("b") is RunState.RUNNING
    # The first one does.
    assert leave("c") is leave("a") is RunState.ENDED
    assert (rig.answers["e"].status, rig.answers["e"].reason) == (1, "c: c was asked to stop")


@pytest.mark.parametrize("is_new", [False, True], ids=["running", "rebuilding"])
def test_the_last_machine_may_leave_and_a_late_report_does_not_bring_it_back(is_new: bool) -> None:
    rig = Rig("a", "b")
    if is_new:
        rig.run(1)
    else:
        rig.start()
    rig.leave("a")
    rig.now_s += LOST_S
    rig.leave("b")
    for name in "ab":
        with pytest.raises(Rejected, match=f"{name} has left"):
            rig.send(name)
    rig.add("c")
    assert rig.send("c").joined == "c"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_machine_that_has_finished_may_leave_while_others_still_save(is_restarted: bool) -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.machines["a"] = replace(rig.machines["a"], phase=NodeState.ENDED)
    if is_restarted:
        rig.restart_server()
        # It is not known yet.
        rig.leave("a")
    else:
        rig.run(1)
        rig.leave("a")
    rig.run(LEARN_S + 5)
    assert rig.state() is RunState.RUNNING and rig.generation() == 1
    rig.machines["b"] = replace(rig.machines["b"], phase=NodeState.ENDED)
    rig.run(1)
    assert rig.state() is RunState.ENDED and rig.answers["b"].status == 0


def test_the_place_of_a_machine_that_has_finished_is_filled_if_another_fails() -> None:
    rig = Rig("a", "b", "c")
    rig.start()
    rig.machines["a"] = replace(rig.machines["a"], phase=NodeState.ENDED)
    rig.run(1)
    rig.leave("a")
    fail(rig, "b", FailureKind.DEATH, "rank 1: killed by SIGKILL")
    rig.run(5)
    assert rig.generation() == 2 and (rig.answers["c"].node_rank, rig.places()["b"]) == (0, 1)


@pytest.mark.parametrize("num_later", [0, 1], ids=["repeated", "late"])
def test_only_newer_reports_count(num_later: int) -> None:
    rig = Rig("a", "b")
    rig.start()
    sequence = rig.machines["b"].sequence - num_later
    late = replace(rig.machines["b"], phase=NodeState.FAILED, sequence=sequence)
    rig.coordinator.report(late, rig.now_s)
    rig.run(2)
    assert rig.generation() == 1 and rig.state() is RunState.RUNNING


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "unknown"},
        {"generation": "1"},
        {"generation": True},
        {"generation": 1 << 60},
        {"name": "x" * 5000},
        {"failure_age_s": float("nan")},
        {"more": 1},
    ],
)
def test_a_malformed_report_is_rejected(change: dict[str, Any]) -> None:
    report = Rig("a").machines["a"]
    assert Report.parse(report.to_json()) == report
    with pytest.raises(ValueError):
        Report.parse({**report.to_json(), **change})


def _second_generation(**lost: Any) -> Rig:
    """Return a coordinator of two machines, of which "b" has started a second generation after a
    rank of "a" died, while the last report of "a", with the values `lost`, is of the first
    generation."""
    rig = Rig("a", "b")
    rig.start()
    fail(rig, "a", FailureKind.DEATH, "rank 0: killed by SIGKILL")
    rig.send("a", **lost)
    rig.silent.add("a")
    rig.run(5, until=lambda: rig.answers["b"].generation == 2)
    assert rig.answers["b"].generation == 2 and rig.machines["a"].generation == 1
    return rig


def test_the_store_of_a_generation_is_not_that_of_the_one_before() -> None:
    rig = _second_generation()
    assert (rig.answers["b"].store_address, rig.answers["b"].store_port) == ("", 0)
    rig.silent.clear()
    rig.run(3)
    assert rig.answers["b"].store_port == 29002


@pytest.mark.parametrize("lost", [{}, {"failure": FailureKind.NONE, "has_lost_lease": True}])
def test_what_ended_a_generation_does_not_explain_the_end_of_the_next(lost: dict[str, Any]) -> None:
    rig = _second_generation(**lost)
    fail(rig, "b", FailureKind.EXCEPTION, "rank 1: out of memory", "memory")
    rig.send("b")
    assert rig.answers["b"].reason == "b: rank 1: out of memory"


def test_a_machine_that_finished_an_earlier_generation_has_to_finish_the_present_one() -> None:
    rig = Rig("a", "b")
    rig.start()
    rig.send("b", phase=NodeState.ENDED)
    rig.silent.add("b")
    fail(rig, "a", FailureKind.DEATH, "rank 0: killed by SIGKILL")
    rig.run(5, until=lambda: rig.answers["a"].generation == 2)
    assert rig.send("a", phase=NodeState.ENDED).state is RunState.RUNNING
    rig.silent.clear()
    rig.run(2)
    assert rig.send("b", phase=NodeState.ENDED).state is RunState.ENDED


def test_the_first_of_two_failures_is_the_cause_however_often_they_are_reported() -> None:
    rig = Rig("a", "b", "c", num_machines=3)
    rig.start()
    fail(rig, "a", FailureKind.DEATH, "rank 0: killed by SIGKILL")
    rig.now_s += 1
    fail(rig, "b", FailureKind.DEATH, "rank 1: killed by SIGBUS")
    for name in ("c", "c", "b", "a"):
        rig.now_s += 1
        rig.send(name)
    assert rig.answers["a"].reason == "a: rank 0: killed by SIGKILL"


def test_the_number_of_machines_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_coordinator, "_MAX_MACHINES", 2)
    rig = Rig("a", "b", "c")
    rig.send("a")
    rig.send("b")
    with pytest.raises(Rejected, match="^2 machines have joined already"):
        rig.send("c")


def test_an_answer_has_at_most_1000_characters_of_a_text() -> None:
    names = "a" * 600, "b" * 600
    rig = Rig(*names)
    rig.start()
    rig.train(*names)
    rig.machines[names[0]] = replace(rig.machines[names[0]], request="r", request_mesh="2")
    rig.run(1)
    refused = rig.send(names[1], refused="r", refusal="x" * 1500)
    assert refused.joined == ", ".join(names)[:1000]
    assert rig.send(names[0]).request_reason == "x" * 1000
    fail(rig, names[1], FailureKind.DEATH, "y" * 1500)
    rig.run(1)
    assert rig.answers[names[0]].reason == f"{names[1]}: {'y' * 398}"


def test_machines_of_one_run_do_not_displace_each_other() -> None:
    rig = Rig("a", "b")
    rig.start()
    rig.restart_server()
    rig.send("a")
    with pytest.raises(Rejected, match="fingerprint is 2-def here, but 2-abc on a"):
        rig.send("b", fingerprint="2-def")
    assert rig.answers["a"].num_joined == 1


def test_the_time_to_learn_begins_with_the_first_member() -> None:
    """Not with a machine that knows of no generation."""
    rig = Rig("a", "b")
    rig.start()
    rig.restart_server()
    rig.add("c")
    rig.send("c")
    rig.now_s += LOST_S - 1
    rig.send("a")
    rig.now_s += 3
    assert rig.send("a").state is RunState.REBUILDING
    assert rig.send("b").state is RunState.RUNNING
    assert rig.generation() == 1
