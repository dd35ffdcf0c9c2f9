"""torchft's checkpoint transport over HTTP: serves this rank's live state, and notes which peer
serves its own. Layer: above live_state.

The request is GET /state/PROGRESS with a Range, and the token in Authorization. The response
carries the checksum of its bytes (xxh3). The server is bound to one address only.
"""

import hmac
import re
import threading
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import xxhash
from torchft.checkpointing import CheckpointTransport

from torchtitan_lite.replica.healing.live_state import HealableState, LiveState

CHECKSUM = "X-Checksum-XXH3"
_PATH = re.compile(r"/state/(\d{1,18})", re.ASCII)
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})", re.ASCII)
_IDLE_S = 30


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

    def __init__(self, state: HealableState, address: str, token: str) -> None:
        """`address` is that of an interface. Raises OSError."""
        self._state = state
        self._server = StateServer(address, token)
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

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self.token = token.encode()
        self.offered: tuple[int, LiveState] | None = None
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing when a peer disconnects."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, server.token):
            self._send_error(HTTPStatus.UNAUTHORIZED)
            return
        path = _PATH.fullmatch(self.path)
        span = _RANGE.fullmatch(self.headers.get("Range") or "")
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
        first, stop = int(span[1]), int(span[2]) + 1
        pieces = list(state.read(first, stop))
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        if server.offered is not offered:
            # The state may have changed during the read.
            self._send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.PARTIAL_CONTENT)
        self.send_header("Content-Length", str(stop - first))
        self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{state.length}")
        self.send_header(CHECKSUM, digest.hexdigest())
        self.end_headers()
        for piece in pieces:
            self.connection.sendall(piece)

    def _send_error(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: there is one request per chunk."""
