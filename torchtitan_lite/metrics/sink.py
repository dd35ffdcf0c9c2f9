"""What takes records, and when. Layer: above record only.

A sink reads and never changes the run.
"""

from dataclasses import dataclass
from typing import Protocol

from torchtitan_lite.metrics.record import Event, StepRecord


class Sink(Protocol):
    """A file, a screen or a service that records go to."""

    def step(self, record: StepRecord) -> None:
        """Take one step."""
        ...

    def event(self, event: Event) -> None:
        """Take something that happened beside the steps."""
        ...

    def close(self) -> None:
        """Write what is pending and let go. Nothing may be given after it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """Which steps are shown: every `log_freq`, and the first and last of this process."""

    log_freq: int
    first_step: int
    last_step: int

    def is_due(self, step: int) -> bool:
        return step % self.log_freq == 0 or step in (self.first_step, self.last_step)
