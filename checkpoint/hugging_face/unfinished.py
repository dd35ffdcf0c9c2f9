"""A folder that is made file by file, and seen under its name once it is whole.

Invariant: a file whose end was noted is durable and is what its note says. Layer: above storage.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.errors import CheckpointError

_MARK = ".converting-"
_NOTE = ".done.json"


class UnfinishedFolder:
    """What will be `target`, in `.NAME.converting-TOKEN` beside it."""

    def __init__(self, target: Path, token: str, files: Files) -> None:
        """`token` names the work: what an interrupted attempt at the same has noted, counts."""
        self._target, self._files = target, files
        self._start = f".{target.name}{_MARK}"
        self._locked: list[int] = []
        self.path = target.parent / f"{self._start}{token}"

    def begin(self) -> None:
        """Make it, and remove what attempts at other work for the same target have left. Raises
        CheckpointError while another process is at it."""
        self._files.make_folders(self.path)
        if not self._lock(self.path):
            raise CheckpointError(f"Another process is writing {self._target}.")
        for name in self._files.listdir(self._target.parent):
            other = self._target.parent / name
            if name.startswith(self._start) and other != self.path and self._lock(other):
                self._files.rmtree(other)

    def _lock(self, folder: Path) -> bool:
        """Until `close`, or the end of this process."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._locked.append(descriptor)
        return True

    def note(self, file: str, about: dict[str, Any]) -> None:
        """A file is written whole and durably."""
        self._files.write_file(self.path / f"{file}{_NOTE}", json.dumps(about).encode())
        self._files.sync_folder(self.path)

    def is_noted(self, file: str) -> bool:
        """Whether a file was, by this attempt or an earlier one."""
        return self._files.exists(self.path / f"{file}{_NOTE}")

    def finish(self) -> None:
        """Show it under its name, durably. Raises OSError where something is there."""
        for name in self._files.listdir(self.path):
            if name.endswith(_NOTE):
                self._files.unlink(self.path / name)
        self._files.sync_folder(self.path)
        self._files.rename(self.path, self._target)
        self._files.sync_folder(self._target.parent)

    def abandon(self) -> None:
        """Remove it."""
        self._files.rmtree(self.path)

    def close(self) -> None:
        """Let go of it: another process may go on with what there is."""
        while self._locked:
            os.close(self._locked.pop())
