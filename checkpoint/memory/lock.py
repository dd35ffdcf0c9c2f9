"""A lock per rank: who holds it may write this rank's part. Layer: imports nothing of the project.

A flock ends with the process that holds it, however that ends. Invariant: lock files are never
removed while a run may use them, since a lock on an unlinked file excludes nobody.
"""

import fcntl
import os
import time
from pathlib import Path

_POLL_S = 0.02


class RankLock:
    """The lock of one rank in the folder of its run."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank-{rank:05d}.lock"
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Take the lock if nobody holds it. Its file then names this process."""
        if self._descriptor is not None:
            return True
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return True

    def acquire(self, timeout_s: float) -> bool:
        """Take the lock, waiting for who holds it; False when the time is up."""
        deadline = time.monotonic() + timeout_s
        while not self.try_acquire():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until nobody holds the lock, and leave it free; False when the time is up."""
        if not self.acquire(timeout_s):
            return False
        self.release()
        return True

    def owner(self) -> int | None:
        """The process that holds the lock; None when nobody does."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(descriptor, 32, 0)
            return int(text) if text.isdigit() else 0
        else:
            return None
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Give the lock back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
