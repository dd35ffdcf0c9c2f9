"""A rank's snapshots in shared memory: one tmpfs file that outlives the process that fills it.

The file, all of it in multiples of 4096 bytes: superblocks, two descriptions (JSON), then per slot
a header and its values (JSON), then per slot its data. What a reader needs to judge a slot stands
in its header, which is written last and has a checksum. A region that a later start of the run
takes over is described twice, and belongs to both starts, until all ranks have taken theirs over.

Invariant: wherever its process is killed, each slot is either complete as its header says or
counts as empty, and no slot hides another. Memory is reserved before it is touched, so that a full
tmpfs is an error and no bus error. Stores are taken to be seen in the order in which they are made,
as on x86-64; elsewhere the order that a pipe gives must stand between writing and reading.
Layer: above mapping and superblock.
"""

import json
import mmap
import secrets
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import xxhash

from torchtitan_lite.checkpoint.memory.mapping import map_existing, reserve
from torchtitan_lite.checkpoint.memory.room import require_room
from torchtitan_lite.checkpoint.memory.sealed import CHECKSUM_BYTES, sealed, unsealed
from torchtitan_lite.checkpoint.memory.superblock import (
    ALIGNMENT,
    MAX_SLOTS,
    PLACES,
    SUPERBLOCK_BYTES,
    Superblock,
    padded,
    read_superblocks,
)
from torchtitan_lite.errors import DamagedSnapshot

_CONFIRMED_WORD = 2048 // 8
# state, unused, step, values bytes, checksum of the values
_HEADER = struct.Struct("<IIqQQ")
# step, digests bytes, checksum of the digests
_STAMP = struct.Struct("<qQQ")
_STAMP_OFFSET = 1024


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


@dataclass(frozen=True)
class _Described:
    """What stands in one place."""

    place: int
    block: Superblock
    values: dict[str, Any]

    @property
    def start(self) -> str:
        return str(self.values.get("session", ""))


class Region:
    """The snapshots of one rank. Made by the trainer, opened by the writer and by successors."""

    def __init__(self, path: Path, mapped: mmap.mmap, block: Superblock) -> None:
        """For `create` and `open`. `block`: any of its superblocks."""
        self.path, self._block = path, block
        self._map = mapped
        self.is_writable = not memoryview(mapped).readonly
        self._view = memoryview(mapped)
        self._words = self._view.cast("q")
        self._header_bytes = ALIGNMENT + padded(self.values_bytes)
        self._data_start = block.headers_start + self.num_slots * self._header_bytes
        self._described: list[_Described] = []
        """The newest first."""
        self.taken_over_from: str | None = None
        """The start of the run that left it, where this process took it over."""

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
        if not 0 < num_slots <= MAX_SLOTS or slot_bytes < 0 or values_bytes <= 0:
            raise ValueError(
                f"{num_slots} slots of {slot_bytes} and {values_bytes} bytes: needed are 1 to "
                f"{MAX_SLOTS} slots, no negative data and some room for values."
            )
        encoded = json.dumps(description).encode()
        slot_bytes, values_bytes = padded(slot_bytes), padded(values_bytes)
        block = Superblock(
            rank=rank,
            num_slots=num_slots,
            turn=0,
            slot_bytes=slot_bytes,
            values_bytes=values_bytes,
            # The configuration may be a longer text the next time.
            description_room=padded(len(encoded)) + ALIGNMENT,
            description_bytes=len(encoded),
            description_sum=xxhash.xxh3_64_intdigest(encoded),
            token=secrets.token_bytes(16),
        )
        path = folder / f"rank-{rank:05d}.snapshots"
        path.unlink(missing_ok=True)
        what = f"The snapshots of rank {rank} ({num_slots} slots of {slot_bytes / 2**20:.1f} MiB)"
        require_room(folder, block.file_bytes, what)
        mapped = reserve(path, block.file_bytes, what)
        region = cls(path, mapped, block)
        region._words[_CONFIRMED_WORD] = -1
        # Last: a file without it is no region.
        region._put_description(0, block, encoded)
        return region

    @classmethod
    def open(cls, path: Path, writable: bool = False) -> "Region":
        """Map the region in `path`. Raises DamagedSnapshot when it is none, or not whole."""
        mapped = map_existing(path, writable)
        try:
            blocks = read_superblocks(path, mapped)
            region = cls(path, mapped, next(iter(blocks.values())))
            region._read_descriptions(blocks)
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
        values_bytes: int = 0,
        start: str | None = None,
    ) -> "Region | None":
        """Take over the region that an earlier start of the same run left, with the steps in it,
        where it differs from `description` in `session` and `config` at most and has room for
        `values_bytes` of values; None where there is none, or it does not fit.

        It belongs to the earlier start, too, until `settle`: to `start`, or else to the last that
        had it. So whoever comes after finds the steps, also if not all ranks came so far.
        """
        path = folder / f"rank-{rank:05d}.snapshots"
        try:
            region = cls.open(path, writable=True)
        except DamagedSnapshot:
            return None
        encoded = json.dumps(description).encode()
        fits = (
            _without_start(region.description) == _without_start(json.loads(encoded))
            and (region.slot_bytes, region.num_slots) == (padded(slot_bytes), num_slots)
            and region.values_bytes >= values_bytes
            and len(encoded) <= region._block.description_room
        )
        if not fits:
            region.close()
            return None
        region._take_over(encoded, start)
        return region

    def settle(self) -> None:
        """It is this start's alone: all ranks have taken theirs over."""
        for described in self._described[1:]:
            self._clear(described.place)
        del self._described[1:]

    @property
    def description(self) -> dict[str, Any]:
        """Of the newest start that has it."""
        return self._described[0].values

    @property
    def starts(self) -> list[str]:
        """The starts of the run that have it, the newest first."""
        return [described.start for described in self._described]

    @property
    def rank(self) -> int:
        return self._block.rank

    @property
    def num_slots(self) -> int:
        return self._block.num_slots

    @property
    def slot_bytes(self) -> int:
        return self._block.slot_bytes

    @property
    def values_bytes(self) -> int:
        """The most that the values and the digests of a slot may take."""
        return self._block.values_bytes

    @property
    def token(self) -> str:
        """Differs for every region that was ever created or taken over."""
        return self._described[0].block.token.hex()

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
        self._store(start + _STAMP_OFFSET, sealed(stamp))

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
        stamp = unsealed(self._view[start : start + _STAMP.size + CHECKSUM_BYTES])
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

    def _read_descriptions(self, blocks: Mapping[int, Superblock]) -> None:
        """Those that are whole. Raises DamagedSnapshot where none is."""
        newest_first = sorted(blocks, key=lambda place: blocks[place].turn, reverse=True)
        for place in newest_first:
            block = blocks[place]
            start = block.description_start(place)
            encoded = bytes(self._view[start : start + block.description_bytes])
            if xxhash.xxh3_64_intdigest(encoded) == block.description_sum:
                values = _json_object(self.path, encoded, "description")
                self._described.append(_Described(place, block, values))
        if not self._described:
            raise DamagedSnapshot(f"{self.path} is damaged: its description's checksum is wrong.")

    def _take_over(self, encoded: bytes, start: str | None) -> None:
        """Describe it anew, beside the description of `start`, or else the newest."""
        newest = self._described[0]
        kept = next((one for one in self._described if one.start == start), newest)
        block = replace(
            kept.block,
            turn=newest.block.turn + 1,
            description_bytes=len(encoded),
            description_sum=xxhash.xxh3_64_intdigest(encoded),
            token=secrets.token_bytes(16),
        )
        self._described = [kept]
        place = 1 - kept.place
        self._clear(place)
        self._put_description(place, block, encoded)
        self.taken_over_from = kept.start

    def _put_description(self, place: int, block: Superblock, encoded: bytes) -> None:
        self._store(block.description_start(place), encoded)
        self._store(PLACES[place], block.encoded())
        self._described.insert(0, _Described(place, block, json.loads(encoded)))

    def _clear(self, place: int) -> None:
        self._store(PLACES[place], bytes(SUPERBLOCK_BYTES))

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"Slot {slot} of {self.path}, which has {self.num_slots} slots.")
        return slot

    def _header_start(self, slot: int) -> int:
        return self._block.headers_start + self._checked(slot) * self._header_bytes

    def _header(self, slot: int) -> tuple[int, int, int, int, int] | None:
        """The fields of a slot's header; None when its checksum does not hold."""
        start = self._header_start(slot)
        fields = unsealed(self._view[start : start + _HEADER.size + CHECKSUM_BYTES])
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
        self._store(start + _STAMP_OFFSET, bytes(_STAMP.size + CHECKSUM_BYTES))
        self._store(start, sealed(header))

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


def _json_object(path: Path, encoded: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise DamagedSnapshot(f"{path} is damaged: its {what}: {error}") from None
    if not isinstance(value, dict):
        raise DamagedSnapshot(f"{path} is damaged: its {what} is no JSON object.")
    return value
