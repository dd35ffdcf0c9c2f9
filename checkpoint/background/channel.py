"""The writer's end of its two pipes: orders come in, what became of them goes out, a line each.

Invariant: a trainer that is gone ends the orders and never the writer. Layer: imports nothing of
the project.
"""

import json
import os
import select
import signal
import time
from typing import Any

_READ_BYTES = 1 << 16


class Channel:
    """Lines of JSON, read without waiting for more than is there."""

    def __init__(self, incoming: int = 0, outgoing: int = 1) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._partial = b""
        self._orders: list[dict[str, Any]] = []
        self._signals: int | None = None
        self.ended_at: float | None = None
        """When it was seen that the trainer closed its end, or died (time.monotonic())."""
        self.was_asked_to_leave = False
        """Whether the trainer has got a signal that asks it to leave."""

    @property
    def ended(self) -> bool:
        """Whether the trainer closed its end, or died."""
        return self.ended_at is not None

    def listen_to_signals(self, descriptor: int) -> None:
        """Read the trainer's signals, which the kernel's handler writes there a byte each, also
        while the trainer hangs."""
        self._signals = descriptor

    def next_line(self) -> dict[str, Any] | None:
        """Wait for the next order and take it; None when there will be none."""
        while not self._orders and not self.ended:
            self.look(None)
        return self._orders.pop(0) if self._orders else None

    def look(self, timeout_s: float | None = 0.0) -> list[dict[str, Any]]:
        """Read what has come, waiting at most `timeout_s` for it; all orders not yet taken."""
        if self.ended:
            return self._orders
        # `select` knows no descriptors above 1023, and that of the signals is the trainer's.
        poll = select.poll()
        for source in (self._incoming, self._signals):
            if source is not None:
                poll.register(source, select.POLLIN)
        wait_ms = None if timeout_s is None else timeout_s * 1000
        ready = {descriptor for descriptor, _ in poll.poll(wait_ms)}
        if self._signals in ready:
            assert self._signals is not None
            numbers = os.read(self._signals, _READ_BYTES)
            if signal.SIGTERM in numbers or signal.SIGINT in numbers:
                self.was_asked_to_leave = True
            if not numbers:
                self._signals = None
        if self._incoming in ready:
            content = os.read(self._incoming, _READ_BYTES)
            if not content:
                # A line without its end was cut off by the trainer's death.
                self.ended_at = time.monotonic()
                return self._orders
            *lines, self._partial = (self._partial + content).split(b"\n")
            self._orders += [json.loads(line) for line in lines if line.strip()]
        return self._orders

    def say(self, **response: Any) -> None:
        """Tell the trainer, if it still listens."""
        try:
            os.write(self._outgoing, json.dumps(response).encode() + b"\n")
        except OSError:
            # The trainer is dead; what is left to do for it is done without it.
            return
