"""Where the logs of a test session are kept, and which of them tell of a failure first."""

import shutil
from pathlib import Path

LOGS = Path(__file__).parent.parent / "test-logs"


class RankFailed(AssertionError):
    """A process that a test started has failed; `log` holds what it printed."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


def note_failure(log: Path) -> None:
    """Add a failing process's log to the list that CI prints from, keeping a copy if it lies
    elsewhere."""
    LOGS.mkdir(exist_ok=True)
    if LOGS not in log.parents:
        kept = LOGS / f"{log.parent.name}-{log.name}"
        shutil.copy(log, kept)
        log = kept
    with (LOGS / "failures").open("a") as failures:
        failures.write(f"{log}\n")
