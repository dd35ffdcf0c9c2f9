"""The operations on files and folders that checkpoints are made of, in one place.

Tests put a class in its place that records, kills, or forgets what was not synced, so nothing in
storage/ or background/ changes a stored file in another way. Layer: imports nothing of the project.
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
    """Real files. All methods raise OSError as the system does."""

    def create(self, path: Path, *, direct: bool = False) -> int:
        """A descriptor of a new, empty file for writing. `direct` asks for O_DIRECT, and raises
        OSError (EINVAL) where the filesystem has none; then no file is left. A link in the way is
        an error (ELOOP), lest a file elsewhere be emptied."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)

    def pwrite(self, descriptor: int, content: bytes | memoryview, offset: int) -> None:
        """Write all of `content`. Through O_DIRECT all three must be multiples of 4096."""
        view = memoryview(content).cast("B")
        while len(view):
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written

    def pwritev(self, descriptor: int, contents: Sequence[memoryview], offset: int) -> None:
        """Write all of several buffers, one behind the other."""
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
        """Cut an open file to `length` bytes."""
        os.ftruncate(descriptor, length)

    def fsync(self, descriptor: int) -> None:
        """Make the bytes of an open file durable."""
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
        """Rename a file or folder; a file in the way is replaced, a full folder is an error."""
        os.rename(path, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Make one folder."""
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def listdir(self, path: Path) -> list[str]:
        """The names in a folder, in order."""
        return sorted(os.listdir(path))

    def read(self, path: Path) -> bytes:
        """All bytes of a file."""
        return path.read_bytes()

    def exists(self, path: Path) -> bool:
        """Whether there is something of this name."""
        return os.path.lexists(path)

    def write_file(self, path: Path, content: bytes) -> None:
        """A durable file, seen whole or not at all; its name is durable when the folder is."""
        temporary = path.with_name(path.name + ".new")
        descriptor = self.create(temporary)
        try:
            self.pwrite(descriptor, content, 0)
            self.fsync(descriptor)
        finally:
            self.close(descriptor)
        self.rename(temporary, path)

    def make_folders(self, path: Path) -> None:
        """Make a folder and those above it, each with a durable name. It may exist."""
        if self.exists(path):
            return
        if path.parent != path:
            self.make_folders(path.parent)
        with suppress(FileExistsError):
            self.mkdir(path)
        self.sync_folder(path.parent)

    def rmtree(self, path: Path) -> None:
        """Remove a folder with all that is in it, or whatever else has its name: a link is removed,
        and not followed. What somebody else removes meanwhile is no error, nor is a folder that is
        not there."""
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                self.unlink(path)
                return
            for name in self.listdir(path):
                self.rmtree(path / name)
            self.rmdir(path)


def has_no_direct_io(error: OSError) -> bool:
    """Whether opening or writing failed since the filesystem does no direct I/O."""
    return error.errno in _NO_DIRECT
