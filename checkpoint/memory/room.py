"""How much memory may still be taken, before any is: a full tmpfs or a memory limit ends a process.

Layer: imports nothing of the project.
"""

import os
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


def _cgroup_available() -> int | None:
    """The least that is left under the limits of this process's cgroup (version 2) and those
    above it. Page cache counts as used there, but the inactive part goes when memory is asked."""
    try:
        line = next(x for x in _OWN_CGROUP.read_text().splitlines() if x.startswith("0::"))
    except (OSError, StopIteration):
        return None
    group = _CGROUPS / line[3:].lstrip("/")
    least = None
    for folder in (group, *group.parents):
        if not folder.is_relative_to(_CGROUPS):
            break
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit == "max":
                continue
            used = int((folder / "memory.current").read_text())
            statistics = (folder / "memory.stat").read_text().split()
            cache = int(statistics[statistics.index("inactive_file") + 1])
            left = max(0, int(limit) - used + cache)
        except (OSError, ValueError, IndexError):
            continue
        least = left if least is None else min(least, left)
    return least
