"""Runs with too little shared memory or disk space: a small tmpfs that only the run sees."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.ranks import REPOSITORY

_UNSHARE = shutil.which("unshare")
_STATE_OF_30_MIB = "--training.dtype=float64"
"""Size of the snapshots of both ranks together; each requests three slots of half of it."""


def _on_small(mounted: Path, mib: int, arguments: list[str], log: Path) -> int:
    """Return the exit status of a run on two ranks that sees a tmpfs of `mib` at `mounted`."""
    mount = f"mount -t tmpfs -o size={mib}m none {mounted}"
    command = ["sh", "-c", f'{mount} && exec "$@"', "sh", *launch.command(2, arguments)]
    assert _UNSHARE is not None
    with log.open("wb") as output:
        return subprocess.run(
            [_UNSHARE, "--mount", *command],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=240,
            check=False,
        ).returncode


def _may_mount() -> bool:
    if _UNSHARE is None or os.getuid() != 0:
        return False
    command = [_UNSHARE, "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _may_mount(), reason="mounts a small tmpfs")


@pytest.mark.matrix
def test_64_mib_of_shared_memory_disable_snapshots_but_not_the_run(tmp_path: Path) -> None:
    """Docker's default: one of two ranks gets its memory, and the other does not."""
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = [
        *launch.SMALL,
        f"--job.dump_folder={run}",
        "--training.steps=6",
        "--checkpoint.interval=3",
        _STATE_OF_30_MIB,
    ]
    assert _on_small(Path("/dev/shm"), 64, arguments, log) == 0, log.read_text()[-4000:]
    text = log.read_text()
    assert text.count("Snapshots are disabled, and saves are synchronous") == 1, text[-4000:]
    assert "MiB" in text.split("Snapshots are disabled")[1].splitlines()[0]
    saved = sorted(path.name for path in (run / "checkpoint").glob("step-*"))
    assert saved == ["step-1", "step-3", "step-6"]


@pytest.mark.matrix
def test_a_full_disk_fails_saves_but_not_training(tmp_path: Path) -> None:
    """All steps are committed, and the run reports that the last one is not saved."""
    run, log, disk = tmp_path / "run", tmp_path / "log", tmp_path / "disk"
    disk.mkdir()
    arguments = [
        *launch.SMALL,
        f"--job.dump_folder={run}",
        f"--checkpoint.folder={disk}",
        "--training.steps=12",
        "--checkpoint.interval=4",
        _STATE_OF_30_MIB,
    ]
    assert _on_small(disk, 8, arguments, log) == 1, log.read_text()[-4000:]
    text = log.read_text()
    assert "No space left on device" in text
    assert "Step 12 could not be saved" in text
    assert launch.steps_of(run)[-1]["step"] == 12
    assert any(line["event"] == "saves_failed" for line in launch.events_of(run))
    # Leftovers of a failed save would keep the disk full.
    assert list(disk.iterdir()) == []
