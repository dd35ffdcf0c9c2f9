"""Checkpoints in an object store, through fsspec: a step is seen once its manifest is there.

Files go to `step-N/` as they are written, and the manifest last. There is no rename, so a step that
is written again loses its old manifest first. Part announcements carry their attempt's token.

Every operation is tried again when the store fails, after waits that grow; what cannot succeed
(missing, forbidden, misused) fails at once. Invariant: a manifest is put only when all its files
are there, and goes before any of them does. Layer: above part_file.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torchtitan_lite.checkpoint.storage.manifest_json import MANIFEST
from torchtitan_lite.checkpoint.storage.names import (
    failure_name,
    part_name,
    rank_of,
    step_name,
    step_of,
)
from torchtitan_lite.checkpoint.storage.part_file import (
    Abandoned,
    Content,
    PartBox,
    Written,
    bytes_of,
    digested,
    header_of,
    names_in_file,
    nothing,
    places,
)
from torchtitan_lite.checkpoint.storage.rate import TokenBucket
from torchtitan_lite.errors import CheckpointError, UserError

_TRIES = 8
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 20.0
_CHUNK_BYTES = 16 << 20
_PERMANENT = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
    NotImplementedError,
    UserError,
)

_T = TypeVar("_T")


class _Filesystem(Protocol):
    """What is used of an fsspec filesystem."""

    def ls(self, path: str, detail: bool = ...) -> list[Any]: ...
    def exists(self, path: str) -> bool: ...
    def pipe_file(self, path: str, value: bytes) -> None: ...
    def size(self, path: str) -> int | None: ...
    def cat_file(self, path: str, *, start: int | None = ..., end: int | None = ...) -> bytes: ...
    def rm_file(self, path: str) -> None: ...
    def open(self, path: str, mode: str = ...) -> Any: ...
    def makedirs(self, path: str, exist_ok: bool = ...) -> None: ...
    def invalidate_cache(self, path: str | None = ...) -> None: ...


class ObjectStore:
    """A `Storage` in an object store, or any filesystem that fsspec knows."""

    def __init__(
        self, root: str, filesystem: _Filesystem | None = None, first_wait_s: float = _FIRST_WAIT_S
    ) -> None:
        """Raises CheckpointError when fsspec, or what it needs for the URL, is not installed."""
        self.root = root
        self._first_wait_s = first_wait_s
        try:
            from fsspec.core import url_to_fs

            found, self._path = url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{root} cannot be used as a place for checkpoints: {error} Install what is "
                "missing (s3fs for s3://, gcsfs for gs://), or set a local checkpoint.folder."
            ) from None
        self._fs: _Filesystem = filesystem or found

    def begin(self, step: int, token: str) -> None:
        del token
        self._remove(f"{step_name(step)}/{MANIFEST}")

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
        tick: Callable[[], None] = nothing,
    ) -> list[Written]:
        del token, direct
        limit = rate or TokenBucket(None)

        def content() -> Iterator[Iterator[memoryview]]:
            for number, box in enumerate(boxes):
                yield _chunks(bytes_of(source, number, box))

        return self._write(step, name, boxes, content, limit, tick)

    def write_stream(
        self,
        step: int,
        token: str,
        name: str,
        boxes: Sequence[PartBox],
        content: Content,
        *,
        tick: Callable[[], None] = nothing,
    ) -> list[Written]:
        del token
        return self._write(step, name, boxes, content, TokenBucket(None), tick)

    def _write(
        self,
        step: int,
        name: str,
        boxes: Sequence[PartBox],
        content: Content,
        limit: TokenBucket,
        tick: Callable[[], None],
    ) -> list[Written]:
        header = header_of(names_in_file(boxes), boxes)
        digests: list[str] = []

        def put() -> None:
            digests.clear()
            with self._fs.open(self._full(f"{step_name(step)}/{name}"), "wb") as file:
                file.write(header)
                for piece in digested(boxes, content(), digests):
                    file.write(piece)
                    limit.spend(len(piece), tick)
                    tick()

        self._make_folder(step)
        self._insist(f"writing {step_name(step)}/{name}", put)
        return places(header, boxes, digests)

    def put_part(self, step: int, token: str, rank: int, part: Mapping[str, Any]) -> None:
        self._make_folder(step)
        self._put(f"{step_name(step)}/{token}.{part_name(rank)}", json.dumps(part).encode())

    def put_failure(self, step: int, token: str, rank: int, error: str) -> None:
        self._make_folder(step)
        self._put(f"{step_name(step)}/{token}.{failure_name(rank)}", json.dumps(error).encode())

    def parts_present(self, step: int, token: str) -> set[int]:
        return set(self._announced(step, token, ".json"))

    def failures(self, step: int, token: str) -> dict[int, str]:
        found = self._announced(step, token, ".failed")
        return {rank: str(json.loads(self.read(path))) for rank, path in found.items()}

    def read_part(self, step: int, token: str, rank: int) -> dict[str, Any]:
        return json.loads(self.read(f"{step_name(step)}/{token}.{part_name(rank)}"))

    def commit(self, step: int, token: str, manifest: bytes) -> None:
        # What is not named by the manifest is word of parts, or of another attempt.
        entries = json.loads(manifest)["tensors"].values()
        kept = {MANIFEST, *(box["file"] for entry in entries for box in entry["boxes"])}
        folder = step_name(step)
        missing = kept - {MANIFEST, *self._names(folder)}
        if missing:
            raise OSError(f"{self.root}/{folder} has lost {', '.join(sorted(missing))}.")
        self._put(f"{folder}/{MANIFEST}", manifest)
        for name in self._names(folder):
            if name not in kept:
                self._remove(f"{folder}/{name}")

    def abandon(self, step: int, token: str) -> None:
        folder = step_name(step)
        names = self._names(folder)
        if MANIFEST not in names:
            for name in names:
                # Word of another attempt stays. Should that have written its data already, its
                # commit finds it missing and fails.
                if name.startswith((f"{token}.", "rank-")):
                    self._remove(f"{folder}/{name}")

    def steps(self) -> list[int]:
        found = (step_of(name) for name in self._names(""))
        return sorted(step for step in found if step is not None and self._is_committed(step))

    def delete(self, step: int, tick: Callable[[], None] = nothing) -> None:
        folder = step_name(step)
        self._remove(f"{folder}/{MANIFEST}")
        for name in self._names(folder):
            self._remove(f"{folder}/{name}")
            tick()

    def mend(self) -> None:
        """A step is never renamed here."""

    def recover(self, session: str) -> None:
        for name in self._names(""):
            step = step_of(name)
            if step is None or self._is_committed(step):
                continue
            names = self._names(name)
            if not any(left.startswith(session) for left in names):
                for left in names:
                    self._remove(f"{name}/{left}")

    def tidy(self, before: int) -> None:
        for name in self._names(""):
            step = step_of(name)
            if step is not None and step < before and not self._is_committed(step):
                for left in self._names(name):
                    self._remove(f"{name}/{left}")

    def size(self, path: str) -> int:
        full = self._full(path)
        return int(self._insist(f"looking at {path}", lambda: self._fs.size(full)) or 0)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        full = self._full(path)
        # By name: s3fs has a version of the object in second place.
        return self._insist(
            f"reading {path}", lambda: self._fs.cat_file(full, start=start, end=stop)
        )

    def read_into(
        self, path: str, start: int, target: memoryview, seen: Callable[[memoryview], object]
    ) -> None:
        content = self.read(path, start, start + len(target)) if len(target) else b""
        if len(content) != len(target):
            raise OSError(f"it ends after {start + len(content)} bytes")
        target[:] = content
        seen(target)

    def close(self) -> None:
        """Nothing is held open."""

    def _full(self, path: str) -> str:
        return f"{self._path.rstrip('/')}/{path}".rstrip("/")

    def _announced(self, step: int, token: str, suffix: str) -> dict[int, str]:
        folder, start = step_name(step), f"{token}."
        found = {}
        for name in self._names(folder):
            rank = rank_of(name.removeprefix(start), suffix) if name.startswith(start) else None
            if rank is not None:
                found[rank] = f"{folder}/{name}"
        return found

    def _is_committed(self, step: int) -> bool:
        full = self._full(f"{step_name(step)}/{MANIFEST}")

        def look() -> bool:
            # exists() of some filesystems answers from what they listed before.
            self._fs.invalidate_cache()
            return self._fs.exists(full)

        return self._insist(f"looking for {full}", look)

    def _names(self, folder: str) -> list[str]:
        def look() -> list[str]:
            self._fs.invalidate_cache()
            try:
                paths = self._fs.ls(self._full(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths)

        return self._insist(f"listing {folder or self.root}", look)

    def _make_folder(self, step: int) -> None:
        full = self._full(step_name(step))
        self._insist(f"making {full}", lambda: self._fs.makedirs(full, exist_ok=True))

    def _put(self, path: str, content: bytes) -> None:
        full = self._full(path)
        self._insist(f"writing {path}", lambda: self._fs.pipe_file(full, content))

    def _remove(self, path: str) -> None:
        full = self._full(path)

        def remove() -> None:
            try:
                self._fs.rm_file(full)
            except FileNotFoundError:
                return

        self._insist(f"removing {path}", remove)

    def _insist(self, what: str, action: Callable[[], _T]) -> _T:
        """Run `action` until it succeeds, at most eight times; OSError, naming what was tried."""
        wait_s = self._first_wait_s
        for number in range(1, _TRIES + 1):
            try:
                return action()
            except (*_PERMANENT, Abandoned):
                raise
            except Exception as error:
                if number == _TRIES:
                    raise OSError(
                        f"{what} in {self.root} failed {_TRIES} times, at last with "
                        f"{type(error).__name__}: {error}"
                    ) from error
            # Jitter: the ranks of a large run must not come back at the same moment.
            time.sleep(wait_s * random.uniform(0.5, 1.5))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise AssertionError("unreachable")


def _chunks(view: memoryview) -> Iterator[memoryview]:
    for first in range(0, len(view), _CHUNK_BYTES):
        yield view[first : first + _CHUNK_BYTES]
