"""A small file by which processes of several machines agree who holds it, in a folder or in an
object store.

File locks are not needed, because those of shared filesystems do not always work: one process
creates the file, and others see that it is renewed. Times are those of one clock, the storage's or
the reader's own. Layer: above errors.
"""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchtitan_lite.errors import ConfigError

_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True)
class Sight:
    """What a reader saw."""

    content: bytes
    stamp: Hashable
    """Changes with each renewal."""


class LeaseFile(Protocol):
    """The file. All methods raise OSError if the storage fails."""

    where: str
    renew_s: float
    """Interval between renewals by its holder."""
    lost_s: float
    """Time without a renewal after which the holder counts as lost."""

    def look(self) -> Sight | None:
        """Read the file; None if there is none."""
        ...

    def create(self, content: bytes) -> bool:
        """Create the file. Return False, and change nothing, if it exists."""
        ...

    def replace(self, content: bytes) -> None:
        """Write the file, whatever it holds."""
        ...

    def renew(self, content: bytes) -> None:
        """Change the stamp of the file, whose content is that of the caller."""
        ...

    def remove(self) -> None:
        """Remove the file if it exists."""
        ...

    def age_s(self) -> float:
        """Return at least how long ago the file was renewed."""
        ...

    def excluding(self) -> Any:
        """Return a context in which no other process of this machine is, if locks work."""
        ...


def open_lease_file(folder: str, name: str) -> LeaseFile:
    """Return the file `name` in a folder or at a URL. Raises ConfigError for a URL whose package is
    not installed."""
    if "://" in folder:
        return _StoredFile(f"{folder.rstrip('/')}/{name}")
    return _LocalFile(Path(folder) / name)


class _LocalFile:
    """A file in a folder, which several machines may have mounted."""

    renew_s, lost_s = 5.0, 30.0

    def __init__(self, path: Path) -> None:
        self._path, self.where = path, str(path)

    def look(self) -> Sight | None:
        try:
            # Opening asks a network filesystem for the present attributes.
            with self._path.open("rb") as file:
                content = file.read()
                status = os.fstat(file.fileno())
        except FileNotFoundError:
            return None
        return Sight(content, (status.st_mtime_ns, status.st_ino, content))

    def create(self, content: bytes) -> bool:
        draft = self._draft(content)
        try:
            # In place of a rename, because it fails if the name exists.
            os.link(draft, self._path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            return self._create_without_links(content)
        finally:
            draft.unlink(missing_ok=True)
        return True

    def replace(self, content: bytes) -> None:
        draft = self._draft(content)
        try:
            os.replace(draft, self._path)
        finally:
            draft.unlink(missing_ok=True)

    def renew(self, content: bytes) -> None:
        # Needs no space on the disk.
        os.utime(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def age_s(self) -> float:
        clock = self._draft(b"")
        try:
            return max(0.0, clock.stat().st_mtime - self._path.stat().st_mtime)
        except FileNotFoundError:
            return 0.0
        finally:
            clock.unlink(missing_ok=True)

    @contextmanager
    def excluding(self) -> Iterator[None]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _draft(self, content: bytes) -> Path:
        draft = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        try:
            with draft.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return draft

    def _create_without_links(self, content: bytes) -> bool:
        # A reader may see it empty, which it takes for a file that was just created.
        try:
            with self._path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True


class _StoredFile:
    """A file in an object store, through fsspec."""

    renew_s, lost_s = 15.0, 90.0

    def __init__(self, url: str) -> None:
        self.where = url
        try:
            from fsspec.core import url_to_fs

            found, self._path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url} cannot be opened: {error}") from None
        self._fs: Any = found
        self._count = 0

    def look(self) -> Sight | None:
        self._fs.invalidate_cache()
        try:
            content = bytes(self._fs.cat_file(self._path))
        except FileNotFoundError:
            return None
        return Sight(content.rstrip(), content)

    def create(self, content: bytes) -> bool:
        if self.look() is not None:
            return False
        try:
            # Conditional where the store supports it; elsewhere the caller reads it again.
            self._fs.pipe_file(self._path, content, mode="create")
        except FileExistsError:
            return False
        except (NotImplementedError, TypeError, ValueError):
            self.replace(content)
        return True

    def replace(self, content: bytes) -> None:
        self._fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(self._path, content)

    def renew(self, content: bytes) -> None:
        # JSON may end with spaces, whose number is the stamp.
        self._count = (self._count + 1) % 64
        self._fs.pipe_file(self._path, content + b" " * self._count)

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path)

    def age_s(self) -> float:
        return 0.0

    @contextmanager
    def excluding(self) -> Iterator[None]:
        yield


def wait_for_change(file: LeaseFile, seen: Sight) -> Sight | None:
    """Return what the file holds once it differs from `seen`, or `seen` itself if it does not
    within the time after which its holder counts as lost."""
    until_s = time.monotonic() + max(0.0, file.lost_s - file.age_s())
    while True:
        sight = file.look()
        if sight is None or sight.stamp != seen.stamp:
            return sight
        if time.monotonic() >= until_s:
            return seen
        time.sleep(min(0.5, file.renew_s / 10))
