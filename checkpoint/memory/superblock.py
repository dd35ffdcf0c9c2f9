"""The first page of a region's file: how large its parts are, and which description counts.

There are two places for a superblock, and one for a description with each: who takes a region over
writes into the place that is free, and nothing is lost wherever that ends. Layer: above sealed.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.memory.sealed import CHECKSUM_BYTES, sealed, unsealed
from torchtitan_lite.errors import DamagedSnapshot

ALIGNMENT = 4096
MAX_SLOTS = 64
PLACES = (0, 1024)
"""Where superblocks begin."""
_MAGIC = b"TTLsnap\x00"
_VERSION = 2
_MAX_BYTES = 1 << 62
# magic, version, rank, slots, turn, slot bytes, values bytes, room for a description, description
# bytes, file bytes, checksum of the description, token of this file
_FIELDS = struct.Struct("<8sIIIIQQQQQQ16s")
SUPERBLOCK_BYTES = _FIELDS.size + CHECKSUM_BYTES


@dataclass(frozen=True, kw_only=True)
class Superblock:
    """Of one region."""

    rank: int
    num_slots: int
    turn: int
    """Counts who had the region. The latest counts, if its description is whole."""
    slot_bytes: int
    values_bytes: int
    """The most that the values and the digests of a slot may take."""
    description_room: int
    """The most that a description may take."""
    description_bytes: int
    description_sum: int
    token: bytes
    """16 of them, which differ for every region that was ever created."""

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        per_slot = ALIGNMENT + padded(self.values_bytes) + self.slot_bytes
        return self.headers_start + self.num_slots * per_slot

    @property
    def headers_start(self) -> int:
        """Where the headers of the slots begin, behind the descriptions."""
        return self.description_start(len(PLACES))

    def description_start(self, place: int) -> int:
        """Where the description of a place begins."""
        return ALIGNMENT + place * self.description_room

    def encoded(self) -> bytes:
        """As it stands in the file, with its checksum."""
        return sealed(
            _FIELDS.pack(
                *(_MAGIC, _VERSION, self.rank, self.num_slots, self.turn),
                *(self.slot_bytes, self.values_bytes, self.description_room),
                *(self.description_bytes, self.file_bytes),
                *(self.description_sum, self.token),
            )
        )


def read_superblocks(path: Path, mapped: mmap.mmap) -> dict[int, Superblock]:
    """By place, those of a file that are whole, checked against its real length. Raises
    DamagedSnapshot where there is none."""
    found: dict[int, Superblock] = {}
    problem = DamagedSnapshot(f"{path} is damaged: it does not begin as snapshots do.")
    for place, start in enumerate(PLACES):
        if mapped[start : start + len(_MAGIC)] == _MAGIC:
            try:
                found[place] = _read(path, mapped, start)
            except DamagedSnapshot as error:
                problem = error
    if not found:
        raise problem
    return found


def _read(path: Path, mapped: mmap.mmap, start: int) -> Superblock:
    with memoryview(mapped) as view:
        content = unsealed(view[start : start + SUPERBLOCK_BYTES])
    if content is None:
        raise DamagedSnapshot(f"{path} is damaged: its superblock's checksum is wrong.")
    _, version, rank, num_slots, turn, *sizes, file_bytes, description_sum, token = _FIELDS.unpack(
        content
    )
    if version != _VERSION:
        raise DamagedSnapshot(f"{path} has version {version}; this version reads {_VERSION}.")
    slot_bytes, values_bytes, description_room, description_bytes = sizes
    found = Superblock(
        rank=rank,
        num_slots=num_slots,
        turn=turn,
        slot_bytes=slot_bytes,
        values_bytes=values_bytes,
        description_room=description_room,
        description_bytes=description_bytes,
        description_sum=description_sum,
        token=token,
    )
    sound = 0 < num_slots <= MAX_SLOTS and max(sizes) < _MAX_BYTES
    sound = sound and not any(size % ALIGNMENT for size in sizes[:3])
    sound = sound and description_bytes <= description_room
    if not sound or not found.file_bytes == file_bytes == len(mapped):
        raise DamagedSnapshot(
            f"{path} is damaged: {num_slots} slots of {slot_bytes} bytes do not fit its "
            f"{len(mapped)} bytes."
        )
    return found


def padded(size: int) -> int:
    """Up to the next page."""
    return -(-size // ALIGNMENT) * ALIGNMENT
