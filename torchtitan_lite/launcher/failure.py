"""How an attempt ended that should have gone on. Layer: above log_lines and processes."""

from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.launcher.log_lines import last_lines, without_numbers
from torchtitan_lite.launcher.processes import ExitStatus


@dataclass(frozen=True)
class Failure:
    """How an attempt ended."""

    what: str
    """For people: which process ended, and how."""
    cause: str
    """Equal for failures that look alike; empty for one that tells nothing of the attempt itself,
    such as a kill from outside."""
    log: Path
    """Where the process that failed first has told of it."""
    rank: int | None = None
    """Which rank that was; None for another process."""
    status: int = 0
    """With which that process ended; 0: it did not end by itself."""


def failure_of(who: str, status: ExitStatus, log: Path, rank: int | None = None) -> Failure:
    """What there is to tell of a process that ended, and told `log` why."""
    # The same error tells of other times and ports the next time.
    last = without_numbers("".join(last_lines(log, 1)))
    what = f"{who}: {status}"
    if status.is_signal:
        return Failure(what, "", log, rank)
    return Failure(what, f"{status}: {last}", log, rank, status.code)
