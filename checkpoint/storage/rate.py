"""Bytes in a second, held down so that training keeps the storage. Layer: imports nothing of the
project.
"""

import time
from collections.abc import Callable

_SLICE_S = 0.05
_BURST_S = 0.25


class TokenBucket:
    """Allows `bytes_per_s` on average, with bursts of a quarter of a second; None: no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._balance = 0.0
        self._last = time.monotonic()

    def spend(self, num_bytes: int, tick: Callable[[], None]) -> None:
        """Account for bytes just written, and sleep until the average allows more. `tick` is
        called between short sleeps; it may lift the limit or raise to end them."""
        self._refill()
        self._balance -= num_bytes
        while self.bytes_per_s is not None and self._balance < 0:
            tick()
            if self.bytes_per_s is None:
                break
            time.sleep(min(_SLICE_S, -self._balance / self.bytes_per_s))
            self._refill()

    def _refill(self) -> None:
        now = time.monotonic()
        if self.bytes_per_s is None:
            self._balance = 0.0
        else:
            most = self.bytes_per_s * _BURST_S
            earned = (now - self._last) * self.bytes_per_s
            self._balance = min(most, self._balance + earned)
        self._last = now
