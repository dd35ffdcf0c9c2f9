"""When an attempt is made again, and when it is given up."""

from pathlib import Path

import pytest

from torchtitan_lite.errors import DIVERGED, MACHINE_FAULT
from torchtitan_lite.launcher.failure import Failure, failure_of
from torchtitan_lite.launcher.policy import GiveUp, Restart, RestartPolicy
from torchtitan_lite.launcher.processes import ExitStatus

KILLED = Failure("rank 1: killed by SIGKILL", "", Path("rank_1.log"))


def wrong(what: str) -> Failure:
    return Failure("rank 0: exit status 1", f"exit status 1: {what}", Path("rank_0.log"))


def delay_s(decision: Restart | GiveUp) -> float:
    assert isinstance(decision, Restart)
    return decision.delay_s


def test_delays_double_up_to_half_a_minute_and_end() -> None:
    policy = RestartPolicy(7, first_delay_s=1)
    delays = []
    for second in range(7):
        policy.started()
        delays.append(delay_s(policy.failed(KILLED, second)))
    assert delays == [1, 2, 4, 8, 16, 30, 30]
    decision = policy.failed(KILLED, 100)
    assert isinstance(decision, GiveUp) and decision.first is KILLED
    assert decision.reason == "it failed 8 times in a row"


def test_twenty_seconds_of_work_forgives() -> None:
    policy = RestartPolicy(2, first_delay_s=1)
    for _ in range(2):
        policy.started()
        policy.failed(KILLED, 0)
    policy.started()
    policy.worked(100)
    policy.worked(110)
    assert delay_s(policy.failed(KILLED, 120)) == 1
    policy.started()
    policy.worked(200)
    assert delay_s(policy.failed(KILLED, 219)) == 2


def test_starting_for_a_minute_forgives_nothing() -> None:
    policy = RestartPolicy(1)
    policy.failed(KILLED, 0)
    policy.started()
    assert isinstance(policy.failed(KILLED, 1000), GiveUp)


def test_equal_failures_before_any_work_end_it_early() -> None:
    policy = RestartPolicy(10)
    policy.failed(KILLED, 0)
    first = wrong("unknown key")
    policy.failed(first, 1)
    decision = policy.failed(wrong("unknown key"), 2)
    assert isinstance(decision, GiveUp) and decision.first is first
    assert "before it did anything" in decision.reason


@pytest.mark.parametrize("between", [KILLED, wrong("another")])
def test_other_failures_between_do_not(between: Failure) -> None:
    policy = RestartPolicy(10)
    for failure in (wrong("a"), between, wrong("a"), KILLED, KILLED):
        policy.started()
        assert isinstance(policy.failed(failure, 0), Restart)


@pytest.mark.parametrize(("status", "spares"), [(DIVERGED, False), (MACHINE_FAULT, True)])
def test_what_would_come_out_the_same_is_not_tried_again(status: int, spares: bool) -> None:
    policy = RestartPolicy(10)
    policy.started()
    policy.worked(0)
    decision = policy.failed(failure_of("rank 0", ExitStatus(status), Path("log")), 100)
    assert isinstance(decision, GiveUp) and decision.spares_others is spares


def test_equal_failures_after_work_do_not() -> None:
    policy = RestartPolicy(10)
    for second in range(4):
        policy.started()
        policy.worked(second)
        assert isinstance(policy.failed(wrong("a"), second), Restart)
