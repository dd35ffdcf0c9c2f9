"""The storage protocol, opening of storages, and the errors of reading from them.

A step is saved by many writers: each writes its part, then one commits. A token identifies an
attempt, so parts of an earlier attempt at the same step never enter a later one.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.safetensors_file import (
    BoxLocation,
    PartBox,
    Source,
    TokenBucket,
)
from torchtitan_lite.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    StorageUnavailable,
    is_permanent,
)
from torchtitan_lite.core.urls import local_path, split


class Storage(Protocol):
    """Protocol of local folders and object stores: what they do differently. `attempts` has the
    rest. All methods raise OSError on failure, whatever the client raises. A path such as
    "step-5/manifest.json" is relative to the root."""

    root: str
    """What `open_storage` opens it by, also in the writer process."""
    folder: Path | None
    """The root as a folder of this machine, whose files may be links; None if it is not one."""
    keeps_attempts: bool
    """Whether the files of a committed step stay in a subfolder named by the attempt's token."""

    def write(
        self,
        step: int,
        token: str,
        name: str,
        boxes: Sequence[PartBox],
        source: Source,
        *,
        direct: bool = True,
        rate: TokenBucket | None = None,
        tick: Callable[[], None] = ...,
    ) -> list[BoxLocation]:
        """Write a safetensors file of an attempt durably, as `write_safetensors` does. Without
        boxes there is no file, and the attempt can be announced. `tick` is called between chunks;
        a WriteAbandoned that it raises must pass through at once, not retried and not as
        OSError."""
        ...

    def announce(self, step: int, token: str, name: str, content: bytes) -> None:
        """Write an announcement of an attempt, atomically and durably, after everything that it
        announces. For an attempt that was removed it may succeed or raise OSError, because `commit`
        fails."""
        ...

    def announced(self, step: int, token: str) -> list[str]:
        """Return the paths of the announcements of an attempt, as other processes see them now.
        Other paths may be among them."""
        ...

    def commit(self, step: int, token: str, manifest: bytes) -> None:
        """Make the step visible, atomically and durably, replacing an older one of the same step,
        which stays until then. May be repeated after a failure. Must raise OSError for an attempt
        that was removed, or of which only a late announcement is left: a storage that removes
        objects one by one checks that all files that `manifest` names are there."""
        ...

    def remove_attempts(self, steps: int | range, is_needed: Callable[[str], bool]) -> None:
        """Remove what belongs to no checkpoint at one or several steps: leftovers of deletions, and
        attempts whose token is not needed. Other attempts are not affected."""
        ...

    def steps(self, *, repairs: bool = False) -> list[int]:
        """Return the committed steps, oldest first. With `repairs`, restore first a step that a
        kill between two renames has hidden; nothing else is removed, because writers of an earlier
        generation may be active. For one process, before anything is read."""
        ...

    def delete(self, step: int, tick: Callable[[], None] = ...) -> None:
        """Remove a committed step; it is never visible in part."""
        ...

    def size(self, path: str) -> int:
        """Return the size of a file, whose path is as in `read`. Raises FileNotFoundError if there
        is none."""
        ...

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes | memoryview:
        """Return a file, or the bytes from `start` to `stop`, which may be a view that keeps the
        file open. `path` is one that `announced` returned, "step-5/manifest.json", a file that this
        manifest names ("step-5/rank-00000.safetensors", with the token in between if
        `keeps_attempts`), or any file in a folder of another name, such as "model/config.json" of a
        Hugging Face folder. Raises FileNotFoundError if there is none."""
        ...

    def read_into(
        self, path: str, start: int, target: memoryview, seen: Callable[[memoryview], object]
    ) -> None:
        """Fill `target` with the bytes from `start`. Thread-safe. `seen` is called with each chunk
        while it is in the CPU cache. Raises OSError if there are fewer bytes."""
        ...

    def close(self) -> None:
        """Close files opened for reading."""
        ...


def open_storage(root: str, files: Files | None = None) -> Storage:
    """Open the storage at `root`: a folder, or a URL that fsspec supports ("s3://bucket/run").

    Tests pass `files` to replace the local filesystem. Raises CheckpointError if the URL's
    filesystem is not installed, ConfigError for a URL without "//".
    """
    if (path := local_path(root)) is None:
        # A local folder does not need the time and memory of fsspec.
        from torchtitan_lite.checkpoint.storage.object_store import ObjectStore

        return ObjectStore(root)
    from torchtitan_lite.checkpoint.storage.posix import LocalStorage

    return LocalStorage(path, files or Files())


def exists(storage: Storage, path: str) -> bool:
    """Return whether a file such as "step-5/manifest.json" exists. Raises OSError if that is
    unknown now."""
    try:
        storage.size(path)
    except OSError as error:
        # Object stores deny access to missing objects if listing is not permitted.
        if is_permanent(error) or isinstance(error, PermissionError):
            return False
        raise
    return True


def open_parent_storage(path: str) -> tuple[Storage, str]:
    """Split a checkpoint's folder, such as ".../step-1000", into its storage and its name there.
    Raises CheckpointError as `open_storage` does."""
    root, name = split(path)
    return open_storage(root), name


def read_error(message: str, error: OSError) -> CheckpointError:
    """Return the exception to raise for `error`, with both texts: DamagedCheckpoint if it is
    permanent, else StorageUnavailable."""
    kind = DamagedCheckpoint if is_permanent(error) else StorageUnavailable
    return kind(f"{message}: {error}")
