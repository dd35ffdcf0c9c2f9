"""The file of a region: capacity check, allocation, mapping, and superblocks with checksums.

There are two superblocks, each with its own description. A takeover writes into the unused place,
so an interruption loses nothing.
"""

import errno
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import xxhash

from torchtitan_lite.core.errors import DamagedSnapshot

ALIGNMENT = 4096
MAX_SLOTS = 64
SUPERBLOCK_OFFSETS = (0, 1024)
"""File offsets of the superblocks."""
_MAGIC = b"TTLsnap\x00"
_VERSION = 3
_MAX_BYTES = 1 << 62
# magic, version, rank, slots, takeovers, slot bytes, values bytes, description capacity,
# description bytes, file bytes, checksum of the description, token of this file
_FIELDS = struct.Struct("<8sIIIIQQQQQQ16s")
_CHECKSUM = struct.Struct("<Q")
CHECKSUM_BYTES = _CHECKSUM.size
SUPERBLOCK_BYTES = _FIELDS.size + CHECKSUM_BYTES
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Superblock:
    """Sizes and token of a region."""

    rank: int
    num_slots: int
    num_takeovers: int
    """Number of takeovers. The highest with a valid description counts."""
    slot_bytes: int
    values_bytes: int
    """Maximum size of a slot's values and digests."""
    description_capacity: int
    """Maximum size of a description."""
    description_bytes: int
    description_sum: int
    token: bytes
    """16 bytes, unique to every creation and takeover."""

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        per_slot = ALIGNMENT + page_aligned(self.values_bytes) + self.slot_bytes
        return self.headers_start + self.num_slots * per_slot

    @property
    def headers_start(self) -> int:
        """Offset of the slot headers, after the descriptions."""
        return self.description_start(len(SUPERBLOCK_OFFSETS))

    def description_start(self, place: int) -> int:
        """Return the offset of a description."""
        return ALIGNMENT + place * self.description_capacity

    def encoded(self) -> bytes:
        """Return the superblock's bytes with their checksum."""
        return add_checksum(
            _FIELDS.pack(
                *(_MAGIC, _VERSION, self.rank, self.num_slots, self.num_takeovers),
                *(self.slot_bytes, self.values_bytes, self.description_capacity),
                *(self.description_bytes, self.file_bytes),
                *(self.description_sum, self.token),
            )
        )


def read_superblocks(path: Path, mapped: mmap.mmap) -> dict[int, Superblock]:
    """Return the valid superblocks by place, checked against the file's length. Raises
    DamagedSnapshot if there is none."""
    superblocks: dict[int, Superblock] = {}
    problem = DamagedSnapshot(f"{path} is damaged: it does not begin like a snapshot.")
    for place, start in enumerate(SUPERBLOCK_OFFSETS):
        if mapped[start : start + len(_MAGIC)] == _MAGIC:
            try:
                superblocks[place] = _read(path, mapped, start)
            except DamagedSnapshot as error:
                problem = error
    if not superblocks:
        raise problem
    return superblocks


def page_aligned(size: int) -> int:
    """Round up to a whole page."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def add_checksum(content: bytes) -> bytes:
    """Append the checksum to `content`. The result is never all zeros, so fresh memory is
    invalid."""
    return content + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content))


def verify_checksum(content: memoryview) -> bytes | None:
    """Return the content without its checksum; None if that does not match."""
    fields = bytes(content[: -_CHECKSUM.size])
    (checksum,) = _CHECKSUM.unpack(content[-_CHECKSUM.size :])
    return fields if xxhash.xxh3_64_intdigest(fields) == checksum else None


def allocate_file(path: Path, file_bytes: int, what: str) -> mmap.mmap:
    """Create a file with all its memory allocated, and map it. Raises InsufficientMemory, naming
    `what`."""
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
            raise InsufficientMemory(
                what, needed=file_bytes, available=available, where=str(path.parent)
            ) from error
        raise
    finally:
        os.close(descriptor)


def map_file(path: Path, writable: bool) -> mmap.mmap:
    """Map an existing file. Raises DamagedSnapshot unless it is a regular file of this user that
    can hold a superblock."""
    try:
        flags = os.O_RDWR if writable else os.O_RDONLY
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedSnapshot(f"{path} cannot be opened: {error}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise DamagedSnapshot(f"{path} is not a file of user {os.getuid()}.")
        if status.st_size < ALIGNMENT:
            raise DamagedSnapshot(f"{path} is damaged: it has only {status.st_size} bytes.")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(descriptor, status.st_size, mmap.MAP_SHARED, protection)
    finally:
        os.close(descriptor)


class InsufficientMemory(OSError):
    """Too little shared memory; nothing was allocated."""

    def __init__(self, what: str, *, needed: int, available: int, where: str) -> None:
        self.needed, self.available = needed, available
        super().__init__(
            f"{what} needs {needed / 2**20:.1f} MiB of shared memory, but {where} has "
            f"{available / 2**20:.1f} MiB available. Free memory (`torchtitan-lite inspect --shm` "
            "lists leftover snapshots), or snapshot to disk only."
        )


def check_capacity(folder: Path, needed: int, what: str) -> None:
    """Raise InsufficientMemory unless the tmpfs of `folder` and the machine have `needed` bytes
    available.

    Ranks of a machine share both, so the first one may check the sum before any allocates.
    """
    for where, available in (
        (f"the tmpfs of {folder}", _free_on(folder)),
        ("the machine", _memory_available()),
        ("the memory limit of this process's cgroup", _cgroup_available()),
    ):
        if available is not None and available < needed:
            raise InsufficientMemory(what, needed=needed, available=available, where=where)


@dataclass(frozen=True)
class _CgroupVersion:
    """Files and fields in which a cgroup version reports memory."""

    controllers: str
    """Controller field of its line in /proc/self/cgroup."""
    folder: str
    limit: str
    used: str
    cache: str
    """Field of memory.stat with reclaimable page cache, which counts as used."""


_CGROUP_VERSIONS = (
    _CgroupVersion("", "", "memory.max", "memory.current", "inactive_file"),
    _CgroupVersion("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
          "total_inactive_file"),
)  # fmt: skip


def _read(path: Path, mapped: mmap.mmap, start: int) -> Superblock:
    with memoryview(mapped) as view:
        content = verify_checksum(view[start : start + SUPERBLOCK_BYTES])
    if content is None:
        raise DamagedSnapshot(f"{path} is damaged: its superblock's checksum is wrong.")
    _, version, rank, num_slots, num_takeovers, *sizes, file_bytes, description_sum, token = (
        _FIELDS.unpack(content)
    )
    if version != _VERSION:
        raise DamagedSnapshot(f"{path} has version {version}; this version reads {_VERSION}.")
    slot_bytes, values_bytes, description_capacity, description_bytes = sizes
    superblock = Superblock(
        rank=rank,
        num_slots=num_slots,
        num_takeovers=num_takeovers,
        slot_bytes=slot_bytes,
        values_bytes=values_bytes,
        description_capacity=description_capacity,
        description_bytes=description_bytes,
        description_sum=description_sum,
        token=token,
    )
    sound = 0 < num_slots <= MAX_SLOTS and max(sizes) < _MAX_BYTES
    sound = sound and not any(size % ALIGNMENT for size in sizes[:3])
    sound = sound and description_bytes <= description_capacity
    if not sound or not superblock.file_bytes == file_bytes == len(mapped):
        raise DamagedSnapshot(
            f"{path} is damaged: {num_slots} slots of {slot_bytes} bytes do not fit its "
            f"{len(mapped)} bytes."
        )
    return superblock


def _free_on(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _memory_available() -> int | None:
    """Return MemAvailable of the kernel, in bytes."""
    try:
        lines = _MEMINFO.read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _cgroup_available() -> int | None:
    """Return the smallest remainder under the limits of this process's cgroups and their
    ancestors."""
    try:
        lines = [line.split(":", 2) for line in _OWN_CGROUP.read_text().splitlines()]
    except OSError:
        return None
    left = []
    for kind in _CGROUP_VERSIONS:
        for _, controllers, path in (line for line in lines if len(line) == 3):
            if kind.controllers in controllers.split(","):
                root = _CGROUPS / kind.folder
                group = root / path.lstrip("/")
                above = [folder for folder in group.parents if folder.is_relative_to(root)]
                left += [_left_in(folder, kind) for folder in (group, *above)]
    return min((bytes_ for bytes_ in left if bytes_ is not None), default=None)


def _left_in(folder: Path, kind: _CgroupVersion) -> int | None:
    """Return the remainder of one cgroup; None if it has no limit."""
    try:
        limit = int((folder / kind.limit).read_text())
        used = int((folder / kind.used).read_text())
        statistics = (folder / "memory.stat").read_text().split()
        cache = int(statistics[statistics.index(kind.cache) + 1])
    except (OSError, ValueError, IndexError):
        # "max" is not a number.
        return None
    return max(0, limit - used + cache)
