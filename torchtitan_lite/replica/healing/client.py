"""Receives the state of a peer into this rank's live tensors. Layer: above server.

Invariant: nothing is written before the whole is known to fit; when it raises after that, the
state is torn, and its owner must not use it.
"""

import http.client
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import torch
import xxhash

from torchtitan_lite import rng
from torchtitan_lite.checkpoint.inventory import local_parts, put_back
from torchtitan_lite.checkpoint.tensor_bytes import bytes_of
from torchtitan_lite.errors import ReplicaError
from torchtitan_lite.replica.healing.live_state import Run, parse_header, places
from torchtitan_lite.replica.healing.server import CHECKSUM

_CHUNK_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20
_POLL_S = 0.01
_MOST_HEADER_BYTES = 256 << 20


@dataclass(frozen=True)
class Link:
    """How a peer is reached."""

    url: str
    token: str
    timeout_s: float
    connections: int


def receive(link: Link, progress: int, run: Run) -> None:
    """Give `run` the state that a peer has at `progress`. Raises ReplicaError; where that happens
    after it has begun to write, the error says that the state is `torn`."""
    first = _Connection(link, progress)
    try:
        length = bytearray(8)
        first.fetch_when_there(0, [memoryview(length)])
        size = int.from_bytes(length, "little")
        if not 0 < size <= _MOST_HEADER_BYTES:
            raise ReplicaError(f"A header of {size} bytes from {link.url} is no state.")
        content = bytearray(size)
        first.fetch(8, [memoryview(content)])
        entries, about = parse_header(bytes(content))
        _allocate(run, about["shapes"])
        tensors = run.tensors()
        parts = local_parts(tensors)
        targets = {name: _on_cpu(part) for name, part in parts.items()}
        try:
            wanted = places(entries, targets)
        except ValueError as error:
            raise Misfit(
                f"The state of another replica does not fit this one: {error} All replicas need "
                "the same config and the same number of ranks."
            ) from None
        chunks = _chunks([(8 + size + start, bytes_of(targets[name])) for name, start, _ in wanted])
        try:
            _fetch_all(link, progress, chunks)
            for name, target in targets.items():
                if target is not parts[name]:
                    parts[name].copy_(target)
            put_back(tensors, parts)
            run.load_values(about["values"])
            rng.restore(about["rng"])
        except Exception as error:
            raise TornState(f"{error}") from error
    finally:
        first.close()


class Misfit(ReplicaError):
    """What the peer has is not for this replica, now or later."""


class _NotYet(ReplicaError):
    """The peer has nothing to give at the moment."""


class TornState(ReplicaError):
    """The state was received in part."""


_ERRORS: dict[int, type[ReplicaError]] = {
    HTTPStatus.SERVICE_UNAVAILABLE: _NotYet,
    HTTPStatus.UNAUTHORIZED: Misfit,
}


def _allocate(run: Run, shapes: dict[str, Any]) -> None:
    """Make the tensors that come into being with a step. Raises Misfit."""
    try:
        run.allocate({name: tuple(map(int, shape)) for name, shape in shapes.items()})
    except (TypeError, ValueError, RuntimeError) as error:
        raise Misfit(
            f"The state of another replica does not fit this one: {error!r:.300}"
        ) from None


@dataclass(frozen=True)
class _Chunk:
    """Bytes that follow each other in the file, and where they go."""

    start: int
    targets: Sequence[memoryview]


def _chunks(targets: Sequence[tuple[int, memoryview]]) -> list[_Chunk]:
    """Chunks of about the same size: small tensors together, large ones in pieces."""
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


def _fetch_all(link: Link, progress: int, chunks: Sequence[_Chunk]) -> None:
    """By several connections, each of which takes the next chunk when it has one."""
    left = iter(chunks)

    def work() -> None:
        connection = _Connection(link, progress)
        try:
            # Taking from an iterator is one step of the interpreter.
            for chunk in left:
                connection.fetch(chunk.start, chunk.targets)
        finally:
            connection.close()

    count = min(link.connections, len(chunks))
    with ThreadPoolExecutor(max(1, count), "healing") as pool:
        for future in [pool.submit(work) for _ in range(count)]:
            future.result()


class _Connection:
    """To one peer, for one state."""

    def __init__(self, link: Link, progress: int) -> None:
        parts = urlsplit(link.url)
        assert parts.hostname is not None
        self._link, self._path = link, f"/state/{progress}"
        self._http = http.client.HTTPConnection(parts.hostname, parts.port, timeout=link.timeout_s)

    def fetch_when_there(self, start: int, targets: Sequence[memoryview]) -> None:
        """The same, as soon as the peer has it."""
        deadline = time.monotonic() + self._link.timeout_s
        while True:
            try:
                self.fetch(start, targets)
                return
            except _NotYet:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_S)

    def fetch(self, start: int, targets: Sequence[memoryview]) -> None:
        """Fill `targets` with what begins at `start`. Raises ReplicaError."""
        length = sum(map(len, targets))
        headers = {
            "Authorization": f"Bearer {self._link.token}",
            "Range": f"bytes={start}-{start + length - 1}",
        }
        try:
            self._http.request("GET", self._path, headers=headers)
            answer = self._http.getresponse()
            if answer.status != HTTPStatus.PARTIAL_CONTENT or answer.length != length:
                answer.read()
                kind = _ERRORS.get(answer.status, ReplicaError)
                raise kind(_refused(answer.status, self._link.url))
            digest = xxhash.xxh3_64()
            for target in targets:
                for first in range(0, len(target), _PIECE_BYTES):
                    piece = target[first : first + _PIECE_BYTES]
                    filled = 0
                    while filled < len(piece):
                        count = answer.readinto(piece[filled:])
                        if count == 0:
                            raise ReplicaError(f"{self._link.url} broke off.")
                        filled += count
                    digest.update(piece)
        except (OSError, http.client.HTTPException) as error:
            raise ReplicaError(f"{self._link.url} cannot be read: {error!r}") from error
        if digest.hexdigest() != answer.headers.get(CHECKSUM):
            raise ReplicaError(f"What came from {self._link.url} is not what was sent.")

    def close(self) -> None:
        self._http.close()


def _refused(status: int, url: str) -> str:
    if status == HTTPStatus.UNAUTHORIZED:
        return f"{url} knows another TORCHTITAN_LITE_TOKEN: it must be the same for all replicas."
    return f"{url} does not give this state (any more): HTTP {status}."


def _on_cpu(part: torch.Tensor) -> torch.Tensor:
    """Where it can be received: its own memory on the CPU, and other memory beside a device."""
    return part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
