"""The first page of a region's file: how large its parts are. Layer: above sealed."""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.memory.sealed import CHECKSUM_BYTES, sealed, unsealed
from torchtitan_lite.errors import DamagedSnapshot

ALIGNMENT = 4096
MAX_SLOTS = 64
_MAGIC = b"TTLsnap\x00"
_VERSION = 1
_MAX_BYTES = 1 << 62
# magic, version, rank, slots, unused, slot bytes, values bytes, description bytes, file bytes,
# checksum of the description, token of this file
_FIELDS = struct.Struct("<8sIIIIQQQQQ16s")


@dataclass(frozen=True, kw_only=True)
class Superblock:
    """Of one region."""

    rank: int
    num_slots: int
    slot_bytes: int
    values_bytes: int
    """The most that the values and the digests of a slot may take."""
    description_bytes: int
    description_sum: int
    token: bytes
    """16 of them, which differ for every region that was ever created."""

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        per_slot = ALIGNMENT + padded(self.values_bytes) + self.slot_bytes
        return ALIGNMENT + padded(self.description_bytes) + self.num_slots * per_slot

    def encoded(self) -> bytes:
        """As it stands in the file, with its checksum."""
        return sealed(
            _FIELDS.pack(
                *(_MAGIC, _VERSION, self.rank, self.num_slots, 0),
                *(self.slot_bytes, self.values_bytes, self.description_bytes, self.file_bytes),
                *(self.description_sum, self.token),
            )
        )


def read_superblock(path: Path, mapped: mmap.mmap) -> Superblock:
    """That of a file, checked against its real length. Raises DamagedSnapshot."""
    if mapped[:8] != _MAGIC:
        raise DamagedSnapshot(f"{path} is damaged: it does not begin as snapshots do.")
    with memoryview(mapped) as view:
        content = unsealed(view[: _FIELDS.size + CHECKSUM_BYTES])
    if content is None:
        raise DamagedSnapshot(f"{path} is damaged: its superblock's checksum is wrong.")
    _, version, rank, num_slots, _, *sizes, file_bytes, description_sum, token = _FIELDS.unpack(
        content
    )
    if version != _VERSION:
        raise DamagedSnapshot(f"{path} has version {version}; this version reads {_VERSION}.")
    slot_bytes, values_bytes, description_bytes = sizes
    found = Superblock(
        rank=rank,
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        values_bytes=values_bytes,
        description_bytes=description_bytes,
        description_sum=description_sum,
        token=token,
    )
    sound = 0 < num_slots <= MAX_SLOTS and max(sizes) < _MAX_BYTES
    sound = sound and slot_bytes % ALIGNMENT == 0 and values_bytes % ALIGNMENT == 0
    if not sound or not found.file_bytes == file_bytes == len(mapped):
        raise DamagedSnapshot(
            f"{path} is damaged: {num_slots} slots of {slot_bytes} bytes do not fit its "
            f"{len(mapped)} bytes."
        )
    return found


def padded(size: int) -> int:
    """Up to the next page."""
    return -(-size // ALIGNMENT) * ALIGNMENT
