"""Diagnosis of the failure that ended a generation, from the exit status, the log and the flight
records of its ranks. No I/O."""

import re
from collections.abc import Mapping, Sequence

from torchtitan_lite.core.diagnosis import Cause, Diagnosis, cause_in
from torchtitan_lite.fault_tolerance.supervision.failures.flight_records import (
    FlightRecord,
    find_mismatch,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import Failure

LOG_LINES = 40
"""Lines at the end of a log in which the error of a rank is looked for."""
_FAILED_COLLECTIVE = re.compile(
    r"gloo|nccl|DistBackendError|Connection (closed|reset)|Broken pipe|Timed out waiting",
    re.IGNORECASE,
)
"""Errors that another rank or a link caused."""
_LAST_LINE = re.compile(r"(\[rank\d+\]: )?[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")


def diagnose_failure(
    failure: Failure, replica: int, lines: Sequence[str], records: Mapping[int, FlightRecord]
) -> Diagnosis | None:
    """Diagnose a failure of `replica`. `lines` are the last of the log of the process that failed
    first, `records` the flight records of its ranks. Returns None if the
    process has reported the cause itself, or if its error is the effect of an unknown fault."""
    if failure.is_hang and failure.cause is None:
        return None
    if failure.cause is not None:
        text = failure.description
        return Diagnosis(cause=failure.cause, text=text, rank=failure.rank, replica=replica)
    mismatch = find_mismatch(records)
    if failure.has_error and mismatch is not None:
        rank, text = mismatch.ranks[0], mismatch.description
        return Diagnosis(cause=mismatch.cause, text=text, rank=rank, replica=replica)
    if failure.names_itself:
        return None
    error = next((line for line in reversed(lines) if _is_error(line)), "")
    cause, text = Cause.PROCESS_DIED, failure.description
    if failure.has_error:
        causes = ((line_cause, line) for line in reversed(lines) if (line_cause := cause_in(line)))
        known = next(causes, None)
        if known is not None:
            cause, error = known
        elif any(map(_FAILED_COLLECTIVE.search, [error, *lines[-1:]])):
            return None
        text = f"{text}: {error.strip()}" if error else text
    return Diagnosis(cause=cause, text=text, rank=failure.rank, replica=replica)


def _is_error(line: str) -> bool:
    """Return whether a line may be the last of a traceback, or an error that was logged."""
    return _LAST_LINE.match(line) is not None or "ERROR" in line
