"""Snapshots of a rank in shared memory: one tmpfs file that outlives the process that fills it.

File layout, in multiples of 4096 bytes: superblocks, two descriptions (JSON), a header and values
(JSON) per slot, then the data of each slot. The header, which is written last and has a checksum,
decides whether a slot is valid. A region that a later generation takes over has two descriptions,
and belongs to both generations until all ranks have taken theirs over.

Invariant: if the process is killed at any point, each slot is either complete as its header says or
counts as empty, and no slot hides another. Memory is allocated before it is touched, so a full
tmpfs is an error instead of SIGBUS. Stores must become visible in program order, as on x86-64;
elsewhere a pipe must order writing before reading.
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

from torchtitan_lite.checkpoint.shared_memory.folder import COPY, OWN, PUBLISHED, region_path
from torchtitan_lite.checkpoint.shared_memory.region_file import (
    ALIGNMENT,
    CHECKSUM_BYTES,
    MAX_SLOTS,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    Superblock,
    add_checksum,
    allocate_file,
    check_capacity,
    map_file,
    page_aligned,
    read_superblocks,
    verify_checksum,
)
from torchtitan_lite.core.errors import DamagedSnapshot

_CONFIRMED_WORD = 2048 // 8
# state, unused, step, values bytes, checksum of the values
_HEADER = struct.Struct("<IIqQQ")
# step, digests bytes, checksum of the digests
_STAMP = struct.Struct("<qQQ")
_STAMP_OFFSET = 1024


class SlotState(IntEnum):
    """State of a slot."""

    EMPTY = 0
    COPYING = 1
    COMPLETE = 2


@dataclass(frozen=True)
class SlotHeader:
    """Step and state of a slot; step -1 if empty."""

    step: int
    state: SlotState


_EMPTY_SLOT = SlotHeader(-1, SlotState.EMPTY)


@dataclass(frozen=True)
class _DescriptionCopy:
    """One of the two descriptions in the file."""

    place: int
    block: Superblock
    values: dict[str, Any]

    @property
    def generation_id(self) -> str:
        return str(self.values.get("generation_id", ""))


class Region:
    """Snapshots of one rank. Created by the trainer, opened by the writer and by later
    generations."""

    def __init__(self, path: Path, mapped: mmap.mmap, block: Superblock) -> None:
        """Use `create`, `open` or `adopt` instead. `block`: any of the file's superblocks."""
        self.path, self._block = path, block
        self._map = mapped
        self.is_writable = not memoryview(mapped).readonly
        self._view = memoryview(mapped)
        self._words = self._view.cast("q")
        self._header_bytes = ALIGNMENT + page_aligned(self.values_bytes)
        self._data_start = block.headers_start + self.num_slots * self._header_bytes
        self._descriptions: list[_DescriptionCopy] = []
        """Newest first."""
        self.earlier_generation_ids: tuple[str, ...] = ()
        """Generations that the region belonged to when this process took it over."""

    @classmethod
    def create(
        cls,
        folder: Path,
        rank: int,
        description: dict[str, Any],
        slot_bytes: int,
        values_bytes: int = 1 << 20,
        num_slots: int = 3,
        kind: str = OWN,
    ) -> "Region":
        """Allocate the region of `rank` in `folder`, replacing that of an earlier process.

        `values_bytes`: maximum JSON size of a slot's values and digests. Raises InsufficientMemory,
        and leaves nothing, if the tmpfs, the machine or the cgroup has too little memory.
        """
        if not 0 < num_slots <= MAX_SLOTS or slot_bytes < 0 or values_bytes <= 0:
            raise ValueError(
                f"{num_slots} slots of {slot_bytes} and {values_bytes} bytes: needed are 1 to "
                f"{MAX_SLOTS} slots, no negative data and some room for values."
            )
        encoded = json.dumps(description).encode()
        slot_bytes, values_bytes = page_aligned(slot_bytes), page_aligned(values_bytes)
        block = Superblock(
            rank=rank,
            num_slots=num_slots,
            num_takeovers=0,
            slot_bytes=slot_bytes,
            values_bytes=values_bytes,
            # The configuration may be longer in a later generation.
            description_capacity=page_aligned(len(encoded)) + ALIGNMENT,
            description_bytes=len(encoded),
            description_sum=xxhash.xxh3_64_intdigest(encoded),
            token=secrets.token_bytes(16),
        )
        path = region_path(folder, rank, kind)
        path.unlink(missing_ok=True)
        whose = {COPY: "copies of snapshots", PUBLISHED: "published weights"}.get(kind, "snapshots")
        what = f"The {whose} of rank {rank} ({num_slots} slots of {slot_bytes / 2**20:.1f} MiB)"
        check_capacity(folder, block.file_bytes, what)
        mapped = allocate_file(path, block.file_bytes, what)
        region = cls(path, mapped, block)
        region._words[_CONFIRMED_WORD] = -1
        # Written last: a file without it is not a region.
        region._put_description(0, block, encoded)
        return region

    @classmethod
    def open(cls, path: Path, writable: bool = False) -> "Region":
        """Map the region in `path`. Raises DamagedSnapshot if it is invalid."""
        mapped = map_file(path, writable)
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
        generation_id: str | None = None,
        kind: str = OWN,
    ) -> "Region | None":
        """Take over the region of an earlier generation of the same run, with its steps, if it
        differs from `description` at most in `generation_id` and `config` and has `values_bytes`
        for values; None if there is none, or it does not match.

        Until `finish_takeover` it also belongs to the earlier generation: `generation_id`, or else
        its last owner. A successor therefore finds the steps even if not all ranks came this far.
        """
        region = cls.matching(
            folder, rank, description, slot_bytes, num_slots, values_bytes=values_bytes, kind=kind
        )
        if region is not None:
            region._take_over(json.dumps(description).encode(), generation_id)
        return region

    @classmethod
    def matching(
        cls,
        folder: Path,
        rank: int,
        description: dict[str, Any],
        slot_bytes: int,
        num_slots: int = 3,
        values_bytes: int = 0,
        kind: str = OWN,
    ) -> "Region | None":
        """Open the region that `adopt` would take over; None if there is none, or it does not
        match."""
        try:
            region = cls.open(region_path(folder, rank, kind), writable=True)
        except DamagedSnapshot:
            return None
        encoded = json.dumps(description).encode()
        fits = (
            _without_start(region.description) == _without_start(json.loads(encoded))
            and (region.slot_bytes, region.num_slots) == (page_aligned(slot_bytes), num_slots)
            and region.values_bytes >= values_bytes
            and len(encoded) <= region._block.description_capacity
        )
        if not fits:
            region.close()
            return None
        return region

    def finish_takeover(self) -> None:
        """Drop the earlier generation's description: all ranks have taken their regions over."""
        for copy in self._descriptions[1:]:
            self._clear(copy.place)
        del self._descriptions[1:]

    @property
    def description(self) -> dict[str, Any]:
        """Description by the newest generation."""
        return self._descriptions[0].values

    @property
    def generation_ids(self) -> list[str]:
        """Generations that own the region, newest first."""
        return [copy.generation_id for copy in self._descriptions]

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
        """Maximum size of a slot's values and digests."""
        return self._block.values_bytes

    @property
    def token(self) -> str:
        """Unique to every creation and takeover of a region."""
        return self._descriptions[0].block.token.hex()

    @property
    def confirmed(self) -> int:
        """Newest step that all ranks have completed, as far as this rank knows; -1 if none."""
        return self._words[_CONFIRMED_WORD]

    def confirm(self, step: int) -> None:
        """Record that all ranks have completed `step`, in a single 8-byte store."""
        self._words[_CONFIRMED_WORD] = step

    def data(self, slot: int) -> memoryview:
        """Return the bytes of a slot, aligned to 4096."""
        start = self._data_start + self._checked(slot) * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    def begin(self, slot: int, step: int) -> None:
        """Mark `slot` as being filled with `step`. Its previous content is invalid."""
        self._put_header(slot, SlotState.COPYING, step, b"")

    def complete(self, slot: int, values: dict[str, Any]) -> None:
        """Mark `slot` as complete, with these values. Raises ValueError without a prior `begin`, or
        if the values exceed `values_bytes`."""
        header = self.slots()[self._checked(slot)]
        if header.state != SlotState.COPYING:
            raise ValueError(f"Slot {slot} is {header.state.name}, not COPYING: call begin first.")
        encoded = json.dumps(values).encode()
        self._check_values_fit(len(encoded), "values")
        self._store(self._header_start(slot) + ALIGNMENT, encoded)
        self._put_header(slot, SlotState.COMPLETE, header.step, encoded)

    def store_digests(self, slot: int, digests: dict[str, str]) -> None:
        """Store checksums of a complete slot's data. Raises ValueError if the slot is not complete,
        or its values leave no space."""
        start, header = self._header_start(slot), self._header(slot)
        if header is None or header[0] != SlotState.COMPLETE:
            raise ValueError(f"Slot {slot} is not complete, so it has no data to stamp.")
        encoded = json.dumps(digests).encode()
        self._check_values_fit(header[3] + len(encoded), "values and digests")
        self._store(start + ALIGNMENT + header[3], encoded)
        checksum = xxhash.xxh3_64_intdigest(encoded)
        stamp = _STAMP.pack(header[2], len(encoded), checksum)
        self._store(start + _STAMP_OFFSET, add_checksum(stamp))

    def slots(self) -> list[SlotHeader]:
        """Return the header of each slot; an invalid one counts as empty."""
        headers = []
        for slot in range(self.num_slots):
            header = self._header(slot)
            headers.append(
                _EMPTY_SLOT if header is None else SlotHeader(header[2], SlotState(header[0]))
            )
        return headers

    def complete_slots(self) -> dict[int, int]:
        """Return step -> slot of complete steps, newest first."""
        slots = enumerate(self.slots())
        complete = {
            header.step: slot for slot, header in slots if header.state == SlotState.COMPLETE
        }
        return dict(sorted(complete.items(), reverse=True))

    def values(self, slot: int) -> dict[str, Any]:
        """Return the values of a complete slot. Raises DamagedSnapshot if their checksum does not
        match, or the slot is not complete."""
        header = self._header(slot)
        if header is None or header[0] != SlotState.COMPLETE:
            raise DamagedSnapshot(f"{self.path} is damaged: slot {slot} is not complete.")
        encoded = self._values_area(slot, 0, header[3])
        if xxhash.xxh3_64_intdigest(encoded) != header[4]:
            raise DamagedSnapshot(f"{self.path} is damaged: the values of slot {slot}.")
        return _json_object(self.path, encoded, f"values of slot {slot}")

    def digests(self, slot: int) -> dict[str, str] | None:
        """Return the digests stored by `store_digests`; None if there are none for the slot's
        current data."""
        header = self._header(slot)
        start = self._header_start(slot) + _STAMP_OFFSET
        stamp = verify_checksum(self._view[start : start + _STAMP.size + CHECKSUM_BYTES])
        if header is None or header[0] != SlotState.COMPLETE or stamp is None:
            return None
        step, length, checksum = _STAMP.unpack(stamp)
        if step != header[2] or header[3] + length > self.values_bytes:
            return None
        encoded = self._values_area(slot, header[3], length)
        if xxhash.xxh3_64_intdigest(encoded) != checksum:
            return None
        return _json_object(self.path, encoded, f"digests of slot {slot}")

    def close(self) -> None:
        """Unmap the region; if views still exist, the last of them unmaps it."""
        with suppress(BufferError):
            self._words.release()
            self._view.release()
            self._map.close()

    def unlink(self) -> None:
        """Remove the file. Its memory is freed with its last mapping."""
        self.path.unlink(missing_ok=True)

    def _read_descriptions(self, blocks: Mapping[int, Superblock]) -> None:
        """Read the valid descriptions. Raises DamagedSnapshot if there is none."""
        newest_first = sorted(blocks, key=lambda place: blocks[place].num_takeovers, reverse=True)
        for place in newest_first:
            block = blocks[place]
            start = block.description_start(place)
            encoded = bytes(self._view[start : start + block.description_bytes])
            if xxhash.xxh3_64_intdigest(encoded) == block.description_sum:
                values = _json_object(self.path, encoded, "description")
                self._descriptions.append(_DescriptionCopy(place, block, values))
        if not self._descriptions:
            raise DamagedSnapshot(f"{self.path} is damaged: its description's checksum is wrong.")

    def _take_over(self, encoded: bytes, generation_id: str | None) -> None:
        """Write a new description beside that of `generation_id`, or else the newest."""
        newest = self._descriptions[0]
        kept = next(
            (
                description
                for description in self._descriptions
                if description.generation_id == generation_id
            ),
            newest,
        )
        block = replace(
            kept.block,
            num_takeovers=newest.block.num_takeovers + 1,
            description_bytes=len(encoded),
            description_sum=xxhash.xxh3_64_intdigest(encoded),
            token=secrets.token_bytes(16),
        )
        self.earlier_generation_ids = tuple(self.generation_ids)
        self._descriptions = [kept]
        place = 1 - kept.place
        self._clear(place)
        self._put_description(place, block, encoded)

    def _put_description(self, place: int, block: Superblock, encoded: bytes) -> None:
        self._store(block.description_start(place), encoded)
        self._store(SUPERBLOCK_OFFSETS[place], block.encoded())
        self._descriptions.insert(0, _DescriptionCopy(place, block, json.loads(encoded)))

    def _clear(self, place: int) -> None:
        self._store(SUPERBLOCK_OFFSETS[place], bytes(SUPERBLOCK_BYTES))

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"Slot {slot} of {self.path}, which has {self.num_slots} slots.")
        return slot

    def _header_start(self, slot: int) -> int:
        return self._block.headers_start + self._checked(slot) * self._header_bytes

    def _header(self, slot: int) -> tuple[int, int, int, int, int] | None:
        """Return the fields of a slot's header; None if its checksum does not match."""
        start = self._header_start(slot)
        fields = verify_checksum(self._view[start : start + _HEADER.size + CHECKSUM_BYTES])
        if fields is None:
            return None
        header = _HEADER.unpack(fields)
        known = header[0] in (SlotState.COPYING, SlotState.COMPLETE) and header[2] >= 0
        return header if known and header[3] <= self.values_bytes else None

    def _put_header(self, slot: int, state: SlotState, step: int, values: bytes) -> None:
        if step < 0:
            raise ValueError(f"Step {step} is negative.")
        checksum = xxhash.xxh3_64_intdigest(values)
        header = _HEADER.pack(state, 0, step, len(values), checksum)
        start = self._header_start(slot)
        self._store(start + _STAMP_OFFSET, bytes(_STAMP.size + CHECKSUM_BYTES))
        self._store(start, add_checksum(header))

    def _check_values_fit(self, length: int, what: str) -> None:
        if length > self.values_bytes:
            raise ValueError(
                f"The {what} of a snapshot take {length} bytes as JSON, but {self.path} has room "
                f"for {self.values_bytes}: create it with more values_bytes."
            )

    def _values_area(self, slot: int, start: int, length: int) -> bytes:
        start += self._header_start(slot) + ALIGNMENT
        return bytes(self._view[start : start + length])

    def _store(self, offset: int, content: bytes) -> None:
        """Write into the file; all writes except a slot's data go through here."""
        self._view[offset : offset + len(content)] = content


def _without_start(description: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that stay equal across generations of an unchanged run."""
    return {k: v for k, v in description.items() if k not in ("generation_id", "config")}


def _json_object(path: Path, encoded: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise DamagedSnapshot(f"{path} is damaged: its {what}: {error}") from None
    if not isinstance(value, dict):
        raise DamagedSnapshot(f"{path} is damaged: its {what} is not a JSON object.")
    return value
