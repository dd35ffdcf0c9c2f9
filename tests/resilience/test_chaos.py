"""A run that is struck by faults of many kinds, one after the other, is the run that it would have
been without. `make chaos` strikes it with all kinds, and often."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launch
from tests.failures import RankFailed
from torchtitan_lite.chaos.kinds import KINDS

_ARGUMENTS = (
    *launch.SMALL,
    "--training.dtype=float64",
    "--optimizer.lr=1e-4",
    "--checkpoint.interval=20",
)
_FEW = (
    "rank_killed",
    "lighthouse_and_rank_killed",
    "rank_paused",
    "killed_in_the_middle_of_a_save",
    "newest_checkpoint_damaged",
)


def _disturb(tmp_path: Path, *options: str, num_ranks: int = 1) -> str:
    log = tmp_path / "log"
    folder, ranks = f"--folder={tmp_path / 'chaos'}", f"--nproc-per-replica={num_ranks}"
    command = [sys.executable, "-m", "scripts.chaos", folder, ranks, *options]
    # Three rounds, which two replicas cannot share evenly.
    arguments = [*_ARGUMENTS, f"--training.global_batch_size={3 * 2 * num_ranks}"]
    with log.open("wb") as file:
        ended = subprocess.run(
            [*command, "--", *arguments],
            cwd=launch.REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=1500,
        )
    text = log.read_text(errors="replace")
    if ended.returncode:
        raise RankFailed(f"exit status {ended.returncode}:\n{text[-6000:]}", log)
    return text


@pytest.mark.skipif(sys.platform != "linux", reason="the launcher needs Linux")
@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_faults_of_five_kinds_leave_no_trace(tmp_path: Path) -> None:
    text = _disturb(tmp_path, f"--faults={len(_FEW)}", f"--kinds={','.join(_FEW)}")
    assert f"{len(_FEW)} faults of {len(_FEW)} kinds" in text


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_kind_leaves_no_trace(ranks: int, tmp_path: Path) -> None:
    _disturb(tmp_path, f"--faults={len(KINDS)}", "--seed=1", num_ranks=ranks)
