"""One conversion at a time writes one folder. Layer: above errors."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.errors import CheckpointError


class TargetTaken(CheckpointError):
    """What is to be made is there already, or another process of this machine makes it."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder that exists. Raises TargetTaken while another process, or another part of this
    one, does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TargetTaken(f"Another process is writing {folder}.") from None
        yield
    finally:
        os.close(descriptor)
