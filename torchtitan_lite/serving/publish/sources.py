"""Published parts of ranks, in this machine's shared memory or at the ranks' servers.

Invariant: what a pinned version holds does not change, and is readable until it is released, or an
error says that it is gone. Nothing is unpickled.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch

from torchtitan_lite.checkpoint import DTYPES, tensor_bytes, tensor_from_bytes
from torchtitan_lite.checkpoint.shared_memory import (
    PUBLISHED,
    HeldTensor,
    RankLock,
    Region,
    RegionDescription,
    slot_lock_path,
)
from torchtitan_lite.core.errors import DamagedSnapshot, PublishError, RpcError
from torchtitan_lite.distributed.rpc.state_client import PeerEndpoint, StateConnection
from torchtitan_lite.distributed.rpc.state_server import MAX_RANGES, MAX_ROWS, ByteRows
from torchtitan_lite.serving.publish.deltas import Delta, DeltaLink, chain_from
from torchtitan_lite.serving.publish.pins import SlotLock

PURPOSE = "publish"
"""Purpose of the sessions."""
PUBLISHED_FILE = "published.json"
"""File in the output folder of a run that tells where it publishes."""
STATUS_VERSION, INDEX_VERSION = 1 << 59, (1 << 59) + 1
"""Under which ranks serve their status and their index. Versions are steps, from 0."""
_REQUEST_BYTES = 8 << 20
POLL_S = 0.002
"""Time between two looks into shared memory, or for a version of another rank."""
RETRY_S = 0.05
"""Longest time between two attempts."""
_ANNOUNCED_S = 1.0
"""Time between two looks at the announcement of a publisher that does not run here any more."""

Block = tuple[str, tuple[slice, ...]]
"""A block of a local tensor, by its name."""
Content = torch.Tensor | tuple[Delta, ...]
"""A block, or, oldest first, the deltas of its shard from the version that the subscriber holds."""


@dataclass(frozen=True, kw_only=True)
class Received:
    """Data that a subscriber has received from one rank."""

    contents: Sequence[Content]
    """Content of each wanted block."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """Content of the file in the output folder of a run that says where it publishes. Each start of
    the run replaces it, maybe on another machine."""

    folder: Path
    run_id: str
    generation_id: str
    url: str | None
    """URL of the first rank; None without servers."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file of a run. Raises OSError, KeyError and PublishError."""
        published = read_json((folder / PUBLISHED_FILE).read_bytes())
        run_id, generation_id = str(published["run_id"]), str(published["generation_id"])
        return cls(folder=folder, run_id=run_id, generation_id=generation_id, url=published["url"])

    def is_current(self) -> bool:
        """Return whether the run has not been started again, as far as known."""
        try:
            return Announcement.read(self.folder).generation_id == self.generation_id
        except (FileNotFoundError, KeyError, PublishError):
            return False
        except OSError:
            # Storage that fails does not end what is in memory.
            return True


class VersionGone(PublishError):
    """A version that its publisher has overwritten or withdrawn, or whose receipt was cancelled. A
    newer one exists or will."""


class PinnedPart(Protocol):
    """The part of a rank in one version, which does not change while it is pinned."""

    @property
    def digests(self) -> Mapping[str, str]:
        """Checksums of the local tensors, by name."""
        ...

    def receive(
        self, wanted: Sequence[Block], held: Mapping[str, str], is_cancelled: Callable[[], bool]
    ) -> Received:
        """Receive blocks of local tensors, which may share the publisher's memory; what comes from
        a server, which may die, is received completely. `held` are checksums of the shards, by
        name, of which the subscriber holds these blocks in an earlier version. Raises VersionGone,
        also if it is cancelled in between."""
        ...

    def release(self) -> None:
        """Let the publisher overwrite the version."""
        ...


class RankSource(Protocol):
    """The published versions of one rank."""

    is_remote: ClassVar[bool]
    """Whether versions are requested from a server."""
    description: RegionDescription

    def versions(self) -> list[int]:
        """Return the complete versions, as far as known without waiting."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Block until there may be other versions than `versions` has returned, at most
        `timeout_s`."""
        ...

    def pin(self, version: int) -> PinnedPart:
        """Keep a version. Raises VersionGone."""
        ...

    def is_current(self) -> bool:
        """Return whether the rank still publishes here: one that restarts replaces its region."""
        ...

    def close(self) -> None:
        """Close connections, and unmap memory."""
        ...


class _SharedPart:
    """A pinned part in shared memory."""

    def __init__(
        self, region: Region, slot: int, held: Mapping[str, HeldTensor], lock: SlotLock
    ) -> None:
        self._data, self._held, self._lock = region.data(slot), held, lock
        self.digests: Mapping[str, str] = region.values(slot)["digests"]

    def receive(
        self, wanted: Sequence[Block], held: Mapping[str, str], is_cancelled: Callable[[], bool]
    ) -> Received:
        contents: list[torch.Tensor] = []
        for name, block in wanted:
            shard = self._held[name]
            raw = self._data[shard.offset : shard.offset + shard.bytes]
            contents.append(tensor_from_bytes(raw, DTYPES[shard.dtype], shard.local_shape)[block])
        return Received(contents=contents, num_bytes=sum(block.nbytes for block in contents))

    def release(self) -> None:
        self._lock.release()


class SharedMemorySource:
    """The versions of a rank of this machine."""

    is_remote: ClassVar[bool] = False

    def __init__(self, path: Path, announcement: Announcement) -> None:
        """Open the region at `path`. Raises DamagedSnapshot and OSError."""
        self._path, self._inode = path, path.stat().st_ino
        self._announcement = announcement
        self._is_announced, self._announced_s = True, time.monotonic()
        # Opened writable only because tensors on read-only memory would be copies.
        self._region = region = Region.open(path, writable=True)
        self.description = RegionDescription.from_dict(
            region.description, slot_bytes=region.slot_bytes
        )
        self._held = {held.name: held for held in self.description.tensors}
        self._publisher = RankLock(path.parent, self.description.rank, PUBLISHED)

    def versions(self) -> list[int]:
        return list(self._region.complete_slots())

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, POLL_S if self.is_current() else RETRY_S))

    def pin(self, version: int) -> _SharedPart:
        slot = self._region.complete_slots().get(version)
        if slot is None:
            raise VersionGone(f"{self._path} does not hold version {version}.")
        path = slot_lock_path(self._path.parent, self.description.rank, slot)
        lock = SlotLock(path, exclusive=False)
        try:
            is_free = lock.try_acquire()
        except OSError as error:
            raise VersionGone(f"{self._path} is being removed: {error}") from None
        if not is_free:
            raise VersionGone(f"Version {version} in {self._path} is being overwritten.")
        try:
            # It may have been overwritten before it was locked.
            if self._region.complete_slots().get(version) != slot:
                raise VersionGone(f"{self._path} does not hold version {version} any more.")
            return _SharedPart(self._region, slot, self._held, lock)
        except (DamagedSnapshot, KeyError) as error:
            lock.release()
            raise VersionGone(f"{self._path}: {error!r}") from None
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Unmap the memory, once no tensor uses it."""
        self._region.close()

    def is_current(self) -> bool:
        try:
            if self._path.stat().st_ino != self._inode:
                return False
        except OSError:
            return False
        if time.monotonic() >= self._announced_s + _ANNOUNCED_S:
            self._announced_s = time.monotonic()
            # A run whose publisher was killed may publish on another machine now.
            is_alive = self._publisher.owner() is not None
            self._is_announced = is_alive or self._announcement.is_current()
        return self._is_announced


class _ServedPart:
    """A pinned part at a server."""

    def __init__(
        self, connection: StateConnection, version: int, description: RegionDescription
    ) -> None:
        """Read the header of a version. Raises RpcError and VersionGone."""
        self._connection, self._version = connection, version
        connection.select(version)
        header = connection.fetch_header()
        self._serial = connection.serial
        self._held = {held.name: held for held in description.tensors}
        self._data_start = 8 + len(header)
        about = read_json(header)
        if about.get("generation_id") != description.generation_id:
            raise VersionGone(f"Version {version} is of another start of the run.")
        self.digests: Mapping[str, str] = about["digests"]
        self._chains = _chains_from_json(about.get("deltas", {}))

    def receive(
        self, wanted: Sequence[Block], held: Mapping[str, str], is_cancelled: Callable[[], bool]
    ) -> Received:
        request = _Request()
        chains: dict[str, list[memoryview]] = {}
        for name, links in self._smaller_chains(wanted, held).items():
            chains[name] = [memoryview(bytearray(link.num_bytes)) for link in links]
            for link, into in zip(links, chains[name], strict=True):
                request.add([ByteRows(self._data_start + link.offset, len(into))], into)
        blocks: list[torch.Tensor] = []
        for name, block in wanted:
            if name in chains:
                continue
            shard = self._held[name]
            dtype = DTYPES[shard.dtype]
            blocks.append(
                torch.empty([dim_slice.stop - dim_slice.start for dim_slice in block], dtype=dtype)
            )
            if not blocks[-1].numel():
                continue
            first = self._data_start + shard.offset
            rows = block_rows(shard.local_shape, block, dtype.itemsize)
            moved = (row._replace(start=first + row.start) for row in rows)
            request.add(moved, tensor_bytes(blocks[-1]))
        self._fetch(request, is_cancelled)
        deltas = {name: self._decoded(name, chain) for name, chain in chains.items()}
        remaining = iter(blocks)
        contents = [deltas[name] if name in deltas else next(remaining) for name, _ in wanted]
        return Received(contents=contents, num_bytes=sum(map(len, request.targets)))

    def _smaller_chains(
        self, wanted: Sequence[Block], held: Mapping[str, str]
    ) -> dict[str, list[DeltaLink]]:
        """Return the deltas that lead from shards held to those of this version, oldest first, by
        name, where they are smaller than the wanted blocks of a shard."""
        num_bytes: dict[str, int] = defaultdict(int)
        for name, block in wanted:
            itemsize = DTYPES[self._held[name].dtype].itemsize
            num_bytes[name] += (
                prod(dim_slice.stop - dim_slice.start for dim_slice in block) * itemsize
            )
        chains: dict[str, list[DeltaLink]] = {}
        for name in self._chains.keys() & held.keys() & num_bytes.keys():
            chain = chain_from(held[name], self._chains[name])
            if chain and sum(link.num_bytes for link in chain) < num_bytes[name]:
                chains[name] = chain
        return chains

    def _decoded(self, name: str, chain: Sequence[memoryview]) -> tuple[Delta, ...]:
        shard = self._held[name]
        try:
            return tuple(Delta(raw, shard.local_shape, DTYPES[shard.dtype]) for raw in chain)
        except PublishError as error:
            raise PublishError(
                f"{self._connection.url} sent an invalid delta of {name}: {error}"
            ) from None

    def _fetch(self, request: "_Request", is_cancelled: Callable[[], bool]) -> None:
        """Fill the targets. Raises VersionGone."""
        rows, targets = request.rows, request.targets
        self._connection.select(self._version)
        try:
            for first, stop in _requests(rows):
                if is_cancelled():
                    raise VersionGone(f"Version {self._version} is not needed any more.")
                self._connection.fetch(rows[first:stop], targets[first:stop])
                if self._connection.serial != self._serial:
                    # A run that restarts may publish another version of this number.
                    raise VersionGone(f"Version {self._version} was replaced.")
        except RpcError as error:
            raise VersionGone(str(error)) from None

    def release(self) -> None:
        """The server keeps a version for a short time after each request."""


class ServerSource:
    """The versions of a rank that serves them."""

    is_remote: ClassVar[bool] = True

    def __init__(self, endpoint: PeerEndpoint, description: RegionDescription) -> None:
        self.description = description
        self._status = StateConnection(endpoint, STATUS_VERSION)
        self._data = StateConnection(endpoint, STATUS_VERSION)
        self._generation_id = description.generation_id

    def versions(self) -> list[int]:
        """Return the complete versions. Raises PublishError if the server does not answer."""
        status = read_served_header(self._status)
        self._generation_id = status.get("generation_id")
        return [int(version) for version in status.get("versions", ())]

    def wait(self, timeout_s: float) -> None:
        try:
            self._status.wait_for_change(timeout_s)
        except RpcError:
            # It is being restarted, or has ended.
            time.sleep(min(timeout_s, RETRY_S))

    def is_current(self) -> bool:
        return self._generation_id == self.description.generation_id

    def close(self) -> None:
        self._status.close()
        self._data.close()

    def pin(self, version: int) -> _ServedPart:
        try:
            return _ServedPart(self._data, version, self.description)
        except RpcError as error:
            raise VersionGone(str(error)) from None


def _chains_from_json(chains: Any) -> dict[str, list[DeltaLink]]:
    """Parse the deltas of a version, by name. Raises PublishError."""
    if not isinstance(chains, dict) or not all(
        isinstance(links, list) for links in chains.values()
    ):
        raise PublishError("A publisher describes deltas by something else than lists.")
    return {name: [DeltaLink.from_json(link) for link in links] for name, links in chains.items()}


def block_rows(shape: Sequence[int], block: Sequence[slice], itemsize: int) -> list[ByteRows]:
    """Return the rows of a block of a contiguous tensor of `shape`, as few as possible, in the
    order of the block."""
    sizes = [dim_slice.stop - dim_slice.start for dim_slice in block]
    strides = [prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    # A row spans the dims from `inner` on: all but the first of them are whole.
    inner = len(shape)
    while inner > 0 and (inner == len(shape) or sizes[inner] == shape[inner]):
        inner -= 1
    length = prod(sizes[inner:]) * itemsize
    first = sum(dim_slice.start * stride for dim_slice, stride in zip(block, strides, strict=True))
    if inner == 0:
        return [ByteRows(first, length)]
    outer = [0]
    for dim in range(inner - 1):
        outer = [base + index * strides[dim] for base in outer for index in range(sizes[dim])]
    count, stride = sizes[inner - 1], strides[inner - 1]
    return [ByteRows(first + base, length, count, stride) for base in outer]


class _Request:
    """Rows to fetch, and the memory that receives each."""

    def __init__(self) -> None:
        self.rows: list[ByteRows] = []
        self.targets: list[memoryview] = []

    def add(self, rows: Iterable[ByteRows], into: memoryview) -> None:
        """Add rows that fill `into`, in parts that fit into requests of the server."""
        start = 0
        for row in rows:
            for part in _in_requests(row):
                self.rows.append(part)
                self.targets.append(into[start : start + part.num_bytes])
                start += part.num_bytes


def _in_requests(rows: ByteRows) -> Iterator[ByteRows]:
    """Split rows into those of requests of at most 8 MiB and MAX_ROWS."""
    count = min(MAX_ROWS, max(1, _REQUEST_BYTES // max(1, rows.length)))
    for first in range(0, rows.num_rows, count):
        start = rows.start + first * rows.stride
        for at in range(0, rows.length, _REQUEST_BYTES):
            length = min(_REQUEST_BYTES, rows.length - at)
            yield ByteRows(start + at, length, min(count, rows.num_rows - first), rows.stride)


def _requests(rows: Sequence[ByteRows]) -> Iterator[tuple[int, int]]:
    """Yield [first, stop) of the rows of each request: at most 8 MiB together, MAX_RANGES and
    MAX_ROWS."""
    first = num_bytes = num_rows = 0
    for index, row in enumerate(rows):
        num_bytes, num_rows = num_bytes + row.num_bytes, num_rows + row.num_rows
        is_full = num_bytes > _REQUEST_BYTES or num_rows > MAX_ROWS
        if index > first and (is_full or index - first >= MAX_RANGES):
            yield first, index
            first, num_bytes, num_rows = index, row.num_bytes, row.num_rows
    if first < len(rows):
        yield first, len(rows)


def read_served_header(connection: StateConnection) -> Mapping[str, Any]:
    """Read the index of a server (descriptions and URLs of all ranks), or its status (generation
    and versions). Raises PublishError."""
    try:
        return read_json(connection.fetch_header())
    except RpcError as error:
        connection.close()
        raise PublishError(str(error)) from None


def read_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object from a publisher. Raises PublishError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PublishError(f"Invalid JSON from a publisher: {error}") from None
    if not isinstance(value, dict):
        raise PublishError("A publisher's JSON is not an object.")
    return value
