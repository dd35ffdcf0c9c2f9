"""Being asked to leave. Layer: above log.

SIGTERM and SIGINT only set a flag; the trainer reads it once a step, at a point where all ranks
share what they know, so that all leave after the same step. A Ctrl-C some seconds after the first
is from a person who does not want to wait, and interrupts at once.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torchtitan_lite.log import logger

_IMPATIENCE_S = 3.0
"""torchrun passes a Ctrl-C on to processes that have it already: that one comes at once."""


class StopRequest:
    """Whether this process was asked to leave."""

    def __init__(self) -> None:
        self.requested = False
        self._first_at = 0.0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            self._first_at = time.monotonic()
            name = signal.Signals(number).name
            logger.warning("%s received: finishing the step, saving, leaving.", name)
        elif time.monotonic() - self._first_at > _IMPATIENCE_S and number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def stop_on_signals(request: StopRequest) -> Iterator[None]:
    """Let SIGTERM and SIGINT set `request` until the end of the block; before it they end the
    process as usual, since there is nothing to save yet. Main thread only."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, request._on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
