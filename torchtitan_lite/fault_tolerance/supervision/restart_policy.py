"""Policy for restarting a failed process or giving it up. It has no clock and no I/O except for
reading the log of a failed process."""

import signal
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.core.diagnosis import Cause
from torchtitan_lite.core.errors import DIVERGED, GIVEN_UP, MACHINE_FAULT, TRANSIENT
from torchtitan_lite.core.rank.processes import ExitStatus
from torchtitan_lite.fault_tolerance.supervision.logs import last_lines, mask_numbers

HEALTHY_S = 20.0
"""Duration of progress that resets the count of consecutive failures."""
_MAX_IDENTICAL = 2
"""Consecutive identical failures without progress after which a wrong setting is the most likely
cause."""
_MAX_TRANSIENT_DELAY_S = 30.0
_FINAL = {
    DIVERGED: "the training has diverged",
    MACHINE_FAULT: "its machine is at fault",
}
"""Exit statuses after which another generation would fail in the same way."""
_REPORTED = (DIVERGED, MACHINE_FAULT)


def with_final_reason(description: str, status: int) -> str:
    """Return how a process failed, and why it is not started again if its exit status says so."""
    return f"{description}: {_FINAL[status]}" if status in _FINAL else description


@dataclass(frozen=True)
class Failure:
    """Failure of a generation."""

    description: str
    """The process that ended, and how, for display."""
    signature: str
    """Equal for failures that look alike; empty if the failure does not indicate that the
    generation itself was at fault, such as a kill from outside or a service that cannot be
    reached."""
    log: Path
    """Log of the process that failed first."""
    rank: int | None = None
    """Rank that failed first; None for another process."""
    status: int = 0
    """Exit status of that process; 0 if it did not exit by itself."""
    is_aborted: bool = False
    """Whether the process ended itself by SIGABRT, as after an error in native code."""
    cause: Cause | None = None
    """Cause of a hang, if known."""
    is_hang: bool = False

    @property
    def has_error(self) -> bool:
        """Whether the log may end with an error."""
        return self.status > 0 or self.is_aborted

    @property
    def names_itself(self) -> bool:
        """Whether the exit status says that the process has reported its cause."""
        return self.status in _REPORTED


def failure_of(name: str, status: ExitStatus, log: Path, rank: int | None = None) -> Failure:
    """Describe the failure of a process that logged into `log`."""
    # Times and ports differ between two occurrences of the same error.
    last = mask_numbers("".join(last_lines(log, 1)))
    description = f"{name}: {status}"
    if status.is_signal:
        is_aborted = status.code == -signal.SIGABRT
        return Failure(description, "", log, rank, is_aborted=is_aborted)
    if status.code == TRANSIENT:
        return Failure(f"{description}, whose cause may pass", "", log, rank, status.code)
    return Failure(description, f"{status}: {last}", log, rank, status.code)


@dataclass(frozen=True)
class RestartAfter:
    """Decision to restart."""

    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """Decision not to restart."""

    reason: str
    first_failure: Failure
    """First of the consecutive failures."""

    @property
    def exit_status(self) -> int:
        """Exit status of an agent that follows the decision."""
        status = self.first_failure.status
        return status if status in _FINAL or status == TRANSIENT else GIVEN_UP

    @property
    def others_continue(self) -> bool:
        """Whether the other replicas are unaffected and continue."""
        return self.first_failure.status == MACHINE_FAULT


class RestartPolicy:
    """Restart policy of one replica or of the lighthouse."""

    def __init__(
        self, max_restarts: int, *, first_delay_s: float = 0.2, max_delay_s: float = 30.0
    ) -> None:
        """`max_restarts` limits consecutive restarts: the first after `first_delay_s`, each further
        one after twice the delay, up to `max_delay_s`."""
        self._max_restarts, self._first_delay_s = max_restarts, first_delay_s
        self._max_delay_s = max_delay_s
        self._failures: list[Failure] = []
        self._progress_since_s: float | None = None
        self._num_identical = 0

    def started(self) -> None:
        """Record the start of a generation."""
        self._progress_since_s = None

    def made_progress(self, now_s: float) -> None:
        """Record that the generation makes progress."""
        if self._progress_since_s is None:
            self._progress_since_s = now_s

    def failed(self, failure: Failure, now_s: float) -> RestartAfter | GiveUp:
        """Record the failure of the generation, and decide what to do."""
        if failure.status in _FINAL:
            return GiveUp(_FINAL[failure.status], failure)
        since_s, before = self._progress_since_s, self._failures[-1] if self._failures else None
        if since_s is not None and now_s - since_s >= HEALTHY_S:
            self._failures = []
        self._failures.append(failure)
        if since_s is not None or not failure.signature:
            self._num_identical = 0
        elif self._num_identical and before is not None and before.signature == failure.signature:
            self._num_identical += 1
        else:
            self._num_identical = 1
        if self._num_identical >= _MAX_IDENTICAL:
            reason = f"it failed {_MAX_IDENTICAL} times in the same way before it made progress"
            return GiveUp(reason, self._failures[-_MAX_IDENTICAL])
        if len(self._failures) > self._max_restarts:
            reason = f"it failed {len(self._failures)} times in a row"
            return GiveUp(reason, self._failures[0])
        doublings = len(self._failures) - 1
        delay_s = min(self._first_delay_s * 2**doublings, self._max_delay_s)
        if failure.status == TRANSIENT:
            # A service that is down for minutes must not use up all generations.
            delay_s = max(delay_s, min(2.0**doublings, _MAX_TRANSIENT_DELAY_S))
        return RestartAfter(delay_s)
