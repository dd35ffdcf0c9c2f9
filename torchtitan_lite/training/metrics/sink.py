"""The interface of metrics sinks.

A sink reads and never changes the run.
"""

from dataclasses import dataclass
from typing import Protocol

from torchtitan_lite.training.metrics.record import Event, StepRecord


class Sink(Protocol):
    """A file, a screen or a service that receives records. An OSError loses the record and is
    reported; any other exception ends the run."""

    def step(self, record: StepRecord) -> None:
        """Record one step."""
        ...

    def event(self, event: Event) -> None:
        """Record an event."""
        ...

    def close(self) -> None:
        """Write pending output and release resources. Nothing may be recorded afterwards."""
        ...


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """Steps that are shown: every `log_freq`, and the first and last of this process."""

    log_freq: int
    first_step: int
    last_step: int

    def is_due(self, step: int) -> bool:
        return step % self.log_freq == 0 or step in (self.first_step, self.last_step)
