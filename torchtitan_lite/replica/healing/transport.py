"""torchft's checkpoint transport over HTTP: serves this rank's live state, and notes which peer
serves its own. Layer: above live_state.

GET /session opens a session (see `rpc.authentication`), by which both sides prove that they have
the secret. A request is GET /state/PROGRESS with a Range and its proof; the response carries a MAC
of its bytes, which is also their checksum. The server listens at one address only; connections that
have not proved themselves are few and short.
"""

import re
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torchft.checkpointing import CheckpointTransport

from torchtitan_lite.replica.healing.live_state import HealableState, LiveState
from torchtitan_lite.rpc.authentication import (
    AuthenticationError,
    RequestProof,
    ServerSession,
    ServerSessions,
)

PURPOSE = "healing"
"""Purpose of the sessions."""
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


@dataclass(frozen=True)
class StateSource:
    """URL and progress of a peer's state."""

    url: str
    progress: int


class HealingTransport(CheckpointTransport[dict[str, Any]]):
    """Transport that serves this rank's live state, and notes the source to heal from.

    The donor's tensors do not change while they are served, because the step that would change them
    needs the healing replica.
    """

    def __init__(self, state: HealableState, address: str, secret: str) -> None:
        """`address` is that of an interface. Raises OSError."""
        self._state = state
        self._server = StateServer(address, secret)
        self.source: StateSource | None = None
        """Source that this rank must heal from before the next step."""

    def metadata(self) -> str:
        """Return the URL of this rank's server."""
        return self._server.url

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        """Serve the state in place, without copying it."""
        del dst_ranks, state_dict, timeout
        self._server.offer(step, LiveState.of(self._state))

    def disallow_checkpoint(self) -> None:
        """Stop serving the state, which may be modified from now on."""
        self._server.withdraw()

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Note the source. The main thread fetches the state once nothing reads the old one."""
        del src_rank, timeout
        self.source = StateSource(metadata, step)
        return {"user": {"state": None}, "torchft": {"step": step, "batches_committed": 0}}

    def shutdown(self, wait: bool = True) -> None:
        """Stop the server."""
        del wait
        self._server.close()


class StateServer:
    """HTTP server in a thread, which serves the state passed to `offer`."""

    def __init__(self, address: str, secret: str) -> None:
        """`address` is that of an interface. Raises OSError."""
        self._server = _Server((address, 0), secret)
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="healing", daemon=True
        )
        self._thread.start()

    def offer(self, progress: int, state: LiveState) -> None:
        """Serve `state`, which must not change until `withdraw`."""
        self._server.offered = (progress, state)

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

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        self.sessions = ServerSessions(secret, PURPOSE)
        self.offered: tuple[int, LiveState] | None = None
        self._strangers: list[socket.socket] = []
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

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
        """Count a connection as that of a replica."""
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
            # A lagging replica may ask before this replica knows of the quorum.
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
        offered: tuple[int, LiveState],
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
