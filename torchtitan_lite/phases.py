"""What a rank is doing: the loop says it once, and whoever needs to know listens.

Layer: imports nothing of the project.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class Phase(Enum):
    """Part of a run. The values are shown to people."""

    START = "start"
    """Everything before the first step."""
    QUORUM = "quorum"
    """Who takes part in the step is being found."""
    HEALING = "healing"
    """The state of another replica is being received."""
    DATA = "data"
    """Microbatches are waited for."""
    COMPUTE = "compute"
    """Forward and backward, with the communication that they hide, and the optimizer."""
    COMMUNICATION = "communication"
    """Other replicas and ranks are waited for, to sum with them."""
    CHECKPOINT = "checkpoint"
    """Held up by a save."""
    BETWEEN = "between"
    """Metrics, validation, garbage: what happens between two steps."""
    END = "end"
    """Everything after the last step and its save."""


class PhaseListener(Protocol):
    """Is told of each change."""

    def entered(self, phase: Phase, step: int) -> None:
        """`phase` begins here and now, and ends the one before. `step` is the last that was
        committed."""
        ...


class Phases:
    """Says to all listeners in which phase this rank is."""

    def __init__(self, listeners: Sequence[PhaseListener] = ()) -> None:
        self._listeners = tuple(listeners)

    def enter(self, phase: Phase, step: int) -> None:
        """`phase` begins, after the committed step `step`."""
        for listener in self._listeners:
            listener.entered(phase, step)
