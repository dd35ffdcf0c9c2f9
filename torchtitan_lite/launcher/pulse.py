"""What each rank of a replica does, in a piece of memory that it shares with its launcher.

A rank writes at each change of phase, in microseconds and without a system call; the launcher looks
when it likes, also at a rank that can do nothing any more. The memory is a file without a name,
which is gone with the launcher. Invariant: what is read is whole and makes sense, or is not told.

Layer: above phases.
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

from torchtitan_lite.phases import Phase

PULSES = "TORCHTITAN_LITE_PULSES"
"""Environment variable: the file into which the ranks of a replica write their pulses."""
_MAGIC = 0x54505531
_FORMAT = struct.Struct("<IIqddd")
"""Magic, phase, step, then seconds: when it was entered, its limit, and that of a rank's own
work. Phases without limit have infinity."""
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = 64
_PHASES = tuple(Phase)
_LONGEST_S = 1e9


@dataclass(frozen=True)
class Pulse:
    """What a rank has said last."""

    phase: Phase
    step: int
    """The last that was committed."""
    since_s: float
    """When the phase began, by `time.monotonic`, which all processes of a machine share."""
    limit_s: float
    """How long the phase may take; infinite where it may take as long as it will."""
    hang_timeout_s: float
    """How long a rank may be stopped, whatever its phase."""


class PulseWriter:
    """Tells the launcher of each phase of this rank. A listener of phases."""

    def __init__(
        self, path: Path | str, rank: int, limits: Mapping[Phase, float], hang_timeout_s: float
    ) -> None:
        """`limits` are those phases that have one, in seconds. Raises OSError when the file cannot
        be written, or has no place for `rank`."""
        self._limits = [limits.get(phase, math.inf) for phase in _PHASES]
        self._hang_timeout_s, self._start = hang_timeout_s, rank * _SLOT_BYTES
        with open(path, "r+b") as file:
            try:
                self._memory = mmap.mmap(file.fileno(), 0)
            except ValueError as error:
                raise OSError(f"{path}: {error}") from None
        if len(self._memory) < self._start + _SLOT_BYTES:
            raise OSError(f"{path} has no place for rank {rank}.")

    def entered(self, phase: Phase, step: int) -> None:
        """See `phases.PhaseListener`."""
        number = _PHASES.index(phase)
        values = _FORMAT.pack(
            _MAGIC, number, step, time.monotonic(), self._limits[number], self._hang_timeout_s
        )
        slot = values + _CHECKSUM.pack(zlib.crc32(values))
        self._memory[self._start : self._start + len(slot)] = slot


class PulseBoard:
    """The pulses of all ranks of a replica, as its launcher sees them."""

    def __init__(self, num_ranks: int) -> None:
        """Raises OSError."""
        self._file = os.memfd_create("pulses")
        os.ftruncate(self._file, num_ranks * _SLOT_BYTES)
        self._memory = mmap.mmap(self._file, num_ranks * _SLOT_BYTES)

    @property
    def path(self) -> str:
        """Where the ranks find it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def read(self, rank: int) -> Pulse | None:
        """The last pulse of a rank; None where there is none that makes sense."""
        return parse(self._memory[rank * _SLOT_BYTES : (rank + 1) * _SLOT_BYTES])

    def close(self) -> None:
        """Let the memory go."""
        self._memory.close()
        os.close(self._file)


def parse(slot: bytes) -> Pulse | None:
    """A pulse from its bytes; None where they were never written, are being written at this very
    moment, or are damaged."""
    size = _FORMAT.size
    if len(slot) < size + _CHECKSUM.size:
        return None
    if _CHECKSUM.unpack_from(slot, size)[0] != zlib.crc32(slot[:size]):
        return None
    magic, number, step, since_s, limit_s, hang_timeout_s = _FORMAT.unpack_from(slot)
    if magic != _MAGIC or number >= len(_PHASES) or step < 0:
        return None
    now_s = time.monotonic()
    if not now_s - _LONGEST_S < since_s <= now_s:
        return None
    if not (limit_s > 0 and 0 < hang_timeout_s < _LONGEST_S):
        return None
    return Pulse(_PHASES[number], step, since_s, limit_s, hang_timeout_s)
