"""Comparison of a disturbed run with an undisturbed one.

The losses, the number of target tokens and the samples of every step, and the final state are
compared. A loss is a sum over all samples of a step, so a sample that is lost, used twice or used
in another step changes it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.chaos.job_view import CommittedStep, committed_steps
from torchtitan_lite.checkpoint import StoredSnapshot, read_tensor, verify
from torchtitan_lite.checkpoint.storage import open_storage, parse_step_name
from torchtitan_lite.core.outputs import METRICS
from torchtitan_lite.fault_tolerance.supervision.logs import records
from torchtitan_lite.tools.report import check_samples

_MAX_SHOWN = 5
_TIMEOUT_S, _TIMEOUT_S_PER_STEP = 600.0, 1.0
"""A run with 200 faults has tens of thousands of steps."""


class UndisturbedRunFailed(Exception):
    """The reference run failed, so there is nothing to compare with."""


def newest_checkpoint_step(folder: Path) -> int:
    """Return the step of a run's newest checkpoint; 0 if there is none."""
    steps = (parse_step_name(path.name) for path in (folder / "checkpoint").glob("step-*"))
    return max((step for step in steps if step is not None), default=0)


def undisturbed_run(arguments: Sequence[str], folder: Path, steps: int) -> list[CommittedStep]:
    """Train the same run in one process for `steps` steps, with `folder` as its dump folder. Raises
    UndisturbedRunFailed."""
    overrides = [
        f"--job.dump_folder={folder}",
        f"--training.steps={steps}",
        # Only the final state is compared.
        f"--checkpoint.interval={steps}",
        "--checkpoint.enable_first_step_checkpoint=false",
    ]
    result = subprocess.run(
        [sys.executable, "train.py", *arguments, *overrides],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S + _TIMEOUT_S_PER_STEP * steps,
    )
    if result.returncode:
        raise UndisturbedRunFailed(result.stdout[-3000:])
    lines = (folder / METRICS).read_bytes().splitlines()
    return list(committed_steps(0, records(lines)))


def step_differences(
    disturbed: Sequence[CommittedStep], undisturbed: Sequence[CommittedStep], tolerance: float
) -> list[str]:
    """Describe the steps of the disturbed run that are missing, and those whose target tokens
    differ or whose losses differ by more than `tolerance` (relative)."""
    expected = {step.step: step for step in undisturbed}
    # A replica that dies between a step and its line records nothing, but another replica does.
    missing = sorted(expected.keys() - {step.step for step in disturbed})
    problems = [f"steps that no replica recorded: {missing[:_MAX_SHOWN]}"] if missing else []
    different = [line for step in disturbed for line in _step_difference(step, expected, tolerance)]
    more = [f"and {len(different) - _MAX_SHOWN} more"] if len(different) > _MAX_SHOWN else []
    return [*problems, *different[:_MAX_SHOWN], *more]


def _step_difference(
    actual: CommittedStep, expected: dict[int, CommittedStep], tolerance: float
) -> Iterator[str]:
    name = f"step {actual.step} of replica {actual.replica}"
    wanted = expected.get(actual.step)
    if wanted is None:
        yield f"{name} is beyond the newest checkpoint"
        return
    if actual.num_target_tokens != wanted.num_target_tokens:
        yield (
            f"{name}: {actual.num_target_tokens} target tokens, expected {wanted.num_target_tokens}"
        )
    difference = abs(actual.loss - wanted.loss) / abs(wanted.loss)
    if not difference <= tolerance:
        yield f"{name}: loss {actual.loss}, expected {wanted.loss}: differs by {difference:.1e}"


def largest_loss_difference(
    disturbed: Sequence[CommittedStep], undisturbed: Sequence[CommittedStep]
) -> float:
    """Return the largest relative difference of a loss."""
    expected = {step.step: step.loss for step in undisturbed}
    return max(
        (abs(step.loss - expected[step.step]) / abs(expected[step.step]) for step in disturbed),
        default=0.0,
    )


def sample_differences(disturbed: Path, undisturbed: Path) -> list[str]:
    """Describe the samples that a run lost or used twice, by its ledgers, and the steps that used
    other samples than those of the undisturbed run."""
    checked = check_samples(disturbed)
    actual, expected = checked.samples, check_samples(undisturbed).samples
    different = [step for step, used in expected.items() if actual.get(step) != used]
    problems = list(checked.problems[:_MAX_SHOWN])
    if different:
        problems.append(f"steps that used other samples: {different[:_MAX_SHOWN]}")
    return problems


def state_differences(
    disturbed: Path, undisturbed: Path, step: int, tolerance: float
) -> tuple[list[str], float]:
    """Describe where the states of `step` differ, and return the largest difference of a tensor,
    relative to its largest element. `disturbed` and `undisturbed` are the dump folders."""
    name = f"step-{step}"
    storages = [open_storage(str(folder / "checkpoint")) for folder in (disturbed, undisturbed)]
    damage = [str(problem) for problem in verify(storages[0], name)]
    if damage:
        return damage[:_MAX_SHOWN], 1.0
    actual, expected = (StoredSnapshot(storage, name) for storage in storages)
    if actual.tensors.keys() != expected.tensors.keys():
        names = sorted(actual.tensors.keys() ^ expected.tensors.keys())
        return [f"tensors in only one of the runs: {names}"], 1.0
    problems, largest = [], 0.0
    for tensor in actual.tensors:
        one, other = read_tensor(actual, tensor), read_tensor(expected, tensor)
        scale = other.abs().max().item() or 1.0
        difference = (one - other).abs().max().item() / scale if one.numel() else 0.0
        largest = max(largest, difference)
        if not difference <= tolerance:
            problems.append(f"{tensor}: differs by {difference:.1e}")
    if actual.saved.values != expected.saved.values:
        problems.append(f"values {actual.saved.values}, expected {expected.saved.values}")
    return problems[:_MAX_SHOWN], largest
