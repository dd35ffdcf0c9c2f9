"""HTTP server of bulk state: bytes of one version, read by ranges. Layer: above authentication;
imports neither gRPC nor torch.

GET /session opens a session (see `authentication`), by which both sides prove that they have the
secret. A request is GET /state/VERSION with a Range and its proof; the response carries a MAC of
its bytes, which is also their checksum. The server listens at one address only; connections that
have not proved themselves are few and short.
"""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from torchtitan_lite.rpc.authentication import (
    AuthenticationError,
    RequestProof,
    ServerSession,
    ServerSessions,
)

SESSION_PATH = "/session"
NONCE, TICKET, PROOF = "X-Nonce", "X-Ticket", "X-Proof"
"""Headers of a session's opening."""
MAC = "X-MAC"
"""Header of a response: the MAC of its body."""
_PATH = re.compile(r"/state/(\d{1,18})", re.ASCII)
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})", re.ASCII)
_IDLE_S = 30
"""Time after which an idle connection is closed."""
_STRANGER_S = 5
"""The same, for a connection that has not proved itself."""
_MAX_STRANGERS = 32
"""Connections that have not proved themselves. A further one replaces the oldest."""


class ServedState(Protocol):
    """Bytes that a server offers; they must not change while it does."""

    @property
    def length(self) -> int: ...

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes from `start` to `stop`."""
        ...


class StateServer:
    """HTTP server in a thread, which serves the state passed to `offer`."""

    def __init__(
        self, address: str, secret: str, purpose: str, *, listener: socket.socket | None = None
    ) -> None:
        """`address` is that of an interface; `purpose` separates servers that share the secret;
        `listener` is a socket that listens there already. Raises OSError."""
        self._server = _Server(address, secret, purpose, listener)
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="state-server", daemon=True
        )
        self._thread.start()

    def offer(self, version: int, state: ServedState) -> None:
        """Serve `state`, which must not change until `withdraw`."""
        self._server.offered = (version, state)

    def withdraw(self) -> None:
        """Stop serving the state."""
        self._server.offered = None

    def close(self) -> None:
        """Stop the thread and close every connection."""
        self.withdraw()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, address: str, secret: str, purpose: str, listener: socket.socket | None
    ) -> None:
        self.sessions = ServerSessions(secret, purpose)
        self.offered: tuple[int, ServedState] | None = None
        self._strangers: list[socket.socket] = []
        self._lock = threading.Lock()
        if ":" in address:
            self.address_family = socket.AF_INET6
        super().__init__((address, 0), _Handler, bind_and_activate=listener is None)
        if listener is not None:
            self.socket.close()
            self.socket = listener
            self.server_address = listener.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._strangers.append(request)
            oldest = self._strangers.pop(0) if len(self._strangers) > _MAX_STRANGERS else None
        if oldest is not None:
            # Its thread reads the end of the connection and ends.
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def trust(self, connection: Any) -> None:
        """Count a connection as that of a client with the secret."""
        with self._lock:
            if connection in self._strangers:
                self._strangers.remove(connection)

    def shutdown_request(self, request: Any) -> None:
        self.trust(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing when a peer disconnects."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _STRANGER_S

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        if self.path == SESSION_PATH:
            self._open_session(server)
            return
        span_text = self.headers.get("Range") or ""
        try:
            proof = RequestProof.parse(self.headers.get("Authorization") or "")
            session = server.sessions.authenticate(proof, self.path.encode(), span_text.encode())
        except AuthenticationError:
            self._send_error(HTTPStatus.UNAUTHORIZED)
            return
        server.trust(self.connection)
        self.connection.settimeout(_IDLE_S)
        path, span = _PATH.fullmatch(self.path), _RANGE.fullmatch(span_text)
        offered = server.offered
        if path is None or (offered is not None and int(path[1]) < offered[0]):
            self._send_error(HTTPStatus.NOT_FOUND)
            return
        if offered is None or int(path[1]) > offered[0]:
            # A client may ask before this process has the state.
            self._send_error(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        state = offered[1]
        if span is None or not int(span[1]) <= int(span[2]) < state.length:
            self._send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return
        self._send_state(server, session, int(span[1]), int(span[2]) + 1, offered)

    def _open_session(self, server: _Server) -> None:
        try:
            nonce = bytes.fromhex(self.headers.get(NONCE) or "")
            ticket, proof = server.sessions.challenge(nonce)
        except (AuthenticationError, ValueError):
            self._send_error(HTTPStatus.BAD_REQUEST)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", "0")
        self.send_header(TICKET, ticket.hex())
        self.send_header(PROOF, proof.hex())
        self.end_headers()

    def _send_state(
        self,
        server: _Server,
        session: ServerSession,
        first: int,
        stop: int,
        offered: tuple[int, ServedState],
    ) -> None:
        state = offered[1]
        pieces = list(state.read(first, stop))
        digest = session.response_digest()
        for piece in pieces:
            digest.update(piece)
        if server.offered is not offered:
            # The state may have changed during the read.
            self._send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.PARTIAL_CONTENT)
        self.send_header("Content-Length", str(stop - first))
        self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{state.length}")
        self.send_header(MAC, digest.hexdigest())
        self.end_headers()
        for piece in pieces:
            self.connection.sendall(piece)

    def _send_error(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: there is one request per chunk."""
