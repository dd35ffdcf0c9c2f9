"""A small file by which processes of several machines agree on its holder, in a folder or in an
object store.

File locks are not needed, because those of shared filesystems do not always work: one process
creates the file, and others see that it is renewed. Times are those of one clock, the storage's or
the reader's own.
"""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.urls import join_location, local_path

_SETTLE_S = 1.0
"""After a write that is not conditional, time in which another process that has seen no file may
still write."""
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class NoHardLinks(OSError):
    """The filesystem has no hard links."""


@dataclass(frozen=True)
class Sight:
    """State of a lease file as a reader saw it."""

    content: bytes
    stamp: Hashable
    """Changes with each renewal."""


class LeaseFile(Protocol):
    """The file. All methods raise OSError if the storage fails."""

    where: str
    unchanged: tuple[Hashable, float] | None
    """Stamp that a reader waiting for a change has seen last, and since when (time.monotonic())."""
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

    def last_sign(self) -> str:
        """Describe when the file was renewed, for display. Never raises."""
        ...

    def excluding(self) -> AbstractContextManager[bool]:
        """Return a context in which no other process of this machine is if its value is true: locks
        may not work."""
        ...


def lease_files(folder: str, pattern: str) -> list[LeaseFile]:
    """Return the files whose names match a glob pattern in a folder or at a URL. Raises OSError."""
    if (path := local_path(folder)) is not None:
        return [_LocalFile(file) for file in sorted(path.glob(pattern))]
    names = _StoredFile(join_location(folder, pattern)).matching()
    return [_StoredFile(join_location(folder, name)) for name in names]


def open_lease_file(folder: str, name: str) -> LeaseFile:
    """Return the file `name` in a folder or at a URL. Raises ConfigError for a URL whose package is
    not installed."""
    if (path := local_path(folder)) is not None:
        return _LocalFile(path / name)
    return _StoredFile(join_location(folder, name))


class _LocalFile:
    """A file in a folder, which several machines may have mounted."""

    renew_s, lost_s = 5.0, 30.0

    def __init__(self, path: Path) -> None:
        self._path, self.where = path, str(path)
        self.unchanged: tuple[Hashable, float] | None = None

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
        try:
            return create_whole(self._path, content, draft=self._draft_path())
        except NoHardLinks:
            return self._create_without_links(content)

    def replace(self, content: bytes) -> None:
        with _draft(self._draft_path(), content) as draft:
            os.replace(draft, self._path)

    def renew(self, content: bytes) -> None:
        # Needs no space on the disk.
        os.utime(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def age_s(self) -> float:
        try:
            return max(0.0, self._now_s() - self._path.stat().st_mtime)
        except FileNotFoundError:
            return 0.0

    def last_sign(self) -> str:
        with suppress(OSError):
            return f"last sign of life {self.age_s():.0f} s ago"
        return "last sign of life unknown"

    @contextmanager
    def excluding(self) -> Iterator[bool]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            is_locked = False
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                is_locked = True
            yield is_locked
        finally:
            os.close(descriptor)

    def _now_s(self) -> float:
        """Return the time of the filesystem's clock, or of this machine's if nothing can be written
        there."""
        with suppress(OSError), _draft(self._draft_path(), b"") as clock:
            return clock.stat().st_mtime
        return time.time()

    def _draft_path(self) -> Path:
        return self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")

    def _create_without_links(self, content: bytes) -> bool:
        # A reader may see it empty, which it takes for a file that was just created.
        try:
            with self._path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True


def create_whole(path: Path, content: bytes, *, draft: Path) -> bool:
    """Create a file whose content is durable and never visible in part, by way of the new file
    `draft` in the same folder. Return False, and change nothing, if it exists. Raises OSError,
    NoHardLinks among them."""
    with _draft(draft, content):
        try:
            # In place of a rename, because it fails if the name exists.
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                raise NoHardLinks(error.errno, error.strerror) from error
            raise
    return True


@contextmanager
def _draft(path: Path, content: bytes) -> Iterator[Path]:
    """Write a new file durably, which is removed after the block unless it was renamed."""
    try:
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


class _StoredFile:
    """A file in an object store, through fsspec."""

    renew_s, lost_s = 15.0, 90.0

    def __init__(self, url: str) -> None:
        self.where = url
        self.unchanged: tuple[Hashable, float] | None = None
        try:
            from fsspec.core import url_to_fs

            filesystem, self._path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url} cannot be opened: {error}") from None
        self._fs: Any = filesystem
        self._count = 0

    def look(self) -> Sight | None:
        try:
            with _storage_errors():
                self._fs.invalidate_cache()
                content = bytes(self._fs.cat_file(self._path))
        except FileNotFoundError:
            return None
        return Sight(content.rstrip(), content)

    def create(self, content: bytes) -> bool:
        if self.look() is not None:
            return False
        try:
            with _storage_errors():
                self._make_folder()
                self._fs.pipe_file(self._path, content, mode="create")
        except FileExistsError:
            return False
        except OSError:
            # The store has no conditional writes, or another process was first: clients report both
            # in many ways.
            if self.look() is None:
                self.replace(content)
                time.sleep(_SETTLE_S)
        sight = self.look()
        return sight is not None and sight.content == content

    def replace(self, content: bytes) -> None:
        with _storage_errors():
            self._make_folder()
            self._fs.pipe_file(self._path, content)

    def renew(self, content: bytes) -> None:
        # JSON may end with spaces, whose number is the stamp.
        self._count = (self._count + 1) % 64
        with _storage_errors():
            self._fs.pipe_file(self._path, content + b" " * self._count)

    def remove(self) -> None:
        with suppress(FileNotFoundError), _storage_errors():
            self._fs.rm_file(self._path)

    def age_s(self) -> float:
        return 0.0

    def last_sign(self) -> str:
        return f"which renews its lease every {self.renew_s:.0f} s"

    @contextmanager
    def excluding(self) -> Iterator[bool]:
        yield False

    def matching(self) -> list[str]:
        """Return the names that match this file's, which is a pattern."""
        with _storage_errors():
            self._fs.invalidate_cache()
            return sorted(path.rpartition("/")[2] for path in self._fs.glob(self._path))

    def _make_folder(self) -> None:
        self._fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Raise OSError for any error of a storage's client, whose network errors often are none."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def wait_for_change(file: LeaseFile, seen: Sight) -> Sight | None:
    """Return what the file holds once it differs from `seen`, or `seen` itself if it does not
    within the time after which its holder counts as lost. Time in which an earlier call with this
    `file` has waited for the same counts."""
    now_s = time.monotonic()
    if file.unchanged is None or file.unchanged[0] != seen.stamp:
        file.unchanged = seen.stamp, now_s
    until_s = min(file.unchanged[1] + file.lost_s, now_s + file.lost_s - file.age_s())
    while True:
        sight = file.look()
        if sight is None or sight.stamp != seen.stamp:
            return sight
        if time.monotonic() >= until_s:
            return seen
        time.sleep(min(0.5, file.renew_s / 10))
