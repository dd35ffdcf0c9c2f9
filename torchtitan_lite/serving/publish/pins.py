"""Pins of versions in shared memory: a reader's shared lock on the slot of a version, which the
publisher does not overwrite meanwhile.

A pin is a flock, which the kernel releases when its holder ends for any reason.
"""

import fcntl
from pathlib import Path

from torchtitan_lite.checkpoint.shared_memory import release_flock, try_flock


class SlotLock:
    """Lock of one slot: shared by its readers, exclusive for the publisher."""

    def __init__(self, path: Path, *, exclusive: bool) -> None:
        self._path, self._exclusive = path, exclusive
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Acquire the lock, unless the other side holds it. The publisher creates its file; a
        reader raises FileNotFoundError if there is none."""
        kind = fcntl.LOCK_EX if self._exclusive else fcntl.LOCK_SH
        self._descriptor = try_flock(self._path, kind, create=self._exclusive)
        return self._descriptor is not None

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._descriptor is not None:
            release_flock(self._descriptor)
            self._descriptor = None
