"""Heartbeats of the ranks of a replica, in memory shared with the launcher.

A rank writes its heartbeat at each change of phase, in microseconds and without a system call. The
launcher reads it at any time, also from a rank that is stopped or hung. The memory is an anonymous
file (memfd), which disappears with the launcher. Invariant: a torn or damaged heartbeat is never
returned.
"""

import math
import mmap
import os
import struct
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.core.phases import Phase

HEARTBEATS = "TORCHTITAN_LITE_HEARTBEATS"
"""Environment variable: the file into which the ranks of a replica write their heartbeats."""
_MAGIC = 0x54505531
_FORMAT = struct.Struct("<IIIqddd")
"""Magic number, process id, phase, step, then seconds: start of the phase, its limit, and the time
limit of a stopped rank. Phases without a limit have infinity."""
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = 64
_PHASES = tuple(Phase)
_LONGEST_S = 1e9


@dataclass(frozen=True)
class Heartbeat:
    """Phase of a rank, written when the phase began."""

    pid: int
    """Process of the rank."""
    phase: Phase
    step: int
    """Last committed step."""
    since_s: float
    """Start of the phase, by `time.monotonic`, which all processes of a machine share."""
    limit_s: float
    """Time limit of the phase in seconds; infinite if the phase has none."""
    hang_timeout_s: float
    """Time limit of a stopped rank in seconds, in any phase."""


class HeartbeatWriter:
    """Phase listener that writes the heartbeats of this rank."""

    def __init__(
        self, path: Path | str, rank: int, limits: Mapping[Phase, float], hang_timeout_s: float
    ) -> None:
        """Open the heartbeat file. `limits` holds the time limits of phases in seconds. Raises
        OSError if the file cannot be written or has no slot for `rank`."""
        self._limits = [limits.get(phase, math.inf) for phase in _PHASES]
        self._hang_timeout_s, self._start = hang_timeout_s, rank * _SLOT_BYTES
        with open(path, "r+b") as file:
            try:
                self._memory = mmap.mmap(file.fileno(), 0)
            except ValueError as error:
                raise OSError(f"{path}: {error}") from None
        if len(self._memory) < self._start + _SLOT_BYTES:
            raise OSError(f"{path} has no slot for rank {rank}.")

    def entered(self, phase: Phase, step: int) -> None:
        """Write a heartbeat. See `phases.PhaseListener`."""
        index = _PHASES.index(phase)
        values = _FORMAT.pack(
            _MAGIC,
            os.getpid(),
            index,
            step,
            time.monotonic(),
            self._limits[index],
            self._hang_timeout_s,
        )
        slot = values + _CHECKSUM.pack(zlib.crc32(values))
        self._memory[self._start : self._start + len(slot)] = slot

    def erase(self) -> None:
        """Erase the heartbeat of a rank that ends its training: it has no time limit any more."""
        size = _FORMAT.size + _CHECKSUM.size
        self._memory[self._start : self._start + size] = bytes(size)


class HeartbeatMemory:
    """Heartbeats of all ranks of a replica, on the side of the launcher."""

    def __init__(self, num_ranks: int) -> None:
        """Create the shared memory. Raises OSError."""
        self._file = os.memfd_create("heartbeats")
        os.ftruncate(self._file, num_ranks * _SLOT_BYTES)
        self._memory = mmap.mmap(self._file, num_ranks * _SLOT_BYTES)

    @property
    def path(self) -> str:
        """Path under which the ranks open the memory."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def read(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of a rank; None if there is no valid one."""
        return parse(self._memory[rank * _SLOT_BYTES : (rank + 1) * _SLOT_BYTES])

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self._file)


def parse(slot: bytes) -> Heartbeat | None:
    """Parse a heartbeat. Return None if it was never written, is being written at this moment, or
    is damaged."""
    size = _FORMAT.size
    if len(slot) < size + _CHECKSUM.size:
        return None
    if _CHECKSUM.unpack_from(slot, size)[0] != zlib.crc32(slot[:size]):
        return None
    magic, pid, index, step, since_s, limit_s, hang_timeout_s = _FORMAT.unpack_from(slot)
    if magic != _MAGIC or index >= len(_PHASES) or step < 0:
        return None
    now_s = time.monotonic()
    if not now_s - _LONGEST_S < since_s <= now_s:
        return None
    if not (limit_s > 0 and 0 < hang_timeout_s < _LONGEST_S):
        return None
    return Heartbeat(pid, _PHASES[index], step, since_s, limit_s, hang_timeout_s)
