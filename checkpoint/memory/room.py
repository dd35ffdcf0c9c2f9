"""How much memory may still be taken, before any is: a full tmpfs or a memory limit ends a process.

Layer: imports nothing of the project.
"""

import os
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


class ShortOfMemory(OSError):
    """Shared memory was not reserved, since there is too little. Nothing is left behind."""

    def __init__(self, what: str, *, needed: int, available: int, where: str) -> None:
        self.needed, self.available = needed, available
        super().__init__(
            f"{what} needs {needed / 2**20:.1f} MiB of shared memory, but {where} has "
            f"{available / 2**20:.1f} MiB left. Free memory (`inspect_checkpoint --shm` lists "
            "snapshots that are left), or snapshot to disk only."
        )


def require_room(folder: Path, needed: int, what: str) -> None:
    """Raise ShortOfMemory unless `needed` bytes fit into the tmpfs of `folder` and into memory.

    The ranks of a machine share both: the first of them may ask for the sum before any reserves.
    """
    for where, available in (
        (f"the tmpfs of {folder}", _free_on(folder)),
        ("the machine", _memory_available()),
        ("the memory limit of this process's cgroup", _cgroup_available()),
    ):
        if available is not None and available < needed:
            raise ShortOfMemory(what, needed=needed, available=available, where=where)


def _free_on(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _memory_available() -> int | None:
    """What the kernel says can be taken without swapping, in bytes."""
    try:
        lines = _MEMINFO.read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class _Kind:
    """How a version of cgroups tells of memory."""

    controllers: str
    """Of its line in /proc/self/cgroup."""
    folder: str
    limit: str
    used: str
    cache: str
    """In memory.stat: the page cache that goes when memory is asked for, and counts as used."""


_KINDS = (
    _Kind("", "", "memory.max", "memory.current", "inactive_file"),
    _Kind("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
          "total_inactive_file"),
)  # fmt: skip


def _cgroup_available() -> int | None:
    """The least that is left under the limits of this process's cgroups and those above them."""
    try:
        lines = [line.split(":", 2) for line in _OWN_CGROUP.read_text().splitlines()]
    except OSError:
        return None
    left = []
    for kind in _KINDS:
        for _, controllers, path in (line for line in lines if len(line) == 3):
            if kind.controllers in controllers.split(","):
                root = _CGROUPS / kind.folder
                group = root / path.lstrip("/")
                above = [folder for folder in group.parents if folder.is_relative_to(root)]
                left += [_left_in(folder, kind) for folder in (group, *above)]
    return min((bytes_ for bytes_ in left if bytes_ is not None), default=None)


def _left_in(folder: Path, kind: _Kind) -> int | None:
    """None where there is no limit."""
    try:
        limit = int((folder / kind.limit).read_text())
        used = int((folder / kind.used).read_text())
        statistics = (folder / "memory.stat").read_text().split()
        cache = int(statistics[statistics.index(kind.cache) + 1])
    except (OSError, ValueError, IndexError):
        # "max" is no number.
        return None
    return max(0, limit - used + cache)
