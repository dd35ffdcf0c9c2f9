"""HTTP server in threads, of which strangers get few connections for a short time.

Invariant: a connection that has not proved itself ends `STRANGER_S` after it was accepted, however
its bytes arrive; a request on any other connection is received within that time after its first
byte. Without descriptors the server closes connections of strangers, and neither raises nor spins.
"""

import io
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torchtitan_lite.distributed.rpc.deadline_reader import DeadlineReader
from torchtitan_lite.distributed.rpc.descriptors import leaves_reserve
from torchtitan_lite.distributed.rpc.strangers import StrangerLimits, Strangers

STRANGER_S = 5.0
"""Time in which a connection must prove itself, and in which a request must be received."""
_IDLE_S = 30.0
"""Time after which an idle connection that has proved itself is closed, and for each response."""
_STOP_S = 0.05
"""Time in which the server notices that it must stop, because a recovery waits for it."""
_EXHAUSTED_S = 0.05
"""Pause after a connection for which there is no descriptor: it stays readable."""
_LIMITS = StrangerLimits(in_all=32, per_address=16)


class BoundedHTTPServer(ThreadingHTTPServer):
    """Server at `address`, or at a socket that listens there already. Raises OSError."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        address: tuple[str, int],
        handler: type["BoundedHandler"],
        *,
        listener: socket.socket | None = None,
        limits: StrangerLimits = _LIMITS,
    ) -> None:
        self._strangers: Strangers[socket.socket] = Strangers(limits)
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler, bind_and_activate=listener is None)
        if listener is not None:
            self.socket.close()
            self.socket = listener
            self.server_address = listener.getsockname()

    def serve_in_thread(self, name: str) -> threading.Thread:
        """Start a thread that serves until `shutdown`."""
        thread = threading.Thread(
            target=self.serve_forever, args=(_STOP_S,), name=name, daemon=True
        )
        thread.start()
        return thread

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            with self._lock:
                _cut(self._strangers.pop_idlest())
            time.sleep(_EXHAUSTED_S)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Close the connections that this one displaces, and return whether it is accepted."""
        with self._lock:
            if not leaves_reserve(request.fileno()):
                displaced = self._strangers.pop_idlest()
                _cut(displaced)
                if displaced is None:
                    return False
            _cut(self._strangers.add(request, client_address[0]))
        return True

    def trust(self, connection: socket.socket) -> None:
        """Count a connection as that of a client with the secret, or as closed."""
        with self._lock:
            self._strangers.discard(connection)

    def shutdown_request(self, request: Any) -> None:
        self.trust(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing when a peer disconnects."""


def _cut(connection: socket.socket | None) -> None:
    """Shut a connection down; its thread reads its end, and closes it."""
    if connection is not None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class BoundedHandler(BaseHTTPRequestHandler):
    """Handler of the requests of one connection."""

    timeout = STRANGER_S
    disable_nagle_algorithm = True
    """Headers and content are sent one after the other: small content would wait for the client's
    delayed acknowledgement, 40 ms per request."""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._is_trusted = False
        self._reader = DeadlineReader(self.connection, STRANGER_S)
        self._buffered = self.rfile = io.BufferedReader(self._reader)

    def trust(self) -> None:
        """Count the connection as that of a client with the secret."""
        self._is_trusted = True
        self.connection.settimeout(_IDLE_S)
        assert isinstance(self.server, BoundedHTTPServer)
        self.server.trust(self.connection)

    def handle_one_request(self) -> None:
        if self._is_trusted:
            self._reader.allow(_IDLE_S)
            try:
                self._buffered.peek(1)
            except OSError:
                self.close_connection = True
                return
            self._reader.allow(STRANGER_S)
        super().handle_one_request()

    def parse_request(self) -> bool:
        is_valid = super().parse_request()
        # The reader has set it to what was left.
        self.connection.settimeout(_IDLE_S if self._is_trusted else STRANGER_S)
        return is_valid

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a client may send one request per chunk."""
