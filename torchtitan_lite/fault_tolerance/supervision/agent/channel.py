"""Messages between the agent and its processes: JSON lines over a socket."""

import json
import os
import socket
from array import array
from contextlib import suppress
from typing import Any

_READ_BYTES = 1 << 16
_ANCILLARY_BYTES = socket.CMSG_LEN(4 * array("i").itemsize)
"""Size of the file descriptors that arrive with messages read at once, at most four."""


class AgentChannel:
    """One end of a socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._partial = self._unsent = b""
        self._descriptors: list[int] = []
        self.has_ended = False
        """Whether the other end is closed."""

    def send(self, *descriptors: int, **message: Any) -> None:
        """Send a message, and file descriptors that the other end gets by `take_descriptor`;
        without effect once that end is closed."""
        content, num_bytes = self._unsent + _line(message), 0
        self._unsent = b""
        with suppress(OSError):
            if descriptors:
                num_bytes = socket.send_fds(self._socket, [content], descriptors)
            self._socket.sendall(content[num_bytes:])

    def take_descriptor(self) -> int:
        """Return the first of the file descriptors that have arrived with messages."""
        return self._descriptors.pop(0)

    def offer(self, **message: Any) -> bool:
        """Send a message without blocking, and return whether it was accepted: it is dropped if the
        other end does not read or is closed."""
        if not self._unsent:
            self._unsent = _line(message)
            is_accepted = self._send_unsent() > 0
            if not is_accepted:
                self._unsent = b""
            return is_accepted
        self._send_unsent()
        return not self._unsent and self.offer(**message)

    def _send_unsent(self) -> int:
        """Send as much as the other end accepts at once, and return the number of bytes."""
        try:
            num_bytes = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
        except OSError:
            return 0
        self._unsent = self._unsent[num_bytes:]
        return num_bytes

    def receive(self, *, wait: bool) -> list[dict[str, Any]]:
        """Return the messages that have arrived. `wait`: block until there is one, or the other end
        is closed."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        while not self.has_ended:
            try:
                # `socket.recv_fds` ignores flags (CPython 3.11).
                content, ancillary, *_ = self._socket.recvmsg(
                    _READ_BYTES, _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC
                )
                for *_, rights in ancillary:
                    self._descriptors += array("i", rights)
            except BlockingIOError:
                break
            except OSError:
                content = b""
            self.has_ended = not content
            *lines, self._partial = (self._partial + content).split(b"\n")
            if lines:
                return [json.loads(line) for line in lines]
        return []

    def close(self) -> None:
        """Close this end, and descriptors that were not taken."""
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
