"""A run of replicas that a scheduler starts (`slurm`, `kubernetes`): its arguments, and its losses
against those of an undisturbed run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.tolerances import FAULTS_FLOAT64

STEPS = 60
ARGUMENTS: tuple[str, ...] = (
    *launch.SMALL,
    "--training.dtype=float64",
    # Two replicas of two nodes have three rounds, which they cannot split evenly.
    "--training.global_batch_size=6",
    "--training.local_batch_size=1",
    # AdamW amplifies differences of rounding, and more with a higher learning rate.
    "--optimizer.lr=0.0004",
    f"--training.steps={STEPS}",
    "--checkpoint.enable=true",
    "--checkpoint.interval=10",
    "--metrics.log_freq=1",
    # RANK_FAULTS makes the steps slower.
    "--experimental.custom_import=tests.resilience.rank_faults",
)


def undisturbed_losses(folder: Path) -> list[float]:
    """Return the losses of a run without faults in one process."""
    arguments = [*ARGUMENTS, f"--job.dump_folder={folder}", "--checkpoint.enable=false"]
    launch.run(1, arguments, folder.with_suffix(".log"))
    steps = launch.steps_of(folder)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    return [step["loss"] for step in steps]


def replica_folders(folder: Path) -> list[Path]:
    """Return the folders of the replicas' metrics."""
    return sorted(folder.glob("replica_*"))


def train_together(folder: Path, num_replicas: int, step: int) -> bool:
    """Whether exactly this many replicas took the last step of one of them, at `step` or later."""
    return any(
        record["step"] >= step and record["num_replicas"] == num_replicas
        for path in replica_folders(folder)
        for record in launch.steps_of(path)[-1:]
    )


def check_losses(folder: Path, expected: Sequence[float], *, repeated: bool = False) -> None:
    """Check that the replicas have taken all steps, each with the loss of an undisturbed run; with
    `repeated`, some of them again after a resume."""
    taken = set()
    for path in replica_folders(folder):
        steps = launch.steps_of(path)
        numbers = [step["step"] for step in steps]
        assert repeated or numbers == sorted(set(numbers)), f"{path.name}: {numbers}"
        taken |= set(numbers)
        for step in steps:
            loss = expected[step["step"] - 1]
            assert step["loss"] == pytest.approx(loss, rel=FAULTS_FLOAT64), step
    assert taken == set(range(1, STEPS + 1))
