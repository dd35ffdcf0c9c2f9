"""One rank's safetensors file: its header, and the bytes of its boxes without a gap.

The header is padded so that the data begins at a multiple of 4096. From a pool (a slot of a
region, whose boxes lie page by page) the bytes go to the file by direct I/O: long runs straight
from the pool where pool and file agree on the place in a page, the rest, as all other memory,
through an aligned buffer.

Invariant: when `write_part` returns, the file is durable, but for its name. Layer: above files.
"""

import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from torchtitan_lite.checkpoint.storage.files import Files, has_no_direct_io
from torchtitan_lite.checkpoint.storage.rate import TokenBucket

_PAGE = 4096
_BOUNCE_BYTES = 8 << 20
_CHUNK_BYTES = 32 << 20
# A shorter run is cheaper to copy than to write by itself.
_LONG_RUN_BYTES = 1 << 20


@dataclass(frozen=True)
class PartBox:
    """One tensor of the file: a box of a larger one, with the bytes that hold it."""

    name: str
    dtype: str
    """As safetensors names it: F32, BF16, ..."""
    size: tuple[int, ...]
    start: int
    """First byte in the pool; nothing otherwise."""
    bytes: int


@dataclass(frozen=True)
class Written:
    """Where a box lies in the file, and the checksum of its bytes."""

    first: int
    end: int
    xxh3: str


Content = Callable[[], Iterable[Iterable[memoryview]]]
"""Makes the bytes of each box, piece by piece; anew each time it is called. A piece that was given
is not changed any more."""


class Abandoned(Exception):
    """What a tick raises to end a write that is not wanted any more."""


def nothing() -> None:
    """The tick of who has nothing else to do."""


def write_part(
    files: Files,
    path: Path,
    boxes: Sequence[PartBox],
    source: memoryview | list[memoryview],
    *,
    direct: bool = True,
    rate: TokenBucket | None = None,
    tick: Callable[[], None] = nothing,
    metadata: Mapping[str, str] | None = None,
) -> list[Written]:
    """Write `path` and return, box by box, where it lies in the file.

    `source` is a pool, in which `PartBox.start` gives the places, or one buffer per box. A pool
    begins at a multiple of 4096 in memory; `direct` uses O_DIRECT where the filesystem has it.
    `tick` is called between chunks of at most 32 MiB, and ends the write by raising. Raises OSError
    when the file cannot be written; then it is removed.
    """
    names = names_in_file(boxes)
    header = header_of(names, boxes, metadata)
    views = [bytes_of(source, i, box) for i, box in enumerate(boxes)]
    digests = []
    for view in views:
        digests.append(xxhash.xxh3_64_hexdigest(view))
        tick()
    rate = rate or TokenBucket(None)
    length = len(header) + sum(box.bytes for box in boxes)
    try:
        runs = (
            _runs(source, boxes) if isinstance(source, memoryview) else [(None, v) for v in views]
        )
        if not (direct and _write_direct(files, path, header, runs, length, rate, tick)):
            _write_buffered(files, path, header, [view for _, view in runs], rate, tick)
    except BaseException:
        _remove(files, path)
        raise
    return places(header, boxes, digests)


def write_stream(
    files: Files,
    path: Path,
    boxes: Sequence[PartBox],
    content: Content,
    *,
    tick: Callable[[], None] = nothing,
    metadata: Mapping[str, str] | None = None,
) -> list[Written]:
    """As `write_part`, of bytes that are made while they are written, so that only a piece of them
    is in memory at a time. Raises ValueError where a box gets more or fewer bytes than it says."""
    header = header_of(names_in_file(boxes), boxes, metadata)
    length = len(header) + sum(box.bytes for box in boxes)
    digests: list[str] = []
    rate = TokenBucket(None)

    def pieces() -> Iterator[memoryview]:
        digests.clear()
        yield from digested(boxes, content(), digests)

    try:
        runs = ((None, piece) for piece in pieces())
        if not _write_direct(files, path, header, runs, length, rate, tick):
            _write_buffered(files, path, header, pieces(), rate, tick)
    except BaseException:
        _remove(files, path)
        raise
    return places(header, boxes, digests)


def digested(
    boxes: Sequence[PartBox], content: Iterable[Iterable[memoryview]], digests: list[str]
) -> Iterator[memoryview]:
    """The pieces of all boxes, whose checksums are added to `digests` as they come. Raises
    ValueError as `write_stream` does."""
    for box, pieces in zip(boxes, content, strict=True):
        digest, size = xxhash.xxh3_64(), 0
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            yield piece
        if size != box.bytes:
            raise ValueError(f"{box.name} has {size} bytes, but {box.bytes} were announced.")
        digests.append(digest.hexdigest())


def places(header: bytes, boxes: Sequence[PartBox], digests: Sequence[str]) -> list[Written]:
    """Where the boxes of a file lie."""
    written, position = [], len(header)
    for box, digest in zip(boxes, digests, strict=True):
        written.append(Written(position, position + box.bytes, digest))
        position += box.bytes
    return written


def header_of(
    names: Sequence[str], boxes: Sequence[PartBox], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The beginning of the file, up to the data, at a multiple of 4096 bytes."""
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


def names_in_file(boxes: Iterable[PartBox]) -> list[str]:
    """The names in the file: a second box of the same tensor is called NAME#2."""
    count: dict[str, int] = {}
    names = []
    for box in boxes:
        count[box.name] = count.get(box.name, 0) + 1
        names.append(box.name if count[box.name] == 1 else f"{box.name}#{count[box.name]}")
    return names


def bytes_of(source: memoryview | list[memoryview], index: int, box: PartBox) -> memoryview:
    """The bytes of a box. Raises ValueError when there are more or fewer than it says."""
    if isinstance(source, memoryview):
        view = source[box.start : box.start + box.bytes]
    else:
        view = memoryview(source[index])
        view = view.cast("B") if view.nbytes else memoryview(b"")
    if view.nbytes != box.bytes:
        raise ValueError(f"{box.name} has {view.nbytes} bytes, but {box.bytes} were announced.")
    return view


def _runs(pool: memoryview, boxes: Sequence[PartBox]) -> list[tuple[int | None, memoryview]]:
    """(first byte in the pool, bytes), with boxes joined that follow each other in the pool."""
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
    runs: Iterable[tuple[int | None, memoryview]],
    length: int,
    rate: TokenBucket,
    tick: Callable[[], None],
) -> bool:
    """Write by direct I/O; False, and nothing left, when the filesystem has none."""
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
        # Some filesystems take the flag and refuse the write.
        if has_no_direct_io(error):
            return False
        raise
    finally:
        stream.close()
        files.close(descriptor)
    return True


class _DirectStream:
    """Bytes for a file opened with O_DIRECT, in order, of which only aligned pages may go."""

    def __init__(
        self, files: Files, descriptor: int, rate: TokenBucket, tick: Callable[[], None]
    ) -> None:
        self._files, self._descriptor, self._rate, self._tick = files, descriptor, rate, tick
        self._buffer = mmap.mmap(-1, _BOUNCE_BYTES)
        self._bounce = memoryview(self._buffer)
        self._filled = 0
        self._position = 0
        """In the file, of the buffer's first byte; always a multiple of a page."""

    def write(self, start: int | None, view: memoryview) -> None:
        """Append bytes that lie at `start` of a pool, or anywhere."""
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
        """Write what is left, up to the end of its page."""
        padding = -self._filled % _PAGE
        self._bounce[self._filled : self._filled + padding] = bytes(padding)
        self._filled += padding
        self._flush()

    def close(self) -> None:
        """Give the buffer back; when a write failed, with the last view of it."""
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


def _remove(files: Files, path: Path) -> None:
    try:
        files.unlink(path)
    except OSError:
        # What counts is the error that led here; leavings are removed with their folder.
        return
