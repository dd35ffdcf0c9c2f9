"""A folder of several files that appears under its name once it is complete.

Files are written in a folder of the attempt, and renamed into the partial folder once they are
durable. Invariants: a file in the partial folder is complete; whoever writes for an attempt that
another one has superseded can no longer change it.
"""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchtitan_lite.checkpoint.convert.conversion import TargetExists, lock_folder
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.core.errors import CheckpointError, UserError
from torchtitan_lite.distributed.network import abstract_socket_scope

_MARK = ".converting-"
_ATTEMPT = ".attempt-"
_REMOVED = ".removed-"


class PartialFolder:
    """The folder `.NAME.converting-TOKEN`, which becomes `target` once complete."""

    def __init__(self, target: Path, token: str, files: Files) -> None:
        """`token` identifies the work: files that an interrupted attempt with the same token has
        completed are kept."""
        self.target, self._files = target, files
        self._start = f".{target.name}{_MARK}"
        self.path = target.parent / f"{self._start}{token}"
        self.attempt = ""
        """Name of the folder of the attempt; known while this process writes."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Create and lock the folder, begin an attempt, and remove what is left of others for the
        same target. A UserError or OSError in the block removes the folder; after an interrupt or
        the loss of another rank, complete files stay.

        Raises TargetExists while another process of this machine holds it, and if another process
        has completed the target.
        """
        self._files.make_folders(self.path)
        with lock_folder(self.path):
            try:
                self._begin_attempt()
                yield
            except (UserError, OSError):
                self._files.rmtree(self.path)
                # The cause may be that a process of another machine was faster, which the lock does
                # not reach.
                check_absent(self.target)
                raise

    def join(self, attempt: str) -> None:
        """Write for the attempt of another process. Raises CheckpointError if this process does not
        see its folder."""
        if not (self.path / attempt).is_dir():
            raise CheckpointError(f"{self.path.parent} is not the folder that rank 0 writes to.")
        self.attempt = attempt

    def _begin_attempt(self) -> None:
        check_absent(self.target)
        # Since this process holds the lock, earlier attempts that begin like this have ended.
        of_this_machine = f"{_ATTEMPT}{abstract_socket_scope():x}-"
        self._remove(self.path, lambda name: name.startswith((of_this_machine, _REMOVED)))
        for name in self._files.listdir(self.target.parent):
            other = self.target.parent / name
            if name.startswith(self._start) and other != self.path:
                with suppress(TargetExists), lock_folder(other):
                    self._files.rmtree(other)
        attempt = f"{of_this_machine}{uuid.uuid4().hex}"
        self._files.mkdir(self.path / attempt)
        self.attempt = attempt

    def _remove(self, folder: Path, is_superfluous: Callable[[str], bool]) -> None:
        for name in self._files.listdir(folder):
            if is_superfluous(name):
                # Renamed first, so that no other process adds files to it meanwhile.
                removed = folder / f"{_REMOVED}{uuid.uuid4().hex}"
                self._files.rename(folder / name, removed)
                self._files.rmtree(removed)

    @contextmanager
    def writing(self, file: str) -> Iterator[Path]:
        """Return where to write a file; at the end of the block, by which its content is durable,
        it is complete."""
        path = self.path / self.attempt / file
        yield path
        self._files.rename(path, self.path / file)
        self._files.sync_folder(self.path)

    def done(self) -> set[str]:
        """Return the names of complete files, of this attempt or an earlier one."""
        try:
            # Listed, because a network file system caches that a name does not exist.
            return set(self._files.listdir(self.path))
        except FileNotFoundError:
            return set()

    def finish(self) -> None:
        """Rename the folder to its target, durably. Raises OSError if the target exists."""
        self._remove(self.path, lambda name: name.startswith((_ATTEMPT, _REMOVED)))
        self._files.sync_folder(self.path)
        self._files.rename(self.path, self.target)
        self._files.sync_folder(self.target.parent)


def check_absent(target: Path) -> None:
    """Raise TargetExists if `target` exists."""
    if os.path.lexists(target):
        raise TargetExists(f"{target} already exists. Delete it, or use another folder.")
