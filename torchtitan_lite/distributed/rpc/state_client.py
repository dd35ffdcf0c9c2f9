"""Client of the bulk state that `state_server` serves: ranges of bytes, received into given memory
and checked."""

import hmac
import http.client
import io
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from torchtitan_lite.core.errors import RpcError
from torchtitan_lite.distributed.rpc import fields
from torchtitan_lite.distributed.rpc.authentication import AuthenticationError, ClientSession
from torchtitan_lite.distributed.rpc.deadline_reader import DeadlineReader
from torchtitan_lite.distributed.rpc.fields import NUMBER, parse_field
from torchtitan_lite.distributed.rpc.state_server import (
    MAC,
    MAX_WAIT_S,
    NONCE,
    PREPARED,
    PROOF,
    SERIAL,
    SESSION_PATH,
    TICKET,
    WAIT,
    ByteRows,
    signed_head,
)

_CHUNK_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20
_TICK_MS = 50
"""Time that a peer waits for a state that it does not serve, before it says so."""
_POLL_S = 0.01
_MIN_BYTES_PER_S = 64 << 10
"""Rate below which a connection counts as lost."""
_MAX_HEADER_BYTES = 256 << 20
_UNPROVEN_S = 2.0
"""Time for which answers without a proof are retried: they may come from another server."""
_UNPROVEN_POLL_S = 0.1
_MAX_PREPARING = 20
"""Maximum time for which a state is prepared, in timeouts of the connection."""


@dataclass(frozen=True)
class PeerEndpoint:
    """URL, secret and limits of a connection to a peer."""

    url: str
    secret: str
    purpose: str
    timeout_s: float
    connections: int = 1


class _NotReady(RpcError):
    """State that the peer does not serve yet."""

    def __init__(self, message: str, prepared: int) -> None:
        super().__init__(message)
        self.prepared = prepared
        """How far its preparation is; 0 if the peer does not report it."""


class _Unproven(RpcError):
    """Answer without the peer's proof, which decides nothing: the peer does not accept the session
    any more, it has another secret, or another server has answered."""


class _OutOfRange(RpcError):
    """Bytes that the state does not have."""


class _ConnectionLost(RpcError):
    """Connection that the peer has closed."""


@dataclass(frozen=True)
class Chunk:
    """Contiguous bytes of the file, and the memory that receives them."""

    start: int
    targets: Sequence[memoryview]


def split_into_chunks(targets: Sequence[tuple[int, memoryview]]) -> list[Chunk]:
    """Split `targets` into chunks of similar size: small tensors together, large ones in pieces."""
    chunks: list[Chunk] = []
    start, size, views = 0, 0, []
    for position, view in targets:
        for first in range(0, len(view), _CHUNK_BYTES):
            piece = view[first : first + _CHUNK_BYTES]
            if views and size + len(piece) > _CHUNK_BYTES:
                chunks.append(Chunk(start, views))
                size, views = 0, []
            if not views:
                start = position + first
            views.append(piece)
            size += len(piece)
    return [*chunks, Chunk(start, views)] if views else chunks


def fetch_all(endpoint: PeerEndpoint, version: int, chunks: Sequence[Chunk]) -> None:
    """Fetch chunks over several connections, each of which takes the next chunk when it is free."""
    left = iter(chunks)

    def work() -> None:
        connection = StateConnection(endpoint, version)
        try:
            # `next` on an iterator is atomic under the GIL.
            for chunk in left:
                connection.fetch_range(chunk.start, chunk.targets)
        finally:
            connection.close()

    count = min(endpoint.connections, len(chunks))
    with ThreadPoolExecutor(max(1, count), "state-client") as pool:
        for future in [pool.submit(work) for _ in range(count)]:
            future.result()


class _Answer(http.client.HTTPResponse):
    """Answer whose header must arrive within the socket's timeout in all."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.reader = DeadlineReader(sock, sock.gettimeout() or 0.0)
        self.fp = io.BufferedReader(self.reader)


class StateConnection:
    """Connection to one peer, for one state at a time."""

    def __init__(self, endpoint: PeerEndpoint, version: int) -> None:
        parts = urlsplit(endpoint.url)
        assert parts.hostname is not None
        self._endpoint = endpoint
        self.select(version)
        self._http = http.client.HTTPConnection(
            parts.hostname, parts.port, timeout=endpoint.timeout_s
        )
        self._http.response_class = _Answer
        self._session = ClientSession(endpoint.secret, endpoint.purpose)
        self.serial = 0
        """Number of the offer that the last response was from; 0 without one."""
        self._header_bytes = 0
        """Bytes of the last header; the next one is expected to be as long."""

    @property
    def url(self) -> str:
        """URL of the peer, for messages."""
        return self._endpoint.url

    def select(self, version: int) -> None:
        """Fetch from this state from now on."""
        self._path = f"/state/{version}"

    def fetch_header(
        self,
        tick: Callable[[], None] = lambda: None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Return the header, with which a state begins after 8 bytes of its length, as soon as the
        peer serves it. `tick` is called while waiting, and may raise; `on_progress`, when the peer
        has made progress in preparing the state, without which the wait ends after the timeout. It
        ends after `_MAX_PREPARING` timeouts in any case. Raises RpcError."""
        while True:
            content = bytearray(8 + self._header_bytes)
            try:
                self._fetch_when_ready(memoryview(content), tick, on_progress)
            except _OutOfRange:
                if not self._header_bytes:
                    raise
                self._header_bytes = 0
                continue
            size = int.from_bytes(content[:8], "little")
            if not 0 < size <= _MAX_HEADER_BYTES:
                raise RpcError(f"{self._endpoint.url} sent an invalid header of {size} bytes.")
            self._header_bytes = size
            # Otherwise all of the next one, because another state may be offered in between.
            if 8 + size <= len(content):
                return bytes(content[8 : 8 + size])

    def _fetch_when_ready(
        self,
        target: memoryview,
        tick: Callable[[], None],
        on_progress: Callable[[], None],
    ) -> None:
        """Fill `target` with the first bytes as soon as the peer serves the state, for which it is
        asked to wait."""
        started_s = time.monotonic()
        deadline = started_s + self._endpoint.timeout_s
        last_deadline = started_s + _MAX_PREPARING * self._endpoint.timeout_s
        prepared = 0
        while True:
            try:
                self.fetch([ByteRows(0, len(target))], [target], f"0 {_TICK_MS}")
                return
            except _NotReady as error:
                tick()
                if error.prepared > prepared:
                    prepared = error.prepared
                    deadline = min(time.monotonic() + self._endpoint.timeout_s, last_deadline)
                    on_progress()
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_S)

    def wait_for_change(self, timeout_s: float) -> None:
        """Block while the peer serves the same state as in its last response, at most `timeout_s`
        and MAX_WAIT_S. Raises RpcError, also if the peer cannot wait."""
        wait = f"{self.serial} {round(max(0.0, min(timeout_s, MAX_WAIT_S)) * 1000)}"
        self.fetch([ByteRows(0, 1)], [memoryview(bytearray(1))], wait)

    def fetch_range(self, start: int, targets: Sequence[memoryview]) -> None:
        """Fill `targets` with the bytes from `start` on. Raises RpcError."""
        self.fetch([ByteRows(start, sum(map(len, targets)))], targets)

    def fetch(
        self,
        rows: Sequence[ByteRows],
        targets: Sequence[memoryview],
        wait: str = "",
    ) -> None:
        """Fill `targets` with the bytes of `rows`, at most MAX_RANGES, in one request; `wait` is
        its WAIT. A connection that the peer has closed since the last request is replaced once; an
        answer without a proof is retried for `_UNPROVEN_S`. Raises RpcError."""
        span = f"bytes={','.join(map(str, rows))}"
        length = sum(row.num_bytes for row in rows)
        may_reconnect, num_unproven = self._http.sock is not None, 0
        deadline_s = time.monotonic() + min(_UNPROVEN_S, self._endpoint.timeout_s)
        while True:
            try:
                self._fetch(span, length, targets, wait)
                return
            except _Unproven:
                num_unproven += 1
                if num_unproven > 1:
                    if time.monotonic() >= deadline_s:
                        raise
                    time.sleep(_UNPROVEN_POLL_S)
                # A session ends after an hour, or with the server that it was opened with.
                self._session = ClientSession(self._endpoint.secret, self._endpoint.purpose)
            except _ConnectionLost:
                if not may_reconnect:
                    raise
                may_reconnect = False

    def _fetch(
        self,
        span: str,
        length: int,
        targets: Sequence[memoryview],
        wait: str = "",
    ) -> None:
        try:
            if not self._session.is_open:
                self._open_session()
            proof = self._session.sign(self._path.encode(), span.encode(), wait.encode())
            headers = {"Authorization": str(proof), "Range": span}
            answer = self._answer(self._path, headers | ({WAIT: wait} if wait else {}))
            is_content = answer.status == HTTPStatus.PARTIAL_CONTENT
            expected = length if is_content else 0
            if answer.length != expected:
                # What proves nothing is not read.
                raise self._unproven(answer.status)
            mac = bytes.fromhex(self._field(answer, MAC, fields.MAC))
            serial, prepared = (int(self._field(answer, n, NUMBER)) for n in (SERIAL, PREPARED))
            digest = self._session.response_digest(proof)
            digest.update(signed_head(answer.status, expected, serial, prepared))
            if not is_content:
                if not hmac.compare_digest(digest.digest(), mac):
                    raise self._unproven(answer.status)
                raise self._rejection(answer.status, prepared)
            self._read_content(answer, targets, digest)
            if not hmac.compare_digest(digest.digest(), mac):
                raise _Unproven(f"The data from {self.url} do not match their MAC.")
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            message = f"{self._endpoint.url} cannot be read: {error!r:.200}"
            if isinstance(error, ConnectionError):
                raise _ConnectionLost(message) from error
            raise (RpcError if isinstance(error, OSError) else _Unproven)(message) from error
        except RpcError:
            # What is left of the response would be read as the next one.
            self._http.close()
            raise
        self.serial = serial

    def _answer(self, path: str, headers: Mapping[str, str]) -> "_Answer":
        """Send a request, and return its answer once its header has arrived."""
        if self._http.sock is not None:
            # Reading the last answer has set it to what was left.
            self._http.sock.settimeout(self._endpoint.timeout_s)
        self._http.request("GET", path, headers=headers)
        answer = self._http.getresponse()
        assert isinstance(answer, _Answer)
        return answer

    def _read_content(
        self,
        answer: "_Answer",
        targets: Sequence[memoryview],
        digest: "hmac.HMAC",
    ) -> None:
        assert answer.length is not None
        timeout_s = self._endpoint.timeout_s
        answer.reader.allow(timeout_s + answer.length / _MIN_BYTES_PER_S, idle_s=timeout_s)
        for target in targets:
            for first in range(0, len(target), _PIECE_BYTES):
                piece = target[first : first + _PIECE_BYTES]
                filled = 0
                while filled < len(piece):
                    count = answer.readinto(piece[filled:])
                    if count == 0:
                        raise RpcError(f"{self.url} closed the connection early.")
                    filled += count
                digest.update(piece)

    def _rejection(self, status: int, prepared: int) -> RpcError:
        """Return the error of a status that the peer has proved."""
        message = f"{self.url} does not serve this state: HTTP {status}."
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            return _NotReady(message, prepared)
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _OutOfRange(message)
        return RpcError(message)

    def _unproven(self, status: int) -> _Unproven:
        return _Unproven(
            f"{self.url} answers without a proof (HTTP {status}): it has another "
            "TORCHTITAN_LITE_TOKEN, which must be the same for all, or it is another server."
        )

    def _field(self, answer: http.client.HTTPResponse, name: str, pattern: re.Pattern[str]) -> str:
        """Return a field of an answer. Raises _Unproven."""
        try:
            return parse_field(f"{name} of {self.url}", answer.headers.get(name), pattern)[0]
        except RpcError:
            raise self._unproven(answer.status) from None

    def _open_session(self) -> None:
        """Prove to the peer, and let it prove, that it has the secret. Raises RpcError."""
        answer = self._answer(SESSION_PATH, {NONCE: self._session.nonce.hex()})
        if answer.length != 0:
            raise self._unproven(answer.status)
        answer.read()
        ticket, proof = (
            self._field(answer, TICKET, fields.TICKET),
            self._field(answer, PROOF, fields.MAC),
        )
        try:
            self._session.open(bytes.fromhex(ticket), bytes.fromhex(proof))
        except AuthenticationError:
            raise self._unproven(answer.status) from None

    def close(self) -> None:
        self._http.close()
