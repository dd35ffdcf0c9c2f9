"""A folder that is made file by file, and seen under its name once it is whole.

Invariant: a file whose end was noted is durable. Layer: above lock and storage.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchtitan_lite.checkpoint.hugging_face.lock import TargetTaken, locked
from torchtitan_lite.checkpoint.storage.files import Files

_MARK = ".converting-"
_NOTE = ".done"


class UnfinishedFolder:
    """What will be `target`, in `.NAME.converting-TOKEN` beside it."""

    def __init__(self, target: Path, token: str, files: Files) -> None:
        """`token` names the work: what an interrupted attempt at the same has noted, counts."""
        self._target, self._files = target, files
        self._start = f".{target.name}{_MARK}"
        self.path = target.parent / f"{self._start}{token}"

    @contextmanager
    def open(self) -> Iterator[None]:
        """Make it and hold it, and remove what attempts at other work for the same target have
        left. An error removes it too; after an interrupt it stays, and so do its notes.

        Raises TargetTaken while another process is at it.
        """
        self._files.make_folders(self.path)
        with locked(self.path):
            try:
                self._remove_others()
                yield
            except Exception:
                self._files.rmtree(self.path)
                raise

    def _remove_others(self) -> None:
        for name in self._files.listdir(self._target.parent):
            other = self._target.parent / name
            if name.startswith(self._start) and other != self.path:
                with suppress(TargetTaken), locked(other):
                    self._files.rmtree(other)

    def note(self, file: str) -> None:
        """A file is written whole and durably."""
        self._files.write_file(self.path / f"{file}{_NOTE}", b"")
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
