"""Checkpoints in a local or shared folder: a single rename makes a step visible.

An attempt announces its parts in `.writing-step-N-TOKEN` and writes them into its subfolder
`step-N`. A commit adds the manifest, syncs everything, and renames the subfolder out. Announcements
are removed last, so that a failed or killed commit can be repeated. An existing `step-N` is first
renamed to `.replaced-step-N`; `steps` repairs a crash between the two renames. A step to be
deleted is first renamed to `.deleting-step-N`.

Invariant: a folder `step-N` is complete and holds nothing else, even if all unsynced data is lost.
"""

import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from torchtitan_lite.checkpoint.format import MANIFEST, parse_step_name, step_name
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.safetensors_file import (
    BoxLocation,
    PartBox,
    Source,
    TokenBucket,
    no_tick,
    write_safetensors,
)

_WRITING = ".writing-"
_REPLACED = ".replaced-"
_DELETING = ".deleting-"
_MOST_OPEN = 128
"""Maximum number of files open for reading, and of mappings: the usual limit is 1,024
descriptors."""
_READ_BYTES = 256 << 10
"""Chunk that fits into a CPU cache."""
_T = TypeVar("_T")


class LocalStorage:
    """Storage in a folder."""

    keeps_attempts = False

    def __init__(self, root: Path, files: Files) -> None:
        self.root = str(root)
        self.folder: Path | None = root
        self._folder = root
        self._files = files
        self._maps: LRUCache[memoryview] = LRUCache(_MOST_OPEN)
        self._opened: LRUCache[_Opened] = LRUCache(_MOST_OPEN)

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
        folder = self._written(step, token)
        self._files.make_folders(folder)
        if not boxes:
            return []
        path = folder / name
        return write_safetensors(
            self._files, path, boxes, source, direct=direct, rate=rate, tick=tick
        )

    def announce(self, step: int, token: str, name: str, content: bytes) -> None:
        folder = self._attempt(step, token)
        self._files.write_file(folder / name, content)
        # Syncs this rank's names: on a shared filesystem the leader's fsync covers its own machine
        # only.
        self._files.sync_folder(folder)

    def announced(self, step: int, token: str) -> list[str]:
        folder = self._attempt(step, token)
        return [f"{folder.name}/{name}" for name in self._names(folder)]

    def commit(self, step: int, token: str, manifest: bytes) -> None:
        files, written = self._files, self._written(step, token)
        final = self._folder / step_name(step)
        replaced = self._folder / f"{_REPLACED}{step_name(step)}"
        if files.exists(written) or not files.exists(final):
            files.write_file(written / MANIFEST, manifest)
            files.sync_folder(written)
            try:
                if files.exists(final):
                    files.rmtree(replaced)
                    files.rename(final, replaced)
                files.rename(written, final)
            except OSError:
                self._restore_replaced()
                raise
        elif files.read(final / MANIFEST) != manifest:
            raise FileNotFoundError(f"{written} is missing, and {final} is of another attempt.")
        files.sync_folder(self._folder)
        # The step is committed. `remove_attempts` and `steps` remove leftovers later.
        with suppress(OSError):
            files.rmtree(replaced)
            files.rmtree(self._attempt(step, token))

    def remove_attempts(self, steps: int | range, is_needed: Callable[[str], bool]) -> None:
        if isinstance(steps, int):
            steps = range(steps, steps + 1)
        for name in self._names(self._folder):
            step, token = _step_and_token(name)
            # A range looks for other objects than integers by comparing all of its elements.
            is_one = step is not None and step in steps
            if is_one and (token is None or not is_needed(token)):
                self._files.rmtree(self._folder / name)

    def steps(self, *, repairs: bool = False) -> list[int]:
        if repairs:
            self._restore_replaced()
        steps = {parse_step_name(name) for name in self._names(self._folder)}
        return sorted(
            step
            for step in steps
            if step is not None and self._files.exists(self._folder / step_name(step) / MANIFEST)
        )

    def delete(self, step: int, tick: Callable[[], None] = no_tick) -> None:
        doomed = self._folder / f"{_DELETING}{step_name(step)}"
        self._files.rmtree(doomed)
        self._files.rename(self._folder / step_name(step), doomed)
        # Otherwise a crash could leave an incomplete folder under its old name.
        self._files.sync_folder(self._folder)
        tick()
        self._files.rmtree(doomed)

    def size(self, path: str) -> int:
        return os.stat(self._folder / path).st_size

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes | memoryview:
        if stop is None:
            # Small, and possibly replaced later: announcements and manifests.
            return self._files.read(self._folder / path)[start:]
        return self._maps.get(path, lambda: self._map(path))[start:stop]

    def read_into(
        self, path: str, start: int, target: memoryview, seen: Callable[[memoryview], object]
    ) -> None:
        # preadv, because page faults of a mapping are as slow. Kept open, because files are read
        # tensor by tensor.
        opened, filled = self._opened.get(path, lambda: self._open(path)), 0
        while filled < len(target):
            room = target[filled : filled + _READ_BYTES]
            length = os.preadv(opened.descriptor, [room], start + filled)
            if length == 0:
                raise OSError(errno.ENODATA, f"it ends after {start + filled} bytes")
            seen(room[:length])
            filled += length

    def _map(self, path: str) -> memoryview:
        with open(self._folder / path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def _open(self, path: str) -> "_Opened":
        return _Opened(os.open(self._folder / path, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Close files; those with live views close with their last view."""
        self._maps.clear()
        self._opened.clear()

    def _attempt(self, step: int, token: str) -> Path:
        return self._folder / f"{_WRITING}{step_name(step)}-{token}"

    def _written(self, step: int, token: str) -> Path:
        """Return the folder of an attempt's files, which becomes the step's folder."""
        return self._attempt(step, token) / step_name(step)

    def _names(self, folder: Path) -> list[str]:
        try:
            return self._files.listdir(folder)
        except FileNotFoundError:
            return []

    def _restore_replaced(self) -> None:
        """Rename a replaced step back if its replacement is missing; otherwise remove it."""
        changed = False
        for name in self._names(self._folder):
            if name.startswith(_REPLACED):
                replaced, final = self._folder / name, self._folder / name.removeprefix(_REPLACED)
                if self._files.exists(final):
                    # The replacement's name may not be durable yet.
                    self._files.sync_folder(self._folder)
                    self._files.rmtree(replaced)
                else:
                    self._files.rename(replaced, final)
                    changed = True
        if changed:
            self._files.sync_folder(self._folder)


class _Opened:
    """A file that stays open until its last reference is gone."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Python clears the globals of a module before it deletes what a script has left open.
        close(self.descriptor)


class LRUCache(Generic[_T]):
    """Thread-safe LRU cache of `most` files; an evicted file closes with its last reference."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _T] = OrderedDict()

    def get(self, path: str, opens: Callable[[], _T]) -> _T:
        """Return the cached value of `path`, or cache the result of `opens`."""
        with self._lock:
            if path in self._kept:
                self._kept.move_to_end(path)
                return self._kept[path]
        # Outside of the lock: opening may be slow on a shared filesystem.
        made = opens()
        with self._lock:
            # Another thread may have been faster.
            kept = self._kept.setdefault(path, made)
            self._kept.move_to_end(path)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
            return kept

    def clear(self) -> None:
        """Evict everything."""
        with self._lock:
            self._kept.clear()


def _step_and_token(name: str) -> tuple[int | None, str | None]:
    """Return the step and the token of an attempt's folder, ".writing-step-N-TOKEN". There is no
    token for a deleted step, and neither for other folders."""
    if name.startswith(_DELETING):
        return parse_step_name(name.removeprefix(_DELETING)), None
    word, *rest = name.removeprefix(_WRITING).split("-", 2)
    if not name.startswith(_WRITING) or len(rest) != 2:
        return None, None
    return parse_step_name(f"{word}-{rest[0]}"), rest[1]
