"""Folders that are built once, by one of several processes, and visible only when complete.

Invariant: a folder under its final name is complete, because it is renamed after all its contents
have reached the disk. A process that does not find it takes a file lock; the kernel releases the
lock of a process that dies, and its leftovers are under another name, which the next builder
removes.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.core.log import logger


def build_once(folder: Path, what: str, build: Callable[[Path], None]) -> None:
    """Create `folder` by calling `build(temporary_folder)`, unless it exists. Any number of
    processes may call this concurrently: one builds while the others wait. `what` is for
    messages."""
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock"), what):
            if folder.is_dir():
                return
            for left_over in folder.parent.glob(f"{folder.name}.building-*"):
                shutil.rmtree(left_over)
            temporary = folder.with_name(f"{folder.name}.building-{os.getpid()}")
            temporary.mkdir()
            try:
                build(temporary)
                _sync_tree(temporary)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            _sync(folder.parent)
    except OSError as error:
        raise DataError(
            f"cannot write {what} to {folder.parent}: {error}. Free the space, or set "
            f"training.cache_folder to a folder that can be written."
        ) from error


@contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process prepares %s; waiting for it", what)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
