"""Gives this rank's state to its peers, by HTTP. Layer: above live_state.

GET /state/PROGRESS with a Range, and the token in Authorization. The answer carries the checksum of
its bytes (xxh3). Bound to one address only.
"""

import hmac
import re
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import xxhash

from torchtitan_lite.replica.healing.live_state import LiveState

CHECKSUM = "X-Checksum-XXH3"
_PATH = re.compile(r"/state/(\d{1,18})", re.ASCII)
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})", re.ASCII)
_IDLE_S = 30


class StateServer:
    """Serves from a thread; what it serves, if anything, is told by `offer` and `withdraw`."""

    def __init__(self, address: str, token: str) -> None:
        """`address` is that of an interface. Raises OSError."""
        self._server = _Server((address, 0), token)
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="healing", daemon=True
        )
        self._thread.start()

    def offer(self, progress: int, state: LiveState) -> None:
        """Give `state`, which does not change until `withdraw`."""
        self._server.offered = (progress, state)

    def withdraw(self) -> None:
        """Give no more."""
        self._server.offered = None

    def close(self) -> None:
        """End the thread, and every connection with it."""
        self.withdraw()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self.token = token.encode()
        self.offered: tuple[int, LiveState] | None = None
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A peer that dies is nothing to print."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, server.token):
            self._refuse(HTTPStatus.UNAUTHORIZED)
            return
        path = _PATH.fullmatch(self.path)
        span = _RANGE.fullmatch(self.headers.get("Range") or "")
        offered = server.offered
        if path is None or (offered is not None and int(path[1]) < offered[0]):
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        if offered is None or int(path[1]) > offered[0]:
            # Who is behind may ask before this one has heard of it.
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        state = offered[1]
        if span is None or not int(span[1]) <= int(span[2]) < state.length:
            self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return
        first, stop = int(span[1]), int(span[2]) + 1
        pieces = list(state.read(first, stop))
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        if server.offered is not offered:
            # The state may have changed while it was read.
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.PARTIAL_CONTENT)
        self.send_header("Content-Length", str(stop - first))
        self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{state.length}")
        self.send_header(CHECKSUM, digest.hexdigest())
        self.end_headers()
        for piece in pieces:
            self.connection.sendall(piece)

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a request a chunk."""
