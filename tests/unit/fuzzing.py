"""Forged bytes for servers and clients: strategies of headers, JSON and raw bytes, and their number
of examples."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FEW_OR_MANY = pytest.mark.parametrize(
    "num_examples", [25, pytest.param(1000, marks=pytest.mark.matrix)]
)
"""Number of examples of a fuzz test: few in each run, many in the matrix."""
header_values = st.one_of(
    st.text(st.characters(max_codepoint=0xFF, exclude_characters="\r\n"), max_size=80),
    st.text("0123456789abcdef.", max_size=80),
    st.integers(min_value=-(10**20), max_value=10**20).map(str),
    st.sampled_from(["\xff" * 64, "0" * 64, "٣".encode().decode("latin-1"), "0_0", " 1", "+1"]),
)
"""Values that the bytes of a header can have."""
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
raw_messages = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda line, name, value: f"{line}\r\n{name}: {value}\r\n\r\n".encode("latin-1"),
        st.sampled_from(["GET /session HTTP/1.1", "GET /state/3 HTTP/1.1", "PRI * HTTP/2.0"]),
        st.sampled_from(["X-Nonce", "Authorization", "Range", "X-Wait", "Content-Length"]),
        header_values,
    ),
    st.builds(
        lambda status, name, value: f"HTTP/1.1 {status}\r\n{name}: {value}\r\n\r\n".encode(
            "latin-1"
        ),
        st.sampled_from(["200 OK", "206 x", "401 x", "503 x", "\xff", "100 Continue"]),
        st.sampled_from(["Content-Length", "X-Ticket", "X-Proof", "Transfer-Encoding"]),
        header_values,
    ),
)
"""What a stranger may send to a server, or answer as one."""


def json_objects(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy of JSON objects that have some of these keys."""
    return st.dictionaries(st.sampled_from(names) | st.text(max_size=4), json_values)


def fuzz(num_examples: int, check: Callable[..., None], **strategies: Any) -> None:
    """Call `check` with examples of the strategies."""
    settings(max_examples=num_examples)(given(**strategies)(check))()


def send_raw(address: tuple[str, int], content: bytes) -> None:
    """Send bytes to a server and close the connection once the server answers or closes it."""
    with socket.create_connection(address, timeout=0.5) as stream, suppress(OSError):
        stream.sendall(content)
        stream.shutdown(socket.SHUT_WR)
        stream.recv(1 << 16)


class ForgedServer:
    """Answers each connection with `answer`, and closes it."""

    def __init__(self, listener: socket.socket, interval_s: float) -> None:
        self.answer = b""
        self.received: list[bytes] = []
        self.port = listener.getsockname()[1]
        self._listener, self._interval_s = listener, interval_s

    def serve(self) -> None:
        """Serve until the listener is closed."""
        with suppress(OSError):
            while True:
                stream, _ = self._listener.accept()
                with stream, suppress(OSError):
                    self.received.append(stream.recv(1 << 16))
                    if not self._interval_s:
                        stream.sendall(self.answer)
                        continue
                    for index in range(len(self.answer)):
                        stream.sendall(self.answer[index : index + 1])
                        time.sleep(self._interval_s)


@contextmanager
def forged_server(interval_s: float = 0.0) -> Iterator[ForgedServer]:
    """Run a `ForgedServer` in a thread. With an interval, it sends one byte at a time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = ForgedServer(listener, interval_s)
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server
        finally:
            # Wakes the thread, which `close` alone would not.
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
