"""HTTP server of bulk state: bytes of versions, read by ranges.

GET /session opens a session (see `authentication`), by which both sides prove that they have the
secret. A request is GET /state/VERSION with a Range and its proof; the response carries a MAC of
its bytes, which is also their checksum. `Range: bytes=` is followed by ranges FIRST-LAST, separated
by commas; a range FIRST-LAST;rows=COUNT,STRIDE is COUNT ranges at a distance of STRIDE bytes, such
as a block of columns. The server listens at one address only; connections that have not proved
themselves are few and short.
"""

import math
import re
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torchtitan_lite.core.errors import RpcError
from torchtitan_lite.distributed.rpc import fields
from torchtitan_lite.distributed.rpc.authentication import (
    RequestProof,
    ServerSession,
    ServerSessions,
)
from torchtitan_lite.distributed.rpc.fields import parse_field
from torchtitan_lite.distributed.rpc.http_server import BoundedHandler, BoundedHTTPServer

SESSION_PATH = "/session"
NONCE, TICKET, PROOF = "X-Nonce", "X-Ticket", "X-Proof"
"""Headers of a session's opening."""
PREPARED = "X-Prepared"
"""Header of a response: how far the preparation of a state is that is not served yet, else 0."""
MAC = "X-MAC"
"""Header of a response to an authenticated request: the MAC of `signed_head` and the content."""
SERIAL = "X-Serial"
"""Header of a response: the number of the offer that is served, which increases; 0 without content.
It is unique: each server begins with a random one."""
WAIT = "X-Wait"
"""Header of a request, "SERIAL MILLISECONDS": it is answered once the state is not from this offer
any more, or after this time. Serial 0 is that of a state that is not offered."""
_WAIT = re.compile(r"(\d{1,18}) (\d{1,5})", re.ASCII)
_PATH = re.compile(r"/state/(\d{1,18})", re.ASCII)
_PART = r"(\d{1,18})-(\d{1,18})(?:;rows=(\d{1,9}),(\d{1,18}))?"
_RANGE = re.compile(rf"bytes={_PART}(?:,{_PART})*", re.ASCII)
_PARTS = re.compile(_PART, re.ASCII)
MAX_ROWS = 1 << 20
"""Maximum number of rows of a request, over all its ranges."""
_MAX_RESPONSE_BYTES = 64 << 20
"""Maximum bytes of a request of several ranges, which are joined in memory."""
MAX_RANGES = 512
"""Maximum ranges of a request, whose header line is limited."""
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
MAX_WAIT_S = 5.0
"""Maximum time of a request that waits for another state."""


def signed_head(status: int, length: int, serial: int, prepared: int) -> bytes:
    """Return what the MAC of a response covers before its content of `length` bytes."""
    return f"{status} {length} {serial} {prepared}\n".encode()


class ByteRows(NamedTuple):
    """Rows of equal length in the bytes of a state."""

    start: int
    length: int
    """Bytes of a row."""
    num_rows: int = 1
    stride: int = 0
    """Bytes from the start of a row to that of the next."""

    @property
    def num_bytes(self) -> int:
        return self.length * self.num_rows

    def __str__(self) -> str:
        text = f"{self.start}-{self.start + self.length - 1}"
        return text if self.num_rows == 1 else f"{text};rows={self.num_rows},{self.stride}"


class ServedState(Protocol):
    """Bytes that a server offers; they must not change while it does."""

    @property
    def length(self) -> int: ...

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes from `start` to `stop`."""
        ...


class _Offer(NamedTuple):
    """A state that is served."""

    state: ServedState
    serial: int


class FramedState:
    """A header, which 8 bytes of its length precede, and data in a few pieces; clients read the
    header with `StateConnection.fetch_header`."""

    def __init__(self, header: bytes, *data: bytes | memoryview) -> None:
        self._pieces = [memoryview(len(header).to_bytes(8, "little") + header)]
        self._pieces += map(memoryview, data)

    @property
    def length(self) -> int:
        return sum(map(len, self._pieces))

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes from `start` to `stop`."""
        for piece in self._pieces:
            if start < len(piece):
                yield piece[start:stop]
            start, stop = max(start - len(piece), 0), stop - len(piece)
            if stop <= 0:
                return


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
        self._server.serve_in_thread("state-server")

    def prepare(self, version: int, progress: int) -> None:
        """Report to clients that wait for a state that it is being prepared. They wait as long as
        `progress` increases."""
        self._server.preparing = (version, progress)

    def offer(self, version: int, state: ServedState, *, keep: Collection[int] = ()) -> None:
        """Serve `state`, which must not change until it is withdrawn, and of the versions served so
        far only those to `keep`."""
        server = self._server
        with server.changed:
            kept = {served: offer for served, offer in server.offered.items() if served in keep}
            server.last_serial += 1
            server.offered = {**kept, version: _Offer(state, server.last_serial)}
            server.changed.notify_all()

    def withdraw(self, version: int | None = None) -> None:
        """Stop serving a version, by default everything."""
        server = self._server
        with server.changed:
            offered = {} if version is None else server.offered
            server.offered = {
                served: offer for served, offer in offered.items() if served != version
            }
            server.changed.notify_all()
        if version is None:
            server.preparing = None

    def touch(self, version: int) -> None:
        """Count a version as just read: a client is about to."""
        self._server.touch(version)

    def idle_s(self, version: int) -> float:
        """Return the seconds since a client last read a version: infinite if none has, 0 while one
        does."""
        if self._server.num_readers.get(version):
            return 0.0
        return time.monotonic() - self._server.last_read_s.get(version, -math.inf)

    def close(self) -> None:
        """Stop the thread and close every connection."""
        self.withdraw()
        self._server.shutdown()
        self._server.server_close()


class _Server(BoundedHTTPServer):
    def __init__(
        self, address: str, secret: str, purpose: str, listener: socket.socket | None
    ) -> None:
        self.sessions = ServerSessions(secret, purpose)
        self.offered: Mapping[int, _Offer] = MappingProxyType({})
        """Replaced as a whole, because threads of connections read it."""
        self.last_serial = secrets.randbits(56)
        self.changed = threading.Condition()
        """Notified when `offered` is replaced."""
        self.last_read_s: dict[int, float] = {}
        """Version -> end of its last request."""
        self.num_readers: dict[int, int] = defaultdict(int)
        """Version -> requests in progress."""
        self._readers_lock = threading.Lock()
        self.preparing: tuple[int, int] | None = None
        """Version and progress of the state being prepared."""
        super().__init__((address, 0), _Handler, listener=listener)

    def wait_for_change(self, version: int, serial: int, timeout_s: float) -> None:
        """Block while `version` is served from this offer, or, for serial 0, is not served."""

        def has_changed() -> bool:
            offer = self.offered.get(version)
            return (0 if offer is None else offer.serial) != serial

        with self.changed:
            self.changed.wait_for(has_changed, min(timeout_s, MAX_WAIT_S))

    def touch(self, version: int) -> None:
        with self._readers_lock:
            self.last_read_s[version] = time.monotonic()

    @contextmanager
    def reading(self, version: int) -> Iterator[None]:
        """Count a request of `version` as being in progress."""
        with self._readers_lock:
            self.num_readers[version] += 1
        try:
            yield
        finally:
            with self._readers_lock:
                self.num_readers[version] -= 1
                self.last_read_s[version] = time.monotonic()
                if not self.num_readers[version]:
                    del self.num_readers[version]
                for old in self.last_read_s.keys() - self.offered.keys():
                    del self.last_read_s[old]


class _Handler(BoundedHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        if self.path == SESSION_PATH:
            self._open_session(server)
            return
        span_text, wait_text = self.headers.get("Range") or "", self.headers.get(WAIT) or ""
        try:
            proof = RequestProof.parse(self.headers.get("Authorization"))
            content = (self.path.encode(), span_text.encode(), wait_text.encode())
            session = server.sessions.authenticate(proof, *content)
        except RpcError:
            self._send_head(HTTPStatus.UNAUTHORIZED)
            return
        self.trust()
        path = _PATH.fullmatch(self.path)
        version = -1 if path is None else int(path[1])
        if wait := _WAIT.fullmatch(wait_text):
            server.wait_for_change(version, int(wait[1]), int(wait[2]) / 1000)
        offered = server.offered
        if version < max(offered, default=0) and version not in offered:
            self._reject(session, HTTPStatus.NOT_FOUND)
            return
        if version not in offered:
            # A client may ask before this process has the state.
            preparing = server.preparing
            is_asked = preparing is not None and version == preparing[0]
            prepared = preparing[1] if preparing is not None and is_asked else 0
            self._reject(session, HTTPStatus.SERVICE_UNAVAILABLE, prepared)
            return
        offer = offered[version]
        rows = _rows(span_text, offer.state.length)
        if rows is None:
            self._reject(session, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return
        with server.reading(version):
            self._send_state(server, session, rows, version, offer)

    def _open_session(self, server: _Server) -> None:
        try:
            (nonce,) = parse_field(NONCE, self.headers.get(NONCE), fields.NONCE)
            ticket, proof = server.sessions.challenge(bytes.fromhex(nonce))
        except RpcError:
            self._send_head(HTTPStatus.BAD_REQUEST)
            return
        self._send_head(HTTPStatus.OK, headers={TICKET: ticket.hex(), PROOF: proof.hex()})

    def _send_state(
        self,
        server: _Server,
        session: ServerSession,
        rows: Sequence[range],
        version: int,
        offer: _Offer,
    ) -> None:
        pieces = [piece for row in rows for piece in offer.state.read(row.start, row.stop)]
        if len(rows) > 1:
            # One piece, because rows may be a few bytes each.
            pieces = [memoryview(b"".join(pieces))]
        length = sum(map(len, rows))
        digest = session.response_digest()
        digest.update(signed_head(HTTPStatus.PARTIAL_CONTENT, length, offer.serial, 0))
        for piece in pieces:
            digest.update(piece)
        if server.offered.get(version) is not offer:
            # The state may have changed during the read.
            self._reject(session, HTTPStatus.NOT_FOUND)
            return
        self._send_head(
            HTTPStatus.PARTIAL_CONTENT,
            length,
            {MAC: digest.hexdigest(), SERIAL: str(offer.serial), PREPARED: "0"},
        )
        for piece in pieces:
            self.connection.sendall(piece)

    def _reject(self, session: ServerSession, status: HTTPStatus, prepared: int = 0) -> None:
        """Send a status with its proof, because any machine on the way could forge one."""
        digest = session.response_digest()
        digest.update(signed_head(status, 0, 0, prepared))
        headers = {MAC: digest.hexdigest(), SERIAL: "0", PREPARED: str(prepared)}
        self._send_head(status, headers=headers)

    def _send_head(
        self, status: HTTPStatus, length: int = 0, headers: Mapping[str, str] = _NO_HEADERS
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _rows(text: str, length: int) -> list[range] | None:
    """Return the ranges of bytes of a request; None if they exceed the state or a limit."""
    if _RANGE.fullmatch(text) is None:
        return None
    rows: list[range] = []
    num_bytes = num_rows = 0
    for index, part in enumerate(_PARTS.finditer(text)):
        first, stop = int(part[1]), int(part[2]) + 1
        count, stride = (1, 0) if part[3] is None else (int(part[3]), int(part[4]))
        last = stop + (count - 1) * stride
        num_bytes, num_rows = num_bytes + (stop - first) * count, num_rows + count
        if not (first < stop and count > 0 and last <= length):
            return None
        if index >= MAX_RANGES or num_rows > MAX_ROWS:
            return None
        if num_rows > 1 and num_bytes > _MAX_RESPONSE_BYTES:
            return None
        rows += [range(first + row * stride, stop + row * stride) for row in range(count)]
    return rows
