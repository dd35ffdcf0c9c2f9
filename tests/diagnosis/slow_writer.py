"""A checkpoint writer whose disk can be slowed while it runs.

`python -m tests.diagnosis.slow_writer REGION` imports no torch, as the writer of the product."""

import os
import sys
import time
from pathlib import Path

from tests.unit.checkpoint.faulty_writer import SlowFiles

ORDERS, OWN_RANK = "DIAGNOSIS_ORDERS", "DIAGNOSIS_RANK"
"""Environment variables: the folder of orders, and REPLICA-RANK of the writer's rank."""


def disk_file(folder: Path, replica: int, rank: int) -> Path:
    """Return the file with the seconds by which each write of a rank's writer is prolonged."""
    return folder / f"disk-{replica}-{rank}"


class OrderedSlowness(SlowFiles):
    """Files that are as slow as the file `path` says."""

    def __init__(self, path: Path) -> None:
        super().__init__(0.0)
        self._path = path

    def _wait(self) -> None:
        if self._path.exists():
            time.sleep(float(self._path.read_text() or 0))


if __name__ == "__main__":
    from torchtitan_lite.checkpoint.background.__main__ import main

    replica, rank = map(int, os.environ[OWN_RANK].split("-"))
    disk = disk_file(Path(os.environ[ORDERS]), replica, rank)
    sys.exit(main(sys.argv[1], OrderedSlowness(disk)))
