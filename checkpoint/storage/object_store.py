"""Checkpoints in an object store, through fsspec: a step exists once its manifest does.

An attempt at a step writes its files and announcements below `step-N/TOKEN/`. A commit puts
`step-N/manifest.json`, in which `data` names the attempt. Object stores cannot rename, but they
replace one object atomically, so a step never disappears.

Failed operations are retried with backoff; permanent errors (missing, forbidden, misused) fail
immediately. Invariant: a manifest is put only after all its files and removed before any of them,
and no other attempt modifies them.
"""

import errno
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torchtitan_lite.checkpoint.format import ATTEMPT_TOKEN, MANIFEST, parse_step_name, step_name
from torchtitan_lite.checkpoint.storage.safetensors_file import (
    BoxLocation,
    PartBox,
    Source,
    TokenBucket,
    box_chunks,
    box_locations,
    checksummed,
    no_tick,
    safetensors_header,
    tensor_names,
)
from torchtitan_lite.core.errors import CheckpointError, UserError, WriteAbandoned

_DATA = ".safetensors"
_TRIES = 8
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 20.0
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_MISUSED = (ImportError, LookupError, TypeError, ValueError, NotImplementedError)
"""Client errors that a retry cannot resolve."""

_T = TypeVar("_T")


class _Filesystem(Protocol):
    """The part of fsspec's filesystem interface that is used."""

    def ls(self, path: str, detail: bool = ...) -> list[Any]: ...
    def find(self, path: str) -> Any: ...
    def exists(self, path: str) -> bool: ...
    def pipe_file(self, path: str, value: bytes) -> None: ...
    def size(self, path: str) -> int | None: ...
    def cat_file(self, path: str, *, start: int | None = ..., end: int | None = ...) -> bytes: ...
    def rm_file(self, path: str) -> None: ...
    def open(self, path: str, mode: str = ...) -> Any: ...
    def makedirs(self, path: str, exist_ok: bool = ...) -> None: ...
    def invalidate_cache(self, path: str | None = ...) -> None: ...


class ObjectStore:
    """Storage in an object store, or in any fsspec filesystem."""

    folder: Path | None = None
    keeps_attempts = True

    def __init__(
        self, root: str, filesystem: _Filesystem | None = None, first_wait_s: float = _FIRST_WAIT_S
    ) -> None:
        """Raises CheckpointError if fsspec, or the package that the URL needs, is not installed."""
        self.root = root
        self._first_wait_s = first_wait_s
        try:
            from fsspec.core import url_to_fs

            opened, self._path = url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{root} cannot be used for checkpoints: {str(error).rstrip('.')}. Install the "
                "missing package (s3fs for s3://, gcsfs for gs://), name the module that registers "
                "it (experimental.custom_import, --custom-import), or set a local "
                "checkpoint.folder."
            ) from None
        self._fs: _Filesystem = filesystem or opened

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
        tick: Callable[[], None] = no_tick,
    ) -> list[BoxLocation]:
        del direct
        folder = self._attempt(step, token)
        if not boxes:
            return []
        header = safetensors_header(tensor_names(boxes), boxes)
        limit = rate or TokenBucket(None)
        digests: list[str] = []

        def put() -> None:
            digests.clear()
            with self._fs.open(self._full(f"{folder}/{name}"), "wb") as file:
                file.write(header)
                for piece in checksummed(boxes, box_chunks(source, boxes), digests):
                    file.write(piece)
                    limit.spend(len(piece), tick)
                    tick()

        self._make_folder(folder)
        self._retry(f"writing {folder}/{name}", put)
        return box_locations(header, boxes, digests)

    def announce(self, step: int, token: str, name: str, content: bytes) -> None:
        folder = self._attempt(step, token)
        self._make_folder(folder)
        self._put(f"{folder}/{name}", content)

    def announced(self, step: int, token: str) -> list[str]:
        folder = self._attempt(step, token)
        return [f"{folder}/{name}" for name in self._names(folder)]

    def commit(self, step: int, token: str, manifest: bytes) -> None:
        content, folder = json.loads(manifest), self._attempt(step, token)
        files = {box["file"] for entry in content["tensors"].values() for box in entry["boxes"]}
        if files and content.get("data") != token:
            raise OSError(f"The manifest names attempt {content.get('data')}, not {folder}.")
        missing = files - set(self._names(folder))
        if missing:
            raise OSError(f"{self.root}/{folder} is missing {', '.join(sorted(missing))}.")
        replaced = self._committed(step)
        self._put(f"{step_name(step)}/{MANIFEST}", manifest)
        # The step is committed. Leftovers of its predecessor and the announcements are removed
        # later.
        with suppress(OSError):
            self._remove_leftovers(step, token, lambda attempt: attempt != replaced)

    def remove_attempts(self, steps: int | range, is_needed: Callable[[str], bool]) -> None:
        if isinstance(steps, range):
            affected = [step for step in self._stored_steps() if step in steps]
        else:
            affected = [steps]
        for step in affected:
            self._remove_leftovers(step, None, is_needed)

    def steps(self, *, repairs: bool = False) -> list[int]:
        # Steps are never renamed here.
        del repairs
        return [step for step in self._stored_steps() if self._is_committed(step)]

    def delete(self, step: int, tick: Callable[[], None] = no_tick) -> None:
        self._remove(f"{step_name(step)}/{MANIFEST}")
        for path in self._find(step):
            self._remove(f"{step_name(step)}/{path}")
            tick()

    def _remove_leftovers(
        self, step: int, committed: str | None, is_needed: Callable[[str], bool]
    ) -> None:
        """Remove what belongs neither to the attempt `committed` nor to a needed one from a step's
        folder. None: read the committed attempt from the manifest, if there is one."""
        paths = self._find(step)
        if committed is None and MANIFEST in paths:
            if not _has_leftovers(paths):
                return
            committed = self._committed(step)
            if committed is None:
                # A damaged manifest does not name its files, so everything is kept.
                return
        for path in paths:
            attempt, _, name = path.rpartition("/")
            is_kept = name.endswith(_DATA) if attempt == committed else is_needed(attempt)
            if path != MANIFEST and not is_kept:
                self._remove(f"{step_name(step)}/{path}")

    def size(self, path: str) -> int:
        full = self._full(path)
        return int(self._retry(f"looking at {path}", lambda: self._fs.size(full)) or 0)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        full = self._full(path)
        # By keyword: the second positional argument of s3fs is an object version.
        return self._retry(
            f"reading {path}", lambda: self._fs.cat_file(full, start=start, end=stop)
        )

    def read_into(
        self, path: str, start: int, target: memoryview, seen: Callable[[memoryview], object]
    ) -> None:
        content = self.read(path, start, start + len(target)) if len(target) else b""
        if len(content) != len(target):
            raise OSError(errno.ENODATA, f"it ends after {start + len(content)} bytes")
        target[:] = content
        seen(target)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _full(self, path: str) -> str:
        return f"{self._path.rstrip('/')}/{path}".rstrip("/")

    def _attempt(self, step: int, token: str) -> str:
        """Return the folder of an attempt. Raises ValueError for a token that readers would
        reject."""
        if not ATTEMPT_TOKEN.fullmatch(token):
            raise ValueError(f"{token!r:.200} cannot name an attempt at step {step}.")
        return f"{step_name(step)}/{token}"

    def _committed(self, step: int) -> str | None:
        """Return the attempt named by a step's manifest; "" for format 2, whose files are beside
        it; None if the manifest is missing or damaged."""
        try:
            content = json.loads(self.read(f"{step_name(step)}/{MANIFEST}"))
        except (FileNotFoundError, ValueError):
            return None
        return str(content.get("data", "")) if isinstance(content, dict) else None

    def _find(self, step: int) -> list[str]:
        """Return everything in a step's folder, as "manifest.json" or "TOKEN/rank-00000.json"."""
        folder = step_name(step)

        def look() -> list[str]:
            self._fs.invalidate_cache()
            try:
                paths = self._fs.find(self._full(folder))
            except FileNotFoundError:
                return []
            return sorted(str(path).rpartition(f"/{folder}/")[2] for path in paths)

        return self._retry(f"listing {folder}", look)

    def _stored_steps(self) -> list[int]:
        """Return the steps with objects, committed or not."""
        steps = map(parse_step_name, self._names(""))
        return sorted(step for step in steps if step is not None)

    def _is_committed(self, step: int) -> bool:
        """Return whether a step has a manifest, after `_names`: exists() of some filesystems
        answers from a cached listing."""
        full = self._full(f"{step_name(step)}/{MANIFEST}")
        return self._retry(f"looking for {full}", lambda: self._fs.exists(full))

    def _names(self, folder: str) -> list[str]:
        def look() -> list[str]:
            self._fs.invalidate_cache()
            try:
                paths = self._fs.ls(self._full(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths)

        return self._retry(f"listing {folder or self.root}", look)

    def _make_folder(self, folder: str) -> None:
        full = self._full(folder)
        self._retry(f"making {full}", lambda: self._fs.makedirs(full, exist_ok=True))

    def _put(self, path: str, content: bytes) -> None:
        full = self._full(path)
        self._retry(f"writing {path}", lambda: self._fs.pipe_file(full, content))

    def _remove(self, path: str) -> None:
        full = self._full(path)

        def remove() -> None:
            try:
                self._fs.rm_file(full)
            except FileNotFoundError:
                return

        self._retry(f"removing {path}", remove)

    def _retry(self, what: str, action: Callable[[], _T]) -> _T:
        """Run `action`, at most eight times, until it succeeds. Client errors become an OSError
        that names the operation; the project's own errors pass unchanged."""
        wait_s = self._first_wait_s
        for number in range(1, _TRIES + 1):
            try:
                return action()
            except (*_PERMANENT, UserError, WriteAbandoned):
                raise
            except Exception as error:
                if number == _TRIES or isinstance(error, _MISUSED):
                    tried = "" if number == 1 else f" {number} times, at last"
                    raise OSError(
                        f"{what} in {self.root} failed{tried} with {type(error).__name__}: {error}"
                    ) from error
            # Jitter spreads the retries of many ranks.
            time.sleep(wait_s * random.uniform(0.5, 1.5))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise AssertionError("unreachable")


def _has_leftovers(paths: Sequence[str]) -> bool:
    """Return whether a committed step holds more than the files of one attempt."""
    files = [path for path in paths if path != MANIFEST]
    folders = {path.rpartition("/")[0] for path in files}
    return len(folders) > 1 or not all(path.endswith(_DATA) for path in files)
