"""Phases of a training step on one rank, reported by the training loop to listeners.

Layer: imports nothing of the project.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
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
    """The current phase of this rank, reported to listeners."""

    def __init__(
        self, listeners: Sequence[PhaseListener] = (), step: Callable[[], int] = lambda: 0
    ) -> None:
        """Begin with START. `step` returns the last committed step."""
        self._listeners, self.step = tuple(listeners), step
        self._change(Phase.START)

    def enter(self, phase: Phase) -> AbstractContextManager[object]:
        """Start `phase` at once. As a context manager, return to the previous phase at the end of
        the block."""
        stack = ExitStack()
        stack.callback(self._change, self._phase)
        self._change(phase)
        return stack

    def _change(self, phase: Phase) -> None:
        self._phase = phase
        for listener in self._listeners:
            listener.entered(phase, self.step())
