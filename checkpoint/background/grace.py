"""How long a writer may go on after its trainer has gone. Layer: above storage.

All ends `preemption_grace_s` after the trainer's end was seen: nothing begins later, and what has
begun is cut off then.
"""

import time
from dataclasses import dataclass

from torchtitan_lite.checkpoint.storage.part_file import Abandoned

_SLACK_S = 1.0
"""For the end of a process."""


def longest_s(grace_s: float) -> float:
    """How long who comes after may have to wait for a writer."""
    return grace_s + _SLACK_S


class OutOfTime(Abandoned):
    """A write was cut off."""


@dataclass(frozen=True)
class Grace:
    """Of one writer, whose trainer is gone."""

    since: float
    """When the trainer's end was seen, as time.monotonic() counts."""
    grace_s: float

    @property
    def may_begin(self) -> bool:
        """Whether there is time to begin anything."""
        return time.monotonic() < self.since + self.grace_s

    def tick(self) -> None:
        """Between the chunks of a write. Raises OutOfTime when it has to end."""
        self._require(self.grace_s)

    def tick_of_older(self) -> None:
        """The same for a save under way, in whose place a newer step could be written: it leaves
        half of the grace to that."""
        self._require(self.grace_s / 2)

    def _require(self, limit_s: float) -> None:
        if time.monotonic() >= self.since + limit_s:
            raise OutOfTime(f"not written within {limit_s:g} s after the trainer's end")
