"""File operations of checkpoints.

Tests replace `Files` by classes that record, kill, or lose unsynced data, so nothing in storage/ or
background/ modifies stored files in another way.
"""

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_MAX_BUFFERS = 512
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


class Files:
    """Operations on real files. All methods raise OSError."""

    def create(self, path: Path, *, direct: bool = False) -> int:
        """Create an empty file and return its descriptor. `direct` requests O_DIRECT and raises
        OSError (EINVAL), leaving no file, if the filesystem does not support it. A symbolic link
        raises ELOOP, so no file elsewhere is truncated."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)

    def pwrite(self, descriptor: int, content: bytes | memoryview, offset: int) -> None:
        """Write all of `content`. With O_DIRECT all three arguments must be multiples of 4096."""
        view = memoryview(content).cast("B")
        while len(view):
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written

    def pwritev(self, descriptor: int, contents: Sequence[memoryview], offset: int) -> None:
        """Write all of several buffers, consecutively."""
        views = [memoryview(content).cast("B") for content in contents if content.nbytes]
        while views:
            written = os.pwritev(descriptor, views[:_MAX_BUFFERS], offset)
            offset += written
            first = 0
            while first < len(views) and written >= len(views[first]):
                written -= len(views[first])
                first += 1
            views = views[first:]
            if written:
                views[0] = views[0][written:]

    def truncate(self, descriptor: int, length: int) -> None:
        """Truncate an open file to `length` bytes."""
        os.ftruncate(descriptor, length)

    def fsync(self, descriptor: int) -> None:
        """Make the content of an open file durable."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file or folder. Replaces a file; a non-empty folder is an error."""
        os.rename(path, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Create one folder."""
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def listdir(self, path: Path) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(os.listdir(path))

    def read(self, path: Path) -> bytes:
        """Return the content of a file."""
        return path.read_bytes()

    def exists(self, path: Path) -> bool:
        """Return whether the path exists, also as a dangling link."""
        return os.path.lexists(path)

    def write_file(self, path: Path, content: bytes) -> None:
        """Write a file atomically and durably; its name is durable once the folder is synced."""
        temporary = path.with_name(path.name + ".new")
        descriptor = self.create(temporary)
        try:
            self.pwrite(descriptor, content, 0)
            self.fsync(descriptor)
        finally:
            self.close(descriptor)
        self.rename(temporary, path)

    def make_folders(self, path: Path) -> None:
        """Create a folder and its parents, each with a durable name. It may exist."""
        if self.exists(path):
            return
        if path.parent != path:
            self.make_folders(path.parent)
        with suppress(FileExistsError):
            self.mkdir(path)
        self.sync_folder(path.parent)

    def rmtree(self, path: Path) -> None:
        """Remove a folder recursively, or a file or link; links are not followed. Missing entries
        are ignored, because another process may remove them too."""
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                self.unlink(path)
                return
            for name in self.listdir(path):
                self.rmtree(path / name)
            self.rmdir(path)


def has_no_direct_io(error: OSError) -> bool:
    """Return whether an operation failed because the filesystem does not support direct I/O."""
    return error.errno in _NO_DIRECT
