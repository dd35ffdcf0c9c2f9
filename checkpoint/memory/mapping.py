"""Files of shared memory, mapped: new ones with all their memory taken, and those that are there.

Layer: above room and superblock.
"""

import errno
import mmap
import os
import stat
from pathlib import Path

from torchtitan_lite.checkpoint.memory.room import ShortOfMemory
from torchtitan_lite.checkpoint.memory.superblock import ALIGNMENT
from torchtitan_lite.errors import DamagedSnapshot


def reserve(path: Path, file_bytes: int, what: str) -> mmap.mmap:
    """A new file of this size with all its memory taken. Raises ShortOfMemory for `what`."""
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
            raise ShortOfMemory(
                what, needed=file_bytes, available=available, where=str(path.parent)
            ) from error
        raise
    finally:
        os.close(descriptor)


def map_existing(path: Path, writable: bool) -> mmap.mmap:
    """Raises DamagedSnapshot where it is no file of this user that can hold a superblock."""
    try:
        flags = os.O_RDWR if writable else os.O_RDONLY
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedSnapshot(f"{path} cannot be opened: {error}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise DamagedSnapshot(f"{path} is no file of user {os.getuid()}.")
        if status.st_size < ALIGNMENT:
            raise DamagedSnapshot(f"{path} is damaged: it has only {status.st_size} bytes.")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(descriptor, status.st_size, mmap.MAP_SHARED, protection)
    finally:
        os.close(descriptor)
