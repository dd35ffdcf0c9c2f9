"""Checkpoints in a folder, local or shared: a step is a folder that one rename makes seen.

An attempt announces its parts in `.writing-step-N-TOKEN`, and writes them into the folder `step-N`
in that. To commit, the manifest is added, everything is synced, and that inner folder is renamed
out. The announcements go last, so that a commit that failed or was killed can be made again. A
`step-N` in the way is first renamed to `.replaced-step-N`; a crash between the two renames is
mended by `recover`. A step to be deleted is renamed to `.deleting-step-N` first.

Invariant: a folder `step-N` is whole and holds nothing else, also when nothing that was not synced
survived. Layer: above part_file.
"""

import errno
import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.manifest_json import MANIFEST
from torchtitan_lite.checkpoint.storage.names import (
    failure_name,
    failures_in,
    part_name,
    parts_in,
    step_name,
    step_of,
)
from torchtitan_lite.checkpoint.storage.newest import Newest
from torchtitan_lite.checkpoint.storage.part_file import (
    Content,
    PartBox,
    Written,
    nothing,
    write_part,
    write_stream,
)
from torchtitan_lite.checkpoint.storage.rate import TokenBucket

_WRITING = ".writing-"
_REPLACED = ".replaced-"
_DELETING = ".deleting-"
_MOST_OPEN = 128
"""Files to read from, of either kind: a process has often 1,024 descriptors, and a mapping one."""
_READ_BYTES = 256 << 10
"""That fit into a processor's cache."""


class LocalFolder:
    """A `Storage` in a folder."""

    def __init__(self, root: Path, files: Files) -> None:
        self.root = str(root)
        self._folder = root
        self._files = files
        self._maps: Newest[memoryview] = Newest(_MOST_OPEN)
        self._opened: Newest[_Opened] = Newest(_MOST_OPEN)

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
        tick: Callable[[], None] = nothing,
    ) -> list[Written]:
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
        tick: Callable[[], None] = nothing,
    ) -> list[Written]:
        path = self._written(step, token) / name
        return write_stream(self._files, path, boxes, content, tick=tick)

    def put_part(self, step: int, token: str, rank: int, part: Mapping[str, Any]) -> None:
        folder = self._attempt(step, token)
        # A failure in an attempt that was tried again is a failure no more.
        with suppress(FileNotFoundError):
            self._files.unlink(folder / failure_name(rank))
        self._files.write_file(folder / part_name(rank), json.dumps(part).encode())
        # This rank's names: on a shared filesystem the leader's fsync covers its own machine.
        self._files.sync_folder(folder)

    def put_failure(self, step: int, token: str, rank: int, error: str) -> None:
        path = self._attempt(step, token) / failure_name(rank)
        self._files.write_file(path, json.dumps(error).encode())

    def parts_present(self, step: int, token: str) -> set[int]:
        return set(parts_in(self._names(self._attempt(step, token))))

    def failures(self, step: int, token: str) -> dict[int, str]:
        folder = self._attempt(step, token)
        found = {}
        for rank, name in failures_in(self._names(folder)).items():
            with suppress(FileNotFoundError):
                found[rank] = str(json.loads(self._files.read(folder / name)))
        return found

    def read_part(self, step: int, token: str, rank: int) -> dict[str, Any]:
        return json.loads(self._files.read(self._attempt(step, token) / part_name(rank)))

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
                self._put_back()
                raise
        elif files.read(final / MANIFEST) != manifest:
            raise FileNotFoundError(f"{written} is gone, and {final} is of another attempt.")
        files.sync_folder(self._folder)
        # The step is safe. What stays is removed by `recover` and `tidy`.
        with suppress(OSError):
            files.rmtree(replaced)
            files.rmtree(self._attempt(step, token))

    def abandon(self, step: int, token: str) -> None:
        self._files.rmtree(self._attempt(step, token))

    def steps(self) -> list[int]:
        found = {step_of(name) for name in self._names(self._folder)}
        return sorted(
            step
            for step in found
            if step is not None and self._files.exists(self._folder / step_name(step) / MANIFEST)
        )

    def delete(self, step: int, tick: Callable[[], None] = nothing) -> None:
        doomed = self._folder / f"{_DELETING}{step_name(step)}"
        self._files.rmtree(doomed)
        self._files.rename(self._folder / step_name(step), doomed)
        # Else the folder may be seen under its old name after a crash, with files missing.
        self._files.sync_folder(self._folder)
        tick()
        self._files.rmtree(doomed)

    def mend(self) -> None:
        self._put_back()

    def recover(self, session: str) -> None:
        self._put_back()
        for name in self._names(self._folder):
            left = name.startswith(_DELETING) or (
                name.startswith(_WRITING) and not _token_of(name).startswith(session)
            )
            if left:
                self._files.rmtree(self._folder / name)

    def tidy(self, before: int) -> None:
        for name in self._names(self._folder):
            if name.startswith(_DELETING):
                self._files.rmtree(self._folder / name)
            elif name.startswith(_WRITING):
                step = step_of("-".join(name.removeprefix(_WRITING).split("-")[:2]))
                if step is not None and step < before:
                    self._files.rmtree(self._folder / name)

    def size(self, path: str) -> int:
        return os.stat(self._folder / path).st_size

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes | memoryview:
        return self._maps.get(path, lambda: self._map(path))[start:stop]

    def read_into(
        self, path: str, start: int, target: memoryview, seen: Callable[[memoryview], object]
    ) -> None:
        # By copying: each page that is mapped costs a fault, which is as slow.
        # Kept open, since a file is read tensor by tensor.
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
        """Let go of files; those of which somebody holds bytes stay until that ends."""
        self._maps.clear()
        self._opened.clear()

    def _attempt(self, step: int, token: str) -> Path:
        return self._folder / f"{_WRITING}{step_name(step)}-{token}"

    def _written(self, step: int, token: str) -> Path:
        """The folder of an attempt's files, that becomes the step's."""
        return self._attempt(step, token) / step_name(step)

    def _names(self, folder: Path) -> list[str]:
        try:
            return self._files.listdir(folder)
        except FileNotFoundError:
            return []

    def _put_back(self) -> None:
        """Put back a step whose replacement did not come, and remove one whose replacement did."""
        changed = False
        for name in self._names(self._folder):
            if name.startswith(_REPLACED):
                replaced, final = self._folder / name, self._folder / name.removeprefix(_REPLACED)
                if self._files.exists(final):
                    # The step that replaced it may not be durable under its name yet.
                    self._files.sync_folder(self._folder)
                    self._files.rmtree(replaced)
                else:
                    self._files.rename(replaced, final)
                    changed = True
        if changed:
            self._files.sync_folder(self._folder)


class _Opened:
    """A file that is open for reading until nobody has this any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def _token_of(name: str) -> str:
    """The token of an attempt's folder, ".writing-step-N-TOKEN"."""
    return name.removeprefix(_WRITING).split("-", 2)[-1]
