"""Client that receives a peer's state into this rank's live tensors. Layer: above transport.

Invariant: nothing is modified before the whole state is known to fit. After a later error the state
is torn and must not be used.
"""

import hmac
import http.client
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import torch

from torchtitan_lite import rng
from torchtitan_lite.checkpoint import copy_back, local_tensors, tensor_bytes
from torchtitan_lite.errors import ReplicaError
from torchtitan_lite.replica.healing.live_state import HealableState, parse_header, tensor_ranges
from torchtitan_lite.replica.healing.transport import (
    MAC,
    NONCE,
    PROOF,
    PURPOSE,
    SESSION_PATH,
    TICKET,
)
from torchtitan_lite.rpc.authentication import AuthenticationError, ClientSession

_CHUNK_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20
_POLL_S = 0.01
_MAX_HEADER_BYTES = 256 << 20


@dataclass(frozen=True)
class PeerEndpoint:
    """URL, secret and limits of a connection to a peer."""

    url: str
    secret: str
    timeout_s: float
    connections: int


def receive_state(endpoint: PeerEndpoint, progress: int, run: HealableState) -> None:
    """Receive the state that a peer has at `progress` into `run`. Raises ReplicaError; TornState
    after the state was modified."""
    first = _Connection(endpoint, progress)
    try:
        length = bytearray(8)
        first.fetch_when_ready(0, [memoryview(length)])
        size = int.from_bytes(length, "little")
        if not 0 < size <= _MAX_HEADER_BYTES:
            raise ReplicaError(f"{endpoint.url} sent an invalid header of {size} bytes.")
        content = bytearray(size)
        first.fetch(8, [memoryview(content)])
        entries, about = parse_header(bytes(content))
        _allocate(run, about["shapes"])
        tensors = run.tensors()
        parts = local_tensors(tensors)
        targets = {name: _receive_buffer(part) for name, part in parts.items()}
        try:
            wanted = tensor_ranges(entries, targets)
        except ValueError as error:
            raise IncompatibleState(
                f"The state of another replica does not fit this one: {error} All replicas need "
                "the same config and the same number of ranks."
            ) from None
        chunks = _chunks(
            [(8 + size + start, tensor_bytes(targets[name])) for name, start, _ in wanted]
        )
        try:
            _fetch_all(endpoint, progress, chunks)
            for name, target in targets.items():
                if target is not parts[name]:
                    parts[name].copy_(target)
            copy_back(tensors, parts)
            run.load_values(about["values"])
            rng.restore(about["rng"])
        except Exception as error:
            raise TornState(f"{error}") from error
    finally:
        first.close()


class IncompatibleState(ReplicaError):
    """State that does not fit this replica, now or later."""


class _NotReady(ReplicaError):
    """State that the peer does not serve yet."""


class TornState(ReplicaError):
    """Partially received state."""


def _allocate(run: HealableState, shapes: dict[str, Any]) -> None:
    """Allocate the tensors that only exist after the first step. Raises IncompatibleState."""
    try:
        run.allocate({name: tuple(map(int, shape)) for name, shape in shapes.items()})
    except (TypeError, ValueError, RuntimeError) as error:
        raise IncompatibleState(
            f"The state of another replica does not fit this one: {error!r:.300}"
        ) from None


@dataclass(frozen=True)
class _Chunk:
    """Contiguous bytes of the file, and the memory that receives them."""

    start: int
    targets: Sequence[memoryview]


def _chunks(targets: Sequence[tuple[int, memoryview]]) -> list[_Chunk]:
    """Split `targets` into chunks of similar size: small tensors together, large ones in pieces."""
    chunks: list[_Chunk] = []
    start, size, views = 0, 0, []
    for position, view in targets:
        for first in range(0, len(view), _CHUNK_BYTES):
            piece = view[first : first + _CHUNK_BYTES]
            if views and size + len(piece) > _CHUNK_BYTES:
                chunks.append(_Chunk(start, views))
                size, views = 0, []
            if not views:
                start = position + first
            views.append(piece)
            size += len(piece)
    return [*chunks, _Chunk(start, views)] if views else chunks


def _fetch_all(endpoint: PeerEndpoint, progress: int, chunks: Sequence[_Chunk]) -> None:
    """Fetch chunks over several connections, each of which takes the next chunk when it is free."""
    left = iter(chunks)

    def work() -> None:
        connection = _Connection(endpoint, progress)
        try:
            # `next` on an iterator is atomic under the GIL.
            for chunk in left:
                connection.fetch(chunk.start, chunk.targets)
        finally:
            connection.close()

    count = min(endpoint.connections, len(chunks))
    with ThreadPoolExecutor(max(1, count), "healing") as pool:
        for future in [pool.submit(work) for _ in range(count)]:
            future.result()


class _Connection:
    """Connection to one peer, for one state."""

    def __init__(self, endpoint: PeerEndpoint, progress: int) -> None:
        parts = urlsplit(endpoint.url)
        assert parts.hostname is not None
        self._endpoint, self._path = endpoint, f"/state/{progress}"
        self._http = http.client.HTTPConnection(
            parts.hostname, parts.port, timeout=endpoint.timeout_s
        )
        self._session = ClientSession(endpoint.secret, PURPOSE)

    def fetch_when_ready(self, start: int, targets: Sequence[memoryview]) -> None:
        """Fetch as `fetch` does, as soon as the peer serves the state."""
        deadline = time.monotonic() + self._endpoint.timeout_s
        while True:
            try:
                self.fetch(start, targets)
                return
            except _NotReady:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_S)

    def fetch(self, start: int, targets: Sequence[memoryview]) -> None:
        """Fill `targets` with the bytes from `start` on. Raises ReplicaError."""
        length = sum(map(len, targets))
        span = f"bytes={start}-{start + length - 1}"
        try:
            if not self._session.is_open:
                self._open_session()
            proof = self._session.sign(self._path.encode(), span.encode())
            headers = {"Authorization": str(proof), "Range": span}
            self._http.request("GET", self._path, headers=headers)
            answer = self._http.getresponse()
            if answer.status != HTTPStatus.PARTIAL_CONTENT or answer.length != length:
                answer.read()
                is_late = answer.status == HTTPStatus.SERVICE_UNAVAILABLE
                kind = _NotReady if is_late else ReplicaError
                raise kind(_rejection_message(answer.status, self._endpoint.url))
            digest = self._session.response_digest(proof)
            for target in targets:
                for first in range(0, len(target), _PIECE_BYTES):
                    piece = target[first : first + _PIECE_BYTES]
                    filled = 0
                    while filled < len(piece):
                        count = answer.readinto(piece[filled:])
                        if count == 0:
                            raise ReplicaError(f"{self._endpoint.url} closed the connection early.")
                        filled += count
                    digest.update(piece)
        except (OSError, http.client.HTTPException) as error:
            raise ReplicaError(f"{self._endpoint.url} cannot be read: {error!r}") from error
        if not hmac.compare_digest(digest.hexdigest(), answer.headers.get(MAC) or ""):
            raise ReplicaError(f"The data from {self._endpoint.url} do not match their MAC.")

    def _open_session(self) -> None:
        """Prove to the peer, and let it prove, that it has the secret. Raises ReplicaError."""
        self._http.request("GET", SESSION_PATH, headers={NONCE: self._session.nonce.hex()})
        answer = self._http.getresponse()
        answer.read()
        try:
            ticket, proof = (bytes.fromhex(answer.headers.get(n) or "") for n in (TICKET, PROOF))
            self._session.open(ticket, proof)
        except (AuthenticationError, ValueError):
            raise ReplicaError(
                _rejection_message(HTTPStatus.UNAUTHORIZED, self._endpoint.url)
            ) from None

    def close(self) -> None:
        self._http.close()


def _rejection_message(status: int, url: str) -> str:
    if status == HTTPStatus.UNAUTHORIZED:
        return f"{url} has another TORCHTITAN_LITE_TOKEN: it must be the same for all replicas."
    return f"{url} does not serve this state: HTTP {status}."


def _receive_buffer(part: torch.Tensor) -> torch.Tensor:
    """Return memory that can receive `part`: its own on the CPU, a CPU copy for another device."""
    return part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
