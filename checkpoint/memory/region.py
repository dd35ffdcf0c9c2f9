"""A rank's snapshots in shared memory: one tmpfs file that outlives the process that fills it.

The file, all of it in multiples of 4096 bytes: a superblock, the description (JSON), then per slot
a header and its values (JSON), then per slot its data. What a reader needs to judge a slot stands
in its header, which is written last and has a checksum.

Invariant: wherever its process is killed, each slot is either complete as its header says or
counts as empty, and no slot hides another. Memory is reserved before it is touched, so that a full
tmpfs is an error and no bus error. Stores are taken to be seen in the order in which they are made,
as on x86-64; elsewhere the order that a pipe gives must stand between writing and reading.
Layer: above room.
"""

import errno
import json
import mmap
import os
import secrets
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import xxhash

from torchtitan_lite.checkpoint.memory.room import ShortOfMemory, require_room
from torchtitan_lite.errors import DamagedSnapshot

ALIGNMENT = 4096
_MAGIC = b"TTLsnap\x00"
_VERSION = 1
_MAX_SLOTS = 64
_MAX_BYTES = 1 << 62
# magic, version, rank, slots, unused, slot bytes, values bytes, description bytes, file bytes,
# checksum of the description, token of this file
_SUPERBLOCK = struct.Struct("<8sIIIIQQQQQ16s")
_CONFIRMED_WORD = 2048 // 8
# state, unused, step, values bytes, checksum of the values
_HEADER = struct.Struct("<IIqQQ")
# step, digests bytes, checksum of the digests
_STAMP = struct.Struct("<qQQ")
_STAMP_OFFSET = 1024
_CHECKSUM = struct.Struct("<Q")


class State(IntEnum):
    """What a slot holds."""

    EMPTY = 0
    COPYING = 1
    COMPLETE = 2


@dataclass(frozen=True)
class SlotHeader:
    """The step that a slot holds, and whether it is complete; -1 for an empty slot."""

    step: int
    state: State


_EMPTY_SLOT = SlotHeader(-1, State.EMPTY)


class Region:
    """The snapshots of one rank. Made by the trainer, opened by the writer and by successors."""

    def __init__(self, path: Path, mapped: mmap.mmap, fields: tuple[Any, ...]) -> None:
        """For `create` and `open`."""
        self.path = path
        _, _, self.rank, self.num_slots, _, *sizes, self._description_sum, token = fields
        self.slot_bytes, self.values_bytes, self._description_bytes, self.file_bytes = sizes
        self.token: str = token.hex()
        """Differs for every region that was ever created."""
        self._map = mapped
        self.is_writable = not memoryview(mapped).readonly
        self._view = memoryview(mapped)
        self._words = self._view.cast("q")
        self._headers_start = ALIGNMENT + _padded(self._description_bytes)
        self._header_bytes = ALIGNMENT + _padded(self.values_bytes)
        self._data_start = self._headers_start + self.num_slots * self._header_bytes
        self.description: dict[str, Any] = {}

    @classmethod
    def create(
        cls,
        folder: Path,
        rank: int,
        description: dict[str, Any],
        slot_bytes: int,
        values_bytes: int = 1 << 20,
        num_slots: int = 3,
    ) -> "Region":
        """Reserve the memory of `rank` in `folder`, in place of what an earlier process left.

        `values_bytes` is the most that the values and the digests of a slot may take as JSON.
        Raises ShortOfMemory when the tmpfs, the machine or the cgroup has too little; nothing is
        left then.
        """
        if not 0 < num_slots <= _MAX_SLOTS or slot_bytes < 0 or values_bytes <= 0:
            raise ValueError(
                f"{num_slots} slots of {slot_bytes} and {values_bytes} bytes: needed are 1 to "
                f"{_MAX_SLOTS} slots, no negative data and some room for values."
            )
        encoded = json.dumps(description).encode()
        slot_bytes, values_bytes = _padded(slot_bytes), _padded(values_bytes)
        sizes = (slot_bytes, values_bytes, len(encoded))
        file_bytes = _file_bytes(num_slots, *sizes)
        path = folder / f"rank-{rank:05d}.snapshots"
        path.unlink(missing_ok=True)
        what = f"The snapshots of rank {rank} ({num_slots} slots of {slot_bytes / 2**20:.1f} MiB)"
        require_room(folder, file_bytes, what)
        mapped = _reserve(path, file_bytes, what)
        checksum = xxhash.xxh3_64_intdigest(encoded)
        fields = (
            *(_MAGIC, _VERSION, rank, num_slots, 0),
            *(*sizes, file_bytes, checksum, secrets.token_bytes(16)),
        )
        region = cls(path, mapped, fields)
        region.description = json.loads(encoded)
        region._store(ALIGNMENT, encoded)
        region._words[_CONFIRMED_WORD] = -1
        # Last: a file without it is no region.
        region._store(0, _sealed(_SUPERBLOCK.pack(*fields)))
        return region

    @classmethod
    def open(cls, path: Path, writable: bool = False) -> "Region":
        """Map the region in `path`. Raises DamagedSnapshot when it is none, or not whole."""
        mapped = _map_existing(path, writable)
        try:
            region = cls(path, mapped, _superblock(path, mapped))
            start = ALIGNMENT
            encoded = bytes(region._view[start : start + region._description_bytes])
            if xxhash.xxh3_64_intdigest(encoded) != region._description_sum:
                raise DamagedSnapshot(f"{path} is damaged: its description's checksum is wrong.")
            region.description = _json_object(path, encoded, "description")
        except BaseException:
            with suppress(BufferError):
                mapped.close()
            raise
        return region

    @classmethod
    def adopt(
        cls,
        folder: Path,
        rank: int,
        description: dict[str, Any],
        slot_bytes: int,
        num_slots: int = 3,
    ) -> "Region | None":
        """Take over the region that an earlier start of the same run left, with the steps in it,
        where it differs from `description` in `session` and `config` at most; None where there is
        none, or it does not fit.

        For the short time in which the description is replaced, a kill loses the region.
        """
        path = folder / f"rank-{rank:05d}.snapshots"
        try:
            region = cls.open(path, writable=True)
        except DamagedSnapshot:
            return None
        encoded = json.dumps(description).encode()
        fits = (
            _without_start(region.description) == _without_start(json.loads(encoded))
            and (region.slot_bytes, region.num_slots) == (_padded(slot_bytes), num_slots)
            and _padded(len(encoded)) == _padded(region._description_bytes)
        )
        if not fits:
            region.close()
            return None
        region._describe(encoded)
        return region

    @property
    def confirmed(self) -> int:
        """The newest step that all ranks have completed, as far as this rank knows; -1: none."""
        return self._words[_CONFIRMED_WORD]

    def confirm(self, step: int) -> None:
        """Note that all ranks have completed `step`: one store of 8 bytes."""
        self._words[_CONFIRMED_WORD] = step

    def data(self, slot: int) -> memoryview:
        """The bytes of a slot, beginning at a multiple of 4096."""
        start = self._data_start + self._checked(slot) * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    def begin(self, slot: int, step: int) -> None:
        """Say that the data of `slot` is about to change. What it held is gone."""
        self._put_header(slot, State.COPYING, step, b"")

    def complete(self, slot: int, values: dict[str, Any]) -> None:
        """Say that `slot` holds its step whole, with these values. Raises ValueError when `begin`
        was not called or the values need more than `values_bytes`."""
        header = self.slots()[self._checked(slot)]
        if header.state != State.COPYING:
            raise ValueError(f"Slot {slot} is {header.state.name}, not COPYING: call begin first.")
        encoded = json.dumps(values).encode()
        self._require_room_for(len(encoded), "values")
        self._store(self._header_start(slot) + ALIGNMENT, encoded)
        self._put_header(slot, State.COMPLETE, header.step, encoded)

    def stamp(self, slot: int, digests: dict[str, str]) -> None:
        """Keep checksums of a complete slot's data with it. Raises ValueError when it is not
        complete, or there is no room left beside its values."""
        start, header = self._header_start(slot), self._header(slot)
        if header is None or header[0] != State.COMPLETE:
            raise ValueError(f"Slot {slot} is not complete, so it has no data to stamp.")
        encoded = json.dumps(digests).encode()
        self._require_room_for(header[3] + len(encoded), "values and digests")
        self._store(start + ALIGNMENT + header[3], encoded)
        checksum = xxhash.xxh3_64_intdigest(encoded)
        stamp = _STAMP.pack(header[2], len(encoded), checksum)
        self._store(start + _STAMP_OFFSET, _sealed(stamp))

    def slots(self) -> list[SlotHeader]:
        """What each slot holds. One whose header is not whole counts as empty."""
        found = []
        for slot in range(self.num_slots):
            header = self._header(slot)
            found.append(_EMPTY_SLOT if header is None else SlotHeader(header[2], State(header[0])))
        return found

    def complete_slots(self) -> dict[int, int]:
        """Step -> slot, for the steps that are held whole, newest first."""
        slots = enumerate(self.slots())
        found = {header.step: slot for slot, header in slots if header.state == State.COMPLETE}
        return dict(sorted(found.items(), reverse=True))

    def values(self, slot: int) -> dict[str, Any]:
        """The values of a complete slot. Raises DamagedSnapshot when they are not those that were
        given, or the slot is not complete."""
        header = self._header(slot)
        if header is None or header[0] != State.COMPLETE:
            raise DamagedSnapshot(f"{self.path} is damaged: slot {slot} is not complete.")
        encoded = self._values_area(slot, 0, header[3])
        if xxhash.xxh3_64_intdigest(encoded) != header[4]:
            raise DamagedSnapshot(f"{self.path} is damaged: the checksum of slot {slot}'s values.")
        return _json_object(self.path, encoded, f"values of slot {slot}")

    def digests(self, slot: int) -> dict[str, str] | None:
        """What `stamp` kept; None when the slot's present data was not stamped."""
        header = self._header(slot)
        start = self._header_start(slot) + _STAMP_OFFSET
        stamp = _unsealed(self._view[start : start + _STAMP.size + _CHECKSUM.size])
        if header is None or header[0] != State.COMPLETE or stamp is None:
            return None
        step, length, checksum = _STAMP.unpack(stamp)
        if step != header[2] or header[3] + length > self.values_bytes:
            return None
        encoded = self._values_area(slot, header[3], length)
        if xxhash.xxh3_64_intdigest(encoded) != checksum:
            return None
        return _json_object(self.path, encoded, f"digests of slot {slot}")

    def close(self) -> None:
        """Unmap, unless somebody still holds a view: then the last view's end does it."""
        with suppress(BufferError):
            self._words.release()
            self._view.release()
            self._map.close()

    def unlink(self) -> None:
        """Remove the file. Its memory is free when nobody maps it any more."""
        self.path.unlink(missing_ok=True)

    def _describe(self, encoded: bytes) -> None:
        """Replace the description by one that needs as many pages."""
        self._store(ALIGNMENT, encoded)
        self.description = json.loads(encoded)
        self._description_bytes = len(encoded)
        self._description_sum = xxhash.xxh3_64_intdigest(encoded)
        token = secrets.token_bytes(16)
        self.token = token.hex()
        sizes = (self.slot_bytes, self.values_bytes, len(encoded), self.file_bytes)
        fields = (_MAGIC, _VERSION, self.rank, self.num_slots, 0, *sizes)
        self._store(0, _sealed(_SUPERBLOCK.pack(*fields, self._description_sum, token)))

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"Slot {slot} of {self.path}, which has {self.num_slots} slots.")
        return slot

    def _header_start(self, slot: int) -> int:
        return self._headers_start + self._checked(slot) * self._header_bytes

    def _header(self, slot: int) -> tuple[int, int, int, int, int] | None:
        """The fields of a slot's header; None when its checksum does not hold."""
        start = self._header_start(slot)
        fields = _unsealed(self._view[start : start + _HEADER.size + _CHECKSUM.size])
        if fields is None:
            return None
        header = _HEADER.unpack(fields)
        known = header[0] in (State.COPYING, State.COMPLETE) and header[2] >= 0
        return header if known and header[3] <= self.values_bytes else None

    def _put_header(self, slot: int, state: State, step: int, values: bytes) -> None:
        if step < 0:
            raise ValueError(f"Step {step} is negative.")
        checksum = xxhash.xxh3_64_intdigest(values)
        header = _HEADER.pack(state, 0, step, len(values), checksum)
        start = self._header_start(slot)
        self._store(start + _STAMP_OFFSET, bytes(_STAMP.size + _CHECKSUM.size))
        self._store(start, _sealed(header))

    def _require_room_for(self, length: int, what: str) -> None:
        if length > self.values_bytes:
            raise ValueError(
                f"The {what} of a snapshot take {length} bytes as JSON, but {self.path} has room "
                f"for {self.values_bytes}: create it with more values_bytes."
            )

    def _values_area(self, slot: int, start: int, length: int) -> bytes:
        start += self._header_start(slot) + ALIGNMENT
        return bytes(self._view[start : start + length])

    def _store(self, offset: int, content: bytes) -> None:
        """The one way in which bytes other than a slot's data come into the file."""
        self._view[offset : offset + len(content)] = content


def _without_start(description: dict[str, Any]) -> dict[str, Any]:
    """What does not change between two starts of a run that goes on in the same way."""
    return {k: v for k, v in description.items() if k not in ("session", "config")}


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _file_bytes(num_slots: int, slot_bytes: int, values_bytes: int, description_bytes: int) -> int:
    per_slot = ALIGNMENT + _padded(values_bytes) + slot_bytes
    return ALIGNMENT + _padded(description_bytes) + num_slots * per_slot


def _sealed(content: bytes) -> bytes:
    """`content` and its checksum. Zeros are not sealed: fresh memory counts as empty."""
    return content + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content))


def _unsealed(content: memoryview) -> bytes | None:
    fields = bytes(content[: -_CHECKSUM.size])
    (checksum,) = _CHECKSUM.unpack(content[-_CHECKSUM.size :])
    return fields if xxhash.xxh3_64_intdigest(fields) == checksum else None


def _reserve(path: Path, file_bytes: int, what: str) -> mmap.mmap:
    """A new file of this size with all its memory taken, mapped."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, file_bytes)
        return mmap.mmap(descriptor, file_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except BaseException as error:
        status = os.statvfs(path.parent)
        os.unlink(path)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
            available = status.f_bavail * status.f_frsize
            raise ShortOfMemory(
                what, needed=file_bytes, available=available, where=str(path.parent)
            ) from error
        raise
    finally:
        os.close(descriptor)


def _map_existing(path: Path, writable: bool) -> mmap.mmap:
    try:
        flags = os.O_RDWR if writable else os.O_RDONLY
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedSnapshot(f"{path} cannot be opened: {error}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise DamagedSnapshot(f"{path} is no file of user {os.getuid()}.")
        if status.st_size < ALIGNMENT:
            raise DamagedSnapshot(f"{path} is damaged: it has only {status.st_size} bytes.")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(descriptor, status.st_size, mmap.MAP_SHARED, protection)
    finally:
        os.close(descriptor)


def _superblock(path: Path, mapped: mmap.mmap) -> tuple[Any, ...]:
    """The fields of the superblock, each checked against the file's real length."""
    if mapped[:8] != _MAGIC:
        raise DamagedSnapshot(f"{path} is damaged: it does not begin as snapshots do.")
    with memoryview(mapped) as view:
        content = _unsealed(view[: _SUPERBLOCK.size + _CHECKSUM.size])
    if content is None:
        raise DamagedSnapshot(f"{path} is damaged: its superblock's checksum is wrong.")
    fields = _SUPERBLOCK.unpack(content)
    _, version, _, num_slots, _, slot_bytes, values_bytes, description_bytes, file_bytes, *_ = (
        fields
    )
    if version != _VERSION:
        raise DamagedSnapshot(f"{path} has version {version}; this version reads {_VERSION}.")
    sizes = (slot_bytes, values_bytes, description_bytes)
    sound = 0 < num_slots <= _MAX_SLOTS and max(sizes) < _MAX_BYTES
    sound = sound and slot_bytes % ALIGNMENT == 0 and values_bytes % ALIGNMENT == 0
    if not sound or not _file_bytes(num_slots, *sizes) == file_bytes == len(mapped):
        raise DamagedSnapshot(
            f"{path} is damaged: {num_slots} slots of {slot_bytes} bytes do not fit its "
            f"{len(mapped)} bytes."
        )
    return fields


def _json_object(path: Path, encoded: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise DamagedSnapshot(f"{path} is damaged: its {what}: {error}") from None
    if not isinstance(value, dict):
        raise DamagedSnapshot(f"{path} is damaged: its {what} is no JSON object.")
    return value
