"""Failures are attributed to the rank and the cause that the evidence shows."""

import signal
from pathlib import Path

import pytest

from torchtitan_lite.core.diagnosis import Cause
from torchtitan_lite.core.errors import DIVERGED, MACHINE_FAULT
from torchtitan_lite.core.rank.processes import ExitStatus
from torchtitan_lite.fault_tolerance.supervision.failures.failure_cause import diagnose_failure
from torchtitan_lite.fault_tolerance.supervision.failures.flight_records import (
    CollectiveCall,
    FlightRecord,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import Failure, failure_of


def _failure(status: int, **given: object) -> Failure:
    return Failure(f"rank 1: exit status {status}", "", Path("log"), 1, status, **given)  # pyright: ignore[reportArgumentType]


def _records(**sizes: str) -> dict[int, FlightRecord]:
    calls = {rank: CollectiveCall("0", 7, "gloo:all_reduce", "Float [4]") for rank in range(4)}
    calls[2] = CollectiveCall("0", 7, *sizes.popitem()) if sizes else calls[2]
    return {rank: FlightRecord((), {}, [call]) for rank, call in calls.items()}


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("RuntimeError: [enforce] DefaultCPUAllocator: can't allocate memory", Cause.OUT_OF_MEMORY),
        ("OSError: [Errno 24] Too many open files", Cause.OUT_OF_DESCRIPTORS),
        ("12:00:00 ERROR OSError: [Errno 28] No space left on device", Cause.STORAGE_FULL),
        ("ValueError: wrong", Cause.PROCESS_DIED),
        ("nothing in particular", Cause.PROCESS_DIED),
    ],
)
def test_the_error_of_a_rank(line: str, cause: Cause) -> None:
    found = diagnose_failure(_failure(1), 3, ["Traceback", line, "terminated"], {})
    assert found is not None and (found.cause, found.rank, found.replica) == (cause, 1, 3)


def test_a_kill_has_no_log() -> None:
    found = diagnose_failure(_failure(0), 0, ["OSError: Too many open files"], {})
    assert found is not None and found.cause is Cause.PROCESS_DIED


@pytest.mark.parametrize("status", [DIVERGED, MACHINE_FAULT])
def test_what_a_rank_has_said_itself_is_not_repeated(status: int) -> None:
    assert diagnose_failure(_failure(status), 0, ["UserError: x"], {}) is None


def test_a_failed_collective_is_the_fault_of_the_rank_that_differs() -> None:
    lines = ["[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"]
    assert diagnose_failure(_failure(1), 0, lines, _records()) is None
    for sizes, cause in (
        ({"gloo:all_reduce": "Float [5]"}, Cause.SHAPE_MISMATCH),
        ({"gloo:broadcast": "Float [4]"}, Cause.COLLECTIVE_MISMATCH),
    ):
        found = diagnose_failure(_failure(1), 0, lines, _records(**sizes))
        assert found is not None and (found.cause, found.rank) == (cause, 2)
        assert "number 7" in found.text and "the others gloo:all_reduce" in found.text


def test_gloo_aborts_a_rank_that_receives_too_much() -> None:
    aborted = failure_of("rank 1", ExitStatus(-signal.SIGABRT), Path("log"), 1)
    lines = ["terminate called", "  what():  [enforce fail at gloo/transport/tcp/pair.cc:446] op"]
    records = _records(**{"gloo:all_reduce": "Float [5]"})
    # It could not write a record of its own.
    del records[1]
    found = diagnose_failure(aborted, 0, lines, records)
    assert found is not None and (found.cause, found.rank) == (Cause.SHAPE_MISMATCH, 2)
    assert diagnose_failure(aborted, 0, lines, {}) is None
    assert diagnose_failure(aborted, 0, ["double free"], {}) is not None


def test_the_log_of_a_rank_names_its_cause() -> None:
    lost = failure_of("rank 1", ExitStatus(1), Path("log"), 1)
    found = diagnose_failure(lost, 0, ["OSError: [Errno 28] No space left on device"], {})
    assert found is not None and found.cause is Cause.STORAGE_FULL


@pytest.mark.parametrize("status", [DIVERGED, MACHINE_FAULT])
def test_what_has_reported_its_cause_needs_no_records(status: int) -> None:
    assert failure_of("rank 1", ExitStatus(status), Path("log"), 1).names_itself


def test_a_hang_without_evidence_names_nobody() -> None:
    assert diagnose_failure(_failure(0, is_hang=True), 0, [], {}) is None
    found = diagnose_failure(_failure(0, is_hang=True, cause=Cause.STOPPED), 0, [], {})
    assert found is not None and found.cause is Cause.STOPPED
