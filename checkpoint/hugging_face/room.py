"""Room on a disk, looked at before anything is written. Layer: above errors."""

import shutil
from pathlib import Path

from torchtitan_lite.errors import CheckpointError


def check_room(where: Path, num_bytes: int) -> None:
    """Raise CheckpointError where the disk of `where`, which need not exist yet, has less."""
    folder = where.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise CheckpointError(
            f"{where} needs {num_bytes / 1e9:.2f} GB, and {folder} has {free / 1e9:.2f} GB free. "
            "Make room, or give a folder on another disk."
        )
