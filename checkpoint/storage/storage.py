"""What a place for checkpoints can do, and which place a root names.

A step is saved by many: each rank writes its part, then one commits. What belongs together is told
by a token, so that parts of an earlier attempt at the same step never get into a later one.
Layer: above posix and object_store.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torchtitan_lite.checkpoint.damage import is_damage
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.part_file import Content, PartBox, Written
from torchtitan_lite.checkpoint.storage.rate import TokenBucket


class Storage(Protocol):
    """A local folder or an object store. All methods raise OSError when the place fails, whatever
    its client raises."""

    root: str

    def begin(self, step: int, token: str) -> None:
        """Make ready to write a step. Every rank may call it, any number of times."""
        ...

    def write_part(
        self,
        step: int,
        token: str,
        name: str,
        boxes: Sequence[PartBox],
        source: memoryview | list[memoryview],
        *,
        direct: bool = True,
        rate: TokenBucket | None = None,
        tick: Callable[[], None] = ...,
    ) -> list[Written]:
        """Write a rank's safetensors file durably, as `part_file.write_part` does."""
        ...

    def write_stream(
        self,
        step: int,
        token: str,
        name: str,
        boxes: Sequence[PartBox],
        content: Content,
        *,
        tick: Callable[[], None] = ...,
    ) -> list[Written]:
        """The same of bytes that are made on the way, as `part_file.write_stream` does."""
        ...

    def put_part(self, step: int, token: str, rank: int, part: Mapping[str, Any]) -> None:
        """Announce durably that a rank has written all that `part` names."""
        ...

    def put_failure(self, step: int, token: str, rank: int, error: str) -> None:
        """Announce that a rank will write nothing in this attempt."""
        ...

    def parts_present(self, step: int, token: str) -> set[int]:
        """The ranks whose parts are announced."""
        ...

    def failures(self, step: int, token: str) -> dict[int, str]:
        """Rank -> its error, for ranks that announced a failure."""
        ...

    def read_part(self, step: int, token: str, rank: int) -> dict[str, Any]:
        """A part that is present; with `data`, where the storage has the files of an attempt in a
        folder of their own."""
        ...

    def commit(self, step: int, token: str, manifest: bytes) -> None:
        """Make the step seen, whole and durably, in place of an older one of the same step, which
        is not lost before. May be called again after it has failed."""
        ...

    def abandon(self, step: int, token: str) -> None:
        """Remove what an attempt has written that was not committed. Others are not touched."""
        ...

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        ...

    def delete(self, step: int, tick: Callable[[], None] = ...) -> None:
        """Remove a committed step, so that it is never seen in part."""
        ...

    def mend(self) -> None:
        """Put back what a kill between two renames took away. Removes nothing, since writers of an
        earlier start may still be at work. For one process, before anything is read."""
        ...

    def recover(self, session: str) -> None:
        """Mend what a killed process left, and remove leavings but those of tokens that begin with
        `session`. For one process, before anything is read."""
        ...

    def tidy(self, before: int) -> None:
        """Remove attempts at steps before `before`, which was committed: none of them can succeed
        any more, since every rank writes its steps in order."""
        ...

    def size(self, path: str) -> int:
        """Bytes of a file such as "step-5/manifest.json"."""
        ...

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes | memoryview:
        """Bytes of a file such as "step-5/manifest.json"."""
        ...

    def read_into(
        self, path: str, start: int, target: memoryview, seen: Callable[[memoryview], object]
    ) -> None:
        """Fill `target` with the bytes from `start`, by any thread. `seen` is given each piece when
        it has come, and is still in the processor's cache. Raises OSError where there are fewer."""
        ...

    def close(self) -> None:
        """Let go of what reading has opened."""
        ...


def open_storage(root: str, files: Files | None = None) -> Storage:
    """The place that `root` names: a folder, or a URL that fsspec knows ("s3://bucket/run").

    `files` stands in for the local filesystem in tests. Raises CheckpointError for a URL whose
    filesystem is not installed.
    """
    if "://" in root and not root.startswith("file://"):
        # fsspec and its filesystems take time and memory that a local folder does not need.
        from torchtitan_lite.checkpoint.storage.object_store import ObjectStore

        return ObjectStore(root)
    from torchtitan_lite.checkpoint.storage.posix import LocalFolder

    return LocalFolder(Path(root.removeprefix("file://")), files or Files())


def is_there(storage: Storage, path: str) -> bool:
    """Whether a file such as "step-5/manifest.json" can be seen. Raises OSError where that cannot
    be told now."""
    try:
        storage.size(path)
    except OSError as error:
        # An object store refuses to say what is missing to whoever may not list it.
        if is_damage(error) or isinstance(error, PermissionError):
            return False
        raise
    return True


def split_storage(path: str) -> tuple[Storage, str]:
    """A checkpoint's folder, such as ".../step-1000", as its storage and its name there. Raises
    CheckpointError as `open_storage` does."""
    root, _, name = path.rstrip("/").rpartition("/")
    # A folder directly below "/" has no name before its own.
    return open_storage(root or ("/" if path.startswith("/") else ".")), name
