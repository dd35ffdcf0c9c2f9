"""A run with injected faults of many kinds has the same outcome as an undisturbed run. `make chaos`
injects more faults of all kinds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.faults import FAULT_KINDS
from tests.chaos.job_view import JobView
from tests.chaos.memory import MemoryRecord, Sample, growth
from tests.harness import launch
from tests.harness.ranks import REPOSITORY, RankFailed

_ARGUMENTS = (
    *launch.SMALL,
    "--training.dtype=float64",
    "--optimizer.lr=1e-4",
    "--checkpoint.interval=20",
)
_FAST_KINDS = (
    "rank_killed",
    "lighthouse_and_rank_killed",
    "rank_paused",
    "rank_killed_during_save",
    "newest_checkpoint_corrupted",
)


def _disturb(tmp_path: Path, *options: str, num_ranks: int = 1) -> str:
    log = tmp_path / "log"
    folder, ranks = f"--folder={tmp_path / 'chaos'}", f"--nproc-per-replica={num_ranks}"
    command = [sys.executable, "-m", "tests.chaos", folder, ranks, *options]
    # Three micro-batches, which two replicas cannot split evenly.
    arguments = [*_ARGUMENTS, f"--training.global_batch_size={3 * 2 * num_ranks}"]
    with log.open("wb") as file:
        result = subprocess.run(
            [*command, "--", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=1500,
        )
    text = log.read_text(errors="replace")
    if result.returncode:
        raise RankFailed(f"exit status {result.returncode}:\n{text[-6000:]}", log)
    return text


@pytest.mark.skipif(sys.platform != "linux", reason="the launcher needs Linux")
@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_five_kinds_do_not_change_the_outcome(tmp_path: Path) -> None:
    text = _disturb(tmp_path, f"--faults={len(_FAST_KINDS)}", f"--kinds={','.join(_FAST_KINDS)}")
    assert f"{len(_FAST_KINDS)} faults of {len(_FAST_KINDS)} kinds" in text


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_kinds_do_not_change_the_outcome(ranks: int, tmp_path: Path) -> None:
    _disturb(tmp_path, f"--faults={len(FAULT_KINDS)}", "--seed=1", num_ranks=ranks)


def test_the_growth_per_quorum_change_is_found() -> None:
    mib = 2**20
    samples = [Sample(10.0 * number, (300 + 2 * number) * mib) for number in range(6)]
    # One before the first sample, and one before each further sample.
    changes_s = [-1.0, *(10.0 * number - 5 for number in range(1, 6))]
    assert growth(samples, changes_s) == ", +2.00 MiB per quorum change over 5 changes"
    for num_changes, expected in ((1, "0 quorum changes"), (2, "1 quorum change")):
        assert growth(samples, changes_s[:num_changes]) == f", {expected}"


def test_the_memory_of_a_process_without_trainers_is_recorded(tmp_path: Path) -> None:
    job = JobView(os.getpid(), tmp_path, num_replicas=2)
    memory = MemoryRecord()
    memory.sample(job)
    (line,) = memory.summary(job)
    assert line.startswith("launcher: USS ")
