"""Phases of a training step on one rank, reported by the training loop to listeners."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol, runtime_checkable


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


@runtime_checkable
class DeviceTimeListener(Protocol):
    """Listener that accounts for the time of a device."""

    def device_worked(self, phase: Phase, ended_ago_s: float) -> None:
        """Count the current phase until `ended_ago_s` seconds ago as `phase`."""
        ...


class Phases:
    """The current phase of this rank, reported to listeners."""

    def __init__(self, listeners: Sequence[PhaseListener] = ()) -> None:
        """Begin with START."""
        self._listeners = tuple(listeners)
        self._step: Callable[[], int] = lambda: 0
        self._change(Phase.START)

    def follow(self, step: Callable[[], int]) -> None:
        """Report the last committed step by `step` from now on."""
        self._step = step

    def enter(self, phase: Phase) -> "_Restore":
        """Start `phase` at once. As a context manager, return to the previous phase at the end of
        the block, unless it raises: the phase of a failure stays visible."""
        previous = self._phase
        self._change(phase)
        return _Restore(self, previous)

    def device_worked(self, phase: Phase, ended_ago_s: float) -> None:
        """Report that in the current phase the host waited for the device, which worked on `phase`
        until `ended_ago_s` seconds ago."""
        for listener in self._listeners:
            if isinstance(listener, DeviceTimeListener):
                listener.device_worked(phase, ended_ago_s)

    def _change(self, phase: Phase) -> None:
        self._phase = phase
        for listener in self._listeners:
            listener.entered(phase, self._step())


class _Restore:
    """Returns to a phase at the end of a block that succeeds."""

    def __init__(self, phases: Phases, phase: Phase) -> None:
        self._phases, self._phase = phases, phase

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._phases.enter(self._phase)


TIME_NAMES = {
    "between": "between steps",
    "checkpoint": "checkpoint stall",
    "data": "waiting for data",
    "end": "shutdown",
    "idle": "idle between generations",
    "lost": "lost work",
    "quorum": "agreeing on replicas",
    "start": "startup",
}
"""Kinds of time in words, where the kind is not a word for users itself."""
