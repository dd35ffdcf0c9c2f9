"""When the launcher restarts a replica, and when it stops trying."""

from pathlib import Path

import pytest

from torchtitan_lite.core.errors import DIVERGED, MACHINE_FAULT, TRANSIENT
from torchtitan_lite.core.rank.processes import ExitStatus
from torchtitan_lite.fault_tolerance.supervision.restart_policy import (
    Failure,
    GiveUp,
    RestartAfter,
    RestartPolicy,
    failure_of,
)

KILLED = Failure("rank 1: killed by SIGKILL", "", Path("rank_1.log"))


def wrong(what: str) -> Failure:
    return Failure("rank 0: exit status 1", f"exit status 1: {what}", Path("rank_0.log"))


def delay_s(decision: RestartAfter | GiveUp) -> float:
    assert isinstance(decision, RestartAfter)
    return decision.delay_s


def test_identical_failures_are_counted_anew_after_progress() -> None:
    policy = RestartPolicy(100)
    for makes_progress in (False, True, False):
        policy.started()
        if makes_progress:
            policy.made_progress(1.0)
        assert isinstance(policy.failed(wrong("x"), 2.0), RestartAfter)
    policy.started()
    decision = policy.failed(wrong("x"), 2.0)
    assert isinstance(decision, GiveUp) and "2 times in the same way" in decision.reason


def test_delays_double_up_to_half_a_minute_until_the_limit() -> None:
    policy = RestartPolicy(7, first_delay_s=1)
    delays = []
    for second in range(7):
        policy.started()
        delays.append(delay_s(policy.failed(KILLED, second)))
    assert delays == [1, 2, 4, 8, 16, 30, 30]
    decision = policy.failed(KILLED, 100)
    assert isinstance(decision, GiveUp) and decision.first_failure is KILLED
    assert decision.reason == "it failed 8 times in a row"


def test_twenty_seconds_of_training_reset_the_count() -> None:
    policy = RestartPolicy(2, first_delay_s=1)
    for _ in range(2):
        policy.started()
        policy.failed(KILLED, 0)
    policy.started()
    policy.made_progress(100)
    policy.made_progress(110)
    assert delay_s(policy.failed(KILLED, 120)) == 1
    policy.started()
    policy.made_progress(200)
    assert delay_s(policy.failed(KILLED, 219)) == 2


def test_a_minute_of_startup_resets_nothing() -> None:
    policy = RestartPolicy(1)
    policy.failed(KILLED, 0)
    policy.started()
    assert isinstance(policy.failed(KILLED, 1000), GiveUp)


def test_equal_failures_before_any_step_end_the_job_early() -> None:
    policy = RestartPolicy(10)
    policy.failed(KILLED, 0)
    first = wrong("unknown key")
    policy.failed(first, 1)
    decision = policy.failed(wrong("unknown key"), 2)
    assert isinstance(decision, GiveUp) and decision.first_failure is first
    assert "before it made progress" in decision.reason


@pytest.mark.parametrize("between", [KILLED, wrong("another")])
def test_different_failures_do_not(between: Failure) -> None:
    policy = RestartPolicy(10)
    for failure in (wrong("a"), between, wrong("a"), KILLED, KILLED):
        policy.started()
        assert isinstance(policy.failed(failure, 0), RestartAfter)


def test_failures_that_may_pass_do_not_count_as_equal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("OSError: [Errno 24] Too many open files")
    policy = RestartPolicy(3)
    failure = failure_of("rank 0", ExitStatus(TRANSIENT), log)
    for _ in range(3):
        assert isinstance(policy.failed(failure, 0), RestartAfter)
    decision = policy.failed(failure, 0)
    # Whoever has started this one may start it again.
    assert isinstance(decision, GiveUp) and decision.exit_status == TRANSIENT
    assert decision.reason == "it failed 4 times in a row"


def test_a_service_may_be_down_for_minutes(tmp_path: Path) -> None:
    policy = RestartPolicy(10, first_delay_s=0.1, max_delay_s=0.1)
    failure = failure_of("rank 0", ExitStatus(TRANSIENT), tmp_path / "log")
    delays = [delay_s(policy.failed(failure, 0)) for _ in range(10)]
    assert delays[:6] == [1, 2, 4, 8, 16, 30] and sum(delays) > 180


@pytest.mark.parametrize(("status", "spares"), [(DIVERGED, False), (MACHINE_FAULT, True)])
def test_permanent_failures_are_not_retried(status: int, spares: bool) -> None:
    policy = RestartPolicy(10)
    policy.started()
    policy.made_progress(0)
    decision = policy.failed(failure_of("rank 0", ExitStatus(status), Path("log")), 100)
    assert isinstance(decision, GiveUp) and decision.others_continue is spares
    assert decision.exit_status == status


def test_equal_failures_after_training_do_not() -> None:
    policy = RestartPolicy(10)
    for second in range(4):
        policy.started()
        policy.made_progress(second)
        assert isinstance(policy.failed(wrong("a"), second), RestartAfter)
