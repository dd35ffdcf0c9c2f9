"""Stop requests, by signal or otherwise.

SIGTERM and SIGINT only set a flag. The trainer reads it once per step, where all ranks exchange
values, so that all stop after the same step. A Ctrl-C some seconds after the first one interrupts
at once.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torchtitan_lite.core.log import logger

_INTERRUPT_AFTER_S = 3.0
"""torchrun forwards a Ctrl-C to processes that have received it already: the second one arrives at
once."""


class TrainingAborted(BaseException):
    """The agent has aborted the training of this process. Not an Exception, so that no handler of
    errors mistakes it for one."""


class TrainingLeft(TrainingAborted):
    """All ranks have left the training after the same step, to continue on another mesh with the
    snapshots in shared memory."""


class StopRequest:
    """Flag of whether this process was asked to stop."""

    def __init__(self, also: Callable[[], bool] = lambda: False) -> None:
        """`also` tells whether something other than a signal requests to stop."""
        self.was_signaled = False
        self._also = also
        self._first_at = 0.0

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.was_signaled or self._also()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.was_signaled:
            self.was_signaled = True
            self._first_at = time.monotonic()
            name = signal.Signals(number).name
            # On every rank: a signal to a single one stops all.
            logger.warning("%s received: finishing the step, then saving and exiting.", name)
        elif time.monotonic() - self._first_at > _INTERRUPT_AFTER_S and number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def stop_on_signals(request: StopRequest) -> Iterator[None]:
    """Let SIGTERM and SIGINT set `request` until the end of the block. Outside of it they end the
    process as usual, because there is nothing to save. Main thread only."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, request._on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
