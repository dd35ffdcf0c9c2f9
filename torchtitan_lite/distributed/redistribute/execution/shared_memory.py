"""Memory shared by the ranks of one machine: each writes its own region and reads the others'.

A region is a file on tmpfs, mapped by all ranks and unlinked at once, so that a process that dies
leaves nothing behind. Its first page holds the owner's counters of written and read buckets. Ranks
sleep on a counter with Linux's futex(2), which the standard library does not wrap: a rank that
spins would take the core from the ranks that it waits for. A rank locks its file with flock(2) for
as long as it lives, so that waiting ranks notice its death within a tenth of a second.

Invariant: a region is reserved before it is touched, so that a full tmpfs is an error and not a
SIGBUS. The counters rely on stores becoming visible in program order, as on x86-64
(`is_supported`).
"""

import ctypes
import fcntl
import mmap
import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_lite.core.errors import RedistributionError

FOLDER = Path("/dev/shm")

_PREFIX = "torchtitan_lite-redistribute-"

_PAGE = mmap.PAGESIZE

_WRITTEN, _READ = 0, 1
"""The counters of a region."""

_COUNTER_BYTES = 8

_NAME = re.compile(r"[0-9a-f]{32}")

_SPINS = 200
"""Polls of a counter before sleeping, if every rank has a core of its own: sleeping and waking take
longer than a small copy of a peer."""

_SYS_FUTEX = 202
"""Number of the system call on x86-64."""

_WAIT, _WAKE = 0, 1

_ALL = 0x7FFFFFFF


def is_supported() -> bool:
    """Whether this machine supports shared memory as used here."""
    return (
        sys.platform == "linux"
        and platform.machine() in ("x86_64", "AMD64")
        and os.access(FOLDER, os.W_OK)
    )


class SharedMemory:
    """The shared memory of the ranks of a process group on this machine."""

    def __init__(self, group: dist.ProcessGroup, region_bytes: int) -> None:
        """Every rank of the group must call it, with the same `region_bytes`. `peers` are the group
        ranks whose regions are mapped, and which have the same peers: only this rank if there is
        too little memory."""
        self.rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.region_bytes = region_bytes
        self.timeout_s = 300.0
        token = torch.frombuffer(bytearray(secrets.token_hex(16).encode()), dtype=torch.uint8)
        dist.broadcast(token, group=group, group_src=0)
        name = bytes(token.tolist()).decode("ascii", "replace")
        if not _NAME.fullmatch(name):
            raise RedistributionError(f"{name!r} is no name of a shared region.")
        paths = [FOLDER / f"{_PREFIX}{name}-{rank}" for rank in range(size)]
        self.problem: str | None = None
        self._maps: dict[int, mmap.mmap] = {}
        self._files: dict[int, BinaryIO] = {}
        try:
            try:
                self._create(paths[self.rank])
            except OSError as error:
                self.problem = str(error)
                paths[self.rank].unlink(missing_ok=True)
            dist.barrier(group)
            for rank, path in enumerate(paths):
                if rank != self.rank and self.problem is None:
                    # A rank on another machine, or one that had too little memory, is not seen.
                    with suppress(OSError, ValueError):
                        self._open(rank, path)
            seen = torch.tensor([int(rank in self._maps) for rank in range(size)])
            sees = [torch.empty_like(seen) for _ in range(size)]
            # Also the barrier after which the names may go.
            dist.all_gather(sees, seen, group=group)
        finally:
            paths[self.rank].unlink(missing_ok=True)
        matrix = torch.stack(sees).bool()
        self.peers = _peers(matrix, self.rank)
        self.covers_all = bool(matrix.all())
        """Whether all ranks of the group share memory."""
        self._counters = {
            rank: np.frombuffer(mapped, np.int64, 2) for rank, mapped in self._maps.items()
        }
        # The lower half of a counter, on which others sleep.
        self._addresses = {rank: counter.ctypes.data for rank, counter in self._counters.items()}
        has_core = len(self.peers) <= len(os.sched_getaffinity(0))
        self._spins = _SPINS if has_core else 1
        self._data = {
            rank: np.frombuffer(mapped, np.uint8, offset=_PAGE)
            for rank, mapped in self._maps.items()
        }
        self.count = 0
        """Buckets exchanged so far."""
        self.broken = False
        """Whether an exchange was interrupted, after which ranks no longer agree on `count`."""
        self.pending: dict[int, tuple[Iterable[int], int]] = {}
        """Per slot: readers of this rank's data, and its bucket."""

    def _create(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.region_bytes + _PAGE)
        finally:
            os.close(descriptor)
        self._open(self.rank, path)
        fcntl.flock(self._files[self.rank], fcntl.LOCK_EX)

    def _open(self, rank: int, path: Path) -> None:
        """Map the region of a rank. Its file stays open for the lock on it."""
        file = path.open("r+b")
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._maps[rank] = mmap.mmap(file.fileno(), self.region_bytes + _PAGE, flags)
        self._files[rank] = file

    @property
    def slot_bytes(self) -> int:
        """Return a slot. A region has two: one is read while the other is written."""
        return self.region_bytes // 2

    def region(self, rank: int) -> np.ndarray:
        """Return a peer's region; only its owner writes to it."""
        return self._data[rank]

    def signal_written(self, bucket: int) -> None:
        """Signal that this rank has written its part of a bucket, and of all before."""
        self._signal(_WRITTEN, bucket)

    def signal_read(self, bucket: int) -> None:
        """Signal that this rank has read a bucket and those before."""
        self._signal(_READ, bucket)

    def wait_written(self, ranks: Iterable[int], bucket: int) -> None:
        """Wait until `ranks` have written their part of a bucket. Raises RedistributionError naming
        a rank that does not."""
        self._wait(ranks, _WRITTEN, bucket)

    def wait_read(self, ranks: Iterable[int], bucket: int) -> None:
        """Wait until `ranks` have read a bucket. Raises as `wait_written` does."""
        self._wait(ranks, _READ, bucket)

    def _signal(self, counter: int, bucket: int) -> None:
        self._counters[self.rank][counter] = bucket + 1
        _futex_wake(self._addresses[self.rank] + counter * _COUNTER_BYTES)

    def _wait(self, ranks: Iterable[int], counter: int, bucket: int) -> None:
        for rank in ranks:
            counters = self._counters[rank]
            turns, deadline = 0, 0.0
            while (known := int(counters[counter])) <= bucket:
                turns += 1
                if turns < self._spins:
                    os.sched_yield()
                    continue
                deadline = deadline or time.monotonic() + self.timeout_s
                problem = None
                if time.monotonic() > deadline:
                    problem = f"in {self.timeout_s:.0f} s: it does not take part"
                elif turns > self._spins and self._has_ended(rank):
                    problem = "and has ended"
                # It may have done so before it ended.
                if problem is not None and int(counters[counter]) <= bucket:
                    raise RedistributionError(
                        f"Rank {rank} of the group did not "
                        f"{'write' if counter == _WRITTEN else 'read'} its part of an exchange "
                        f"{problem}."
                    )
                _futex_wait(self._addresses[rank] + counter * _COUNTER_BYTES, known)

    def _has_ended(self, rank: int) -> bool:
        """Whether a peer has died, or left the group."""
        try:
            fcntl.flock(self._files[rank], fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._files[rank], fcntl.LOCK_UN)
        return True


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NAP = _Timespec(0, 100_000_000)

_syscall = ctypes.CDLL(None, use_errno=True).syscall

_syscall.restype = ctypes.c_long

_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
]


def _peers(sees: torch.Tensor, rank: int) -> frozenset[int]:
    """Return the ranks that see the same ones as `rank`, among them each other: they all have the
    same peers. `sees`: [rank, other], bool."""
    mutual = sees & sees.T
    same = (mutual == mutual[rank]).all(1) & mutual[rank]
    return frozenset(same.nonzero().flatten().tolist()) | {rank}


def _futex_wait(address: int, known: int) -> None:
    """Sleep while the 32 bits at `address` equal `known`, at most 0.1 s, so that long waits check
    the time."""
    _syscall(_SYS_FUTEX, address, _WAIT, known & 0xFFFFFFFF, ctypes.byref(_NAP), None, 0)


def _futex_wake(address: int) -> None:
    """Wake all sleepers on `address`, after its value was changed."""
    _syscall(_SYS_FUTEX, address, _WAKE, _ALL, None, None, 0)
