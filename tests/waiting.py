"""Waiting for what must come."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], timeout_s: float) -> float:
    """Come back when it holds; how long that took (seconds)."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s
        time.sleep(0.005)
    return time.monotonic() - started
