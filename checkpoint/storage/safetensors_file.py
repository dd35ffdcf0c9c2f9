"""Writing of one rank's safetensors file: a header, and the bytes of its boxes without gaps.

The header is padded so that the data begins at a multiple of 4096. Bytes from a pool (a slot of a
region) are written by direct I/O: long runs directly from the pool where pool and file have equal
offsets within a page, everything else through an aligned buffer.

Invariant: when `write_safetensors` returns, the content of the file is durable; its name is not
yet.
"""

import json
import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from torchtitan_lite.checkpoint.storage.files import Files, has_no_direct_io

_PAGE = 4096
_BOUNCE_BYTES = 8 << 20
_CHUNK_BYTES = 32 << 20
_STREAM_BYTES = 16 << 20
# Copying a shorter run is cheaper than writing it separately.
_LONG_RUN_BYTES = 1 << 20
Content = Callable[[], Iterable[Iterable[memoryview]]]
"""Returns the bytes of each box in chunks, from the start at each call. Chunks must not change once
yielded."""
Source = memoryview | list[memoryview] | Content
"""The bytes of boxes: a pool, in which `PartBox.start` is the offset, one buffer per box, or bytes
that are generated on the fly, one chunk in memory at a time."""
_Run = tuple[int | None, memoryview]
"""Consecutive bytes of the file, and their offset if they are from a pool."""
_SLICE_S = 0.05
_BURST_S = 0.25


@dataclass(frozen=True)
class PartBox:
    """One tensor of the file: a box of a larger tensor, and its bytes."""

    name: str
    dtype: str
    """Safetensors name: F32, BF16, ..."""
    size: tuple[int, ...]
    start: int
    """First byte in the pool; unused otherwise."""
    bytes: int


@dataclass(frozen=True)
class BoxLocation:
    """Location of a box in the file, and its checksum."""

    first: int
    end: int
    xxh3: str


def no_tick() -> None:
    """Do nothing between chunks."""


class TokenBucket:
    """Rate limit of `bytes_per_s` on average, with bursts of 0.25 s; None disables it."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._balance = 0.0
        self._last = time.monotonic()

    def spend(self, num_bytes: int, tick: Callable[[], None]) -> None:
        """Account for written bytes, and sleep until the rate allows more. `tick` is called between
        short sleeps; it may lift the limit, or raise to stop."""
        self._refill()
        self._balance -= num_bytes
        while self.bytes_per_s is not None and self._balance < 0:
            tick()
            if self.bytes_per_s is None:
                break
            time.sleep(min(_SLICE_S, -self._balance / self.bytes_per_s))
            self._refill()

    def _refill(self) -> None:
        now = time.monotonic()
        if self.bytes_per_s is None:
            self._balance = 0.0
        else:
            most = self.bytes_per_s * _BURST_S
            earned = (now - self._last) * self.bytes_per_s
            self._balance = min(most, self._balance + earned)
        self._last = now


def write_safetensors(
    files: Files,
    path: Path,
    boxes: Sequence[PartBox],
    source: Source,
    *,
    direct: bool = True,
    rate: TokenBucket | None = None,
    tick: Callable[[], None] = no_tick,
    metadata: Mapping[str, str] | None = None,
) -> list[BoxLocation]:
    """Write `path` and return the location of each box.

    A pool must be aligned to 4096; `direct` uses O_DIRECT if the filesystem supports it. `tick` is
    called between chunks of at most 32 MiB and stops the write by raising. Raises OSError, and
    removes the file, if it cannot be written, and ValueError if a box has more or fewer bytes than
    announced.
    """
    header = safetensors_header(tensor_names(boxes), boxes, metadata)
    length = len(header) + sum(box.bytes for box in boxes)
    rate = rate or TokenBucket(None)
    digests: list[str] = []
    runs = _runs(source, boxes, digests, tick)
    try:
        if not (direct and _write_direct(files, path, header, runs(), length, rate, tick)):
            _write_buffered(files, path, header, (view for _, view in runs()), rate, tick)
    except BaseException:
        _remove(files, path)
        raise
    return box_locations(header, boxes, digests)


def checksummed(
    boxes: Sequence[PartBox], content: Iterable[Iterable[memoryview]], digests: list[str]
) -> Iterator[memoryview]:
    """Yield the chunks of all boxes, appending each box's checksum to `digests`. Raises ValueError
    as `write_safetensors` does."""
    for box, pieces in zip(boxes, content, strict=True):
        digest, size = xxhash.xxh3_64(), 0
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            yield piece
        if size != box.bytes:
            raise ValueError(f"{box.name} has {size} bytes, but {box.bytes} were announced.")
        digests.append(digest.hexdigest())


def box_locations(
    header: bytes, boxes: Sequence[PartBox], digests: Sequence[str]
) -> list[BoxLocation]:
    """Return the location of each box."""
    written, position = [], len(header)
    for box, digest in zip(boxes, digests, strict=True):
        written.append(BoxLocation(position, position + box.bytes, digest))
        position += box.bytes
    return written


def safetensors_header(
    names: Sequence[str], boxes: Sequence[PartBox], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the file's header, padded to a multiple of 4096 bytes."""
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name, box in zip(names, boxes, strict=True):
        end = position + box.bytes
        entries[name] = {
            "dtype": box.dtype,
            "shape": list(box.size),
            "data_offsets": [position, end],
        }
        position = end
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % _PAGE)
    return len(encoded).to_bytes(8, "little") + encoded


def tensor_names(boxes: Iterable[PartBox]) -> list[str]:
    """Return the names in the file: a second box of a tensor is named NAME#2."""
    count: dict[str, int] = {}
    names = []
    for box in boxes:
        count[box.name] = count.get(box.name, 0) + 1
        names.append(box.name if count[box.name] == 1 else f"{box.name}#{count[box.name]}")
    return names


def box_bytes(source: memoryview | list[memoryview], index: int, box: PartBox) -> memoryview:
    """Return the bytes of a box. Raises ValueError if their number differs from the announced
    one."""
    if isinstance(source, memoryview):
        view = source[box.start : box.start + box.bytes]
    else:
        view = memoryview(source[index])
        view = view.cast("B") if view.nbytes else memoryview(b"")
    if view.nbytes != box.bytes:
        raise ValueError(f"{box.name} has {view.nbytes} bytes, but {box.bytes} were announced.")
    return view


def box_chunks(source: Source, boxes: Sequence[PartBox]) -> Iterable[Iterable[memoryview]]:
    """Return the bytes of each box in chunks, for `checksummed`: what a storage that streams needs.
    Raises ValueError as `box_bytes` does."""
    if callable(source):
        return source()
    return (chunks(box_bytes(source, index, box)) for index, box in enumerate(boxes))


def chunks(view: memoryview) -> Iterator[memoryview]:
    """Yield `view` in chunks of at most 16 MiB."""
    for first in range(0, len(view), _STREAM_BYTES):
        yield view[first : first + _STREAM_BYTES]


class _DirectStream:
    """Sequential writer for a file opened with O_DIRECT, which accepts aligned pages only."""

    def __init__(
        self, files: Files, descriptor: int, rate: TokenBucket, tick: Callable[[], None]
    ) -> None:
        self._files, self._descriptor, self._rate, self._tick = files, descriptor, rate, tick
        self._buffer = mmap.mmap(-1, _BOUNCE_BYTES)
        self._bounce = memoryview(self._buffer)
        self._filled = 0
        self._position = 0
        """File offset of the buffer's first byte; always page-aligned."""

    def write(self, start: int | None, view: memoryview) -> None:
        """Append bytes; `start` is their offset in a pool, or None."""
        if start is None:
            self.copy(view)
            return
        lead = -start % _PAGE
        if (self._position + self._filled + lead) % _PAGE or len(view) - lead < _LONG_RUN_BYTES:
            self.copy(view)
            return
        self.copy(view[:lead])
        self._flush()
        end = lead + (len(view) - lead) // _PAGE * _PAGE
        for first in range(lead, end, _CHUNK_BYTES):
            self._put(view[first : min(first + _CHUNK_BYTES, end)])
        self.copy(view[end:])

    def copy(self, view: memoryview) -> None:
        """Append bytes through the buffer."""
        while len(view):
            room = min(len(view), _BOUNCE_BYTES - self._filled)
            self._bounce[self._filled : self._filled + room] = view[:room]
            self._filled += room
            view = view[room:]
            if self._filled == _BOUNCE_BYTES:
                self._flush()

    def finish(self) -> None:
        """Write the rest, padded to a whole page."""
        padding = -self._filled % _PAGE
        self._bounce[self._filled : self._filled + padding] = bytes(padding)
        self._filled += padding
        self._flush()

    def close(self) -> None:
        """Release the buffer; after a failed write, with its last view."""
        with suppress(BufferError):
            self._bounce.release()
            self._buffer.close()

    def _flush(self) -> None:
        if self._filled:
            content, self._filled = self._bounce[: self._filled], 0
            with content:
                self._put(content)

    def _put(self, view: memoryview) -> None:
        self._files.pwrite(self._descriptor, view, self._position)
        self._position += len(view)
        self._rate.spend(len(view), self._tick)
        self._tick()


def _runs(
    source: Source, boxes: Sequence[PartBox], digests: list[str], tick: Callable[[], None]
) -> Callable[[], Iterable[_Run]]:
    """Return a function that returns the data from the start at each call; `digests` receives the
    checksums of the boxes."""
    if callable(source):
        content = source

        def stream() -> Iterator[_Run]:
            digests.clear()
            for piece in checksummed(boxes, content(), digests):
                yield None, piece

        return stream
    views = [box_bytes(source, i, box) for i, box in enumerate(boxes)]
    for view in views:
        digests.append(xxhash.xxh3_64_hexdigest(view))
        tick()
    runs = _joined(source, boxes) if isinstance(source, memoryview) else [(None, v) for v in views]
    return lambda: runs


def _joined(pool: memoryview, boxes: Sequence[PartBox]) -> list[_Run]:
    """Return the runs of a pool, joining adjacent boxes."""
    joined: list[list[int]] = []
    for box in boxes:
        if box.bytes == 0:
            continue
        if joined and joined[-1][1] == box.start:
            joined[-1][1] += box.bytes
        else:
            joined.append([box.start, box.start + box.bytes])
    return [(first, pool[first:end]) for first, end in joined]


def _write_buffered(
    files: Files,
    path: Path,
    header: bytes,
    buffers: Iterable[memoryview],
    rate: TokenBucket,
    tick: Callable[[], None],
) -> None:
    descriptor = files.create(path)
    try:
        position, batch, size = 0, [memoryview(header)], len(header)
        for buffer in buffers:
            for first in range(0, len(buffer), _CHUNK_BYTES):
                chunk = buffer[first : first + _CHUNK_BYTES]
                if size + len(chunk) > _CHUNK_BYTES:
                    files.pwritev(descriptor, batch, position)
                    position += size
                    rate.spend(size, tick)
                    tick()
                    batch, size = [], 0
                batch.append(chunk)
                size += len(chunk)
        files.pwritev(descriptor, batch, position)
        rate.spend(size, tick)
        tick()
        files.fsync(descriptor)
    finally:
        files.close(descriptor)


def _write_direct(
    files: Files,
    path: Path,
    header: bytes,
    runs: Iterable[_Run],
    length: int,
    rate: TokenBucket,
    tick: Callable[[], None],
) -> bool:
    """Write by direct I/O; False, with nothing left, if the filesystem does not support it."""
    try:
        descriptor = files.create(path, direct=True)
    except OSError as error:
        if has_no_direct_io(error):
            _remove(files, path)
            return False
        raise
    stream = _DirectStream(files, descriptor, rate, tick)
    try:
        stream.copy(memoryview(header))
        for start, view in runs:
            stream.write(start, view)
        stream.finish()
        files.truncate(descriptor, length)
        files.fsync(descriptor)
    except OSError as error:
        # Some filesystems accept the flag but reject the write.
        if has_no_direct_io(error):
            return False
        raise
    finally:
        stream.close()
        files.close(descriptor)
    return True


def _remove(files: Files, path: Path) -> None:
    try:
        files.unlink(path)
    except OSError:
        # The original error matters more; leftovers are removed with their folder.
        return
