"""Reading from a socket with a deadline for everything together: a peer that sends one byte per
second extends it by nothing."""

import io
import math
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class DeadlineReader(io.RawIOBase):
    """Raw stream of what a socket receives until a deadline, after which a read raises
    TimeoutError. Sets the timeout of the socket."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        super().__init__()
        self._connection = connection
        # Keeps the socket open as long as this stream, as for any file of a socket.
        self._raw = connection.makefile("rb", buffering=0)
        self.allow(timeout_s)

    def allow(self, timeout_s: float, *, idle_s: float = math.inf) -> None:
        """Move the deadline to `timeout_s` from now. A read also ends after `idle_s` without a
        byte."""
        self._deadline_s, self._idle_s = time.monotonic() + timeout_s, idle_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int | None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("not received completely in time")
        self._connection.settimeout(min(left_s, self._idle_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
