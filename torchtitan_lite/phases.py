"""Phases of a training step on one rank, reported by the training loop to listeners.

Layer: imports nothing of the project.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class Phase(Enum):
    """Part of a run. The values are displayed."""

    START = "start"
    """Everything before the first step."""
    QUORUM = "quorum"
    """Forming the quorum of the step."""
    HEALING = "healing"
    """Receiving the state of another replica."""
    DATA = "data"
    """Waiting for microbatches."""
    COMPUTE = "compute"
    """Forward, backward and optimizer, including overlapped communication."""
    COMMUNICATION = "communication"
    """Waiting for other replicas and ranks to reduce values."""
    CHECKPOINT = "checkpoint"
    """Blocked by a save."""
    BETWEEN = "between"
    """Between two steps: metrics, validation, garbage collection."""
    END = "end"
    """Everything after the last step and its save."""


class PhaseListener(Protocol):
    """Listener of phase changes."""

    def entered(self, phase: Phase, step: int) -> None:
        """Handle the start of `phase`, which ends the previous one. `step` is the last committed
        step."""
        ...


class Phases:
    """Broadcaster of the phase of this rank to its listeners."""

    def __init__(self, listeners: Sequence[PhaseListener] = ()) -> None:
        self._listeners = tuple(listeners)

    def enter(self, phase: Phase, step: int) -> None:
        """Report that `phase` starts, after the committed step `step`."""
        for listener in self._listeners:
            listener.entered(phase, step)
