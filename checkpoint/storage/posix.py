"""Checkpoints in a local or shared folder: a single rename makes a step visible.

An attempt announces its parts in `.writing-step-N-TOKEN` and writes them into its subfolder
`step-N`. A commit adds the manifest, syncs everything, and renames the subfolder out. Announcements
are removed last, so that a failed or killed commit can be repeated. An existing `step-N` is first
renamed to `.replaced-step-N`; `recover` repairs a crash between the two renames. A step to be
deleted is first renamed to `.deleting-step-N`.

Invariant: a folder `step-N` is complete and holds nothing else, even if all unsynced data is lost.
"""

import errno
import json
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchtitan_lite.checkpoint.format import (
    failure_file_name,
    failure_files,
    parse_step_name,
    part_file_name,
    part_files,
    step_name,
)
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.manifest_json import MANIFEST
from torchtitan_lite.checkpoint.storage.safetensors_file import (
    BoxLocation,
    Content,
    PartBox,
    TokenBucket,
    no_tick,
    write_part,
    write_stream,
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

    def __init__(self, root: Path, files: Files) -> None:
        self.root = str(root)
        self._folder = root
        self._files = files
        self._maps: LRUCache[memoryview] = LRUCache(_MOST_OPEN)
        self._opened: LRUCache[_Opened] = LRUCache(_MOST_OPEN)

    def begin(self, step: int, token: str) -> None:
        self._files.make_folders(self._written(step, token))

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
        tick: Callable[[], None] = no_tick,
    ) -> list[BoxLocation]:
        path = self._written(step, token) / name
        return write_part(self._files, path, boxes, source, direct=direct, rate=rate, tick=tick)

    def write_stream(
        self,
        step: int,
        token: str,
        name: str,
        boxes: Sequence[PartBox],
        content: Content,
        *,
        tick: Callable[[], None] = no_tick,
    ) -> list[BoxLocation]:
        path = self._written(step, token) / name
        return write_stream(self._files, path, boxes, content, tick=tick)

    def put_part(self, step: int, token: str, rank: int, part: Mapping[str, Any]) -> None:
        folder = self._attempt(step, token)
        # A failure in an attempt that was retried no longer counts.
        with suppress(FileNotFoundError):
            self._files.unlink(folder / failure_file_name(rank))
        self._files.write_file(folder / part_file_name(rank), json.dumps(part).encode())
        # Syncs this rank's names: on a shared filesystem the leader's fsync covers its own machine
        # only.
        self._files.sync_folder(folder)

    def put_failure(self, step: int, token: str, rank: int, error: str) -> None:
        path = self._attempt(step, token) / failure_file_name(rank)
        self._files.write_file(path, json.dumps(error).encode())

    def parts_present(self, step: int, token: str) -> set[int]:
        return set(part_files(self._names(self._attempt(step, token))))

    def failures(self, step: int, token: str) -> dict[int, str]:
        folder = self._attempt(step, token)
        found = {}
        for rank, name in failure_files(self._names(folder)).items():
            with suppress(FileNotFoundError):
                found[rank] = str(json.loads(self._files.read(folder / name)))
        return found

    def read_part(self, step: int, token: str, rank: int) -> dict[str, Any]:
        return json.loads(self._files.read(self._attempt(step, token) / part_file_name(rank)))

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
        # The step is committed. `recover` and `delete_stale_attempts` remove leftovers.
        with suppress(OSError):
            files.rmtree(replaced)
            files.rmtree(self._attempt(step, token))

    def abandon(self, step: int, token: str) -> None:
        self._files.rmtree(self._attempt(step, token))

    def steps(self) -> list[int]:
        found = {parse_step_name(name) for name in self._names(self._folder)}
        return sorted(
            step
            for step in found
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

    def repair(self) -> None:
        self._restore_replaced()

    def recover(self, session: str) -> None:
        self._restore_replaced()
        for name in self._names(self._folder):
            left = name.startswith(_DELETING) or (
                name.startswith(_WRITING) and not _token_of(name).startswith(session)
            )
            if left:
                self._files.rmtree(self._folder / name)

    def delete_stale_attempts(self, before: int) -> None:
        for name in self._names(self._folder):
            if name.startswith(_DELETING):
                self._files.rmtree(self._folder / name)
            elif name.startswith(_WRITING):
                step = parse_step_name("-".join(name.removeprefix(_WRITING).split("-")[:2]))
                if step is not None and step < before:
                    self._files.rmtree(self._folder / name)

    def leaves_folder(self, path: str) -> bool:
        step = os.path.realpath(self._folder / path.partition("/")[0])
        actual = os.path.realpath(self._folder / path)
        return os.path.commonpath([step, actual]) != step

    def size(self, path: str) -> int:
        return os.stat(self._folder / path).st_size

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes | memoryview:
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
            found = self._kept.setdefault(path, made)
            self._kept.move_to_end(path)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
            return found

    def clear(self) -> None:
        """Evict everything."""
        with self._lock:
            self._kept.clear()


def _token_of(name: str) -> str:
    """Return the token in the name of an attempt's folder, ".writing-step-N-TOKEN"."""
    return name.removeprefix(_WRITING).split("-", 2)[-1]
