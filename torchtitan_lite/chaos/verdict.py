"""Whether a disturbed run has come out as one that nothing has disturbed. Layer: above follower.

Every loss, the number of targets of every step and the final state are compared. A loss is a sum
over all samples of a step: one that is left out, used twice or used in another step shows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchtitan_lite.chaos.follower import ToldStep, committed_steps
from torchtitan_lite.checkpoint import StoredSnapshot, read_tensor, verify
from torchtitan_lite.checkpoint.storage import open_storage, parse_step_name
from torchtitan_lite.launcher.logs import records
from torchtitan_lite.outputs import METRICS

_SHOWN = 5
_STRAIGHT_S = 3600.0


class StraightRunFailed(Exception):
    """There is nothing to compare with."""


def newest_stored(folder: Path) -> int:
    """The newest step of a run's checkpoints; 0 when there is none."""
    found = (parse_step_name(path.name) for path in (folder / "checkpoint").glob("step-*"))
    return max((step for step in found if step is not None), default=0)


def straight_run(arguments: Sequence[str], folder: Path, steps: int) -> list[ToldStep]:
    """The same run in one process up to `steps`, into `folder`. Raises StraightRunFailed."""
    own = [f"--job.dump_folder={folder}", f"--training.steps={steps}"]
    # Only its end is wanted.
    own += [f"--checkpoint.interval={steps}", "--checkpoint.enable_first_step_checkpoint=false"]
    ended = subprocess.run(
        [sys.executable, "train.py", *arguments, *own],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_STRAIGHT_S,
    )
    if ended.returncode:
        raise StraightRunFailed(ended.stdout[-3000:])
    lines = (folder / METRICS).read_bytes().splitlines()
    return list(committed_steps(0, records(lines)))


def differences(
    told: Sequence[ToldStep], straight: Sequence[ToldStep], tolerance: float
) -> list[str]:
    """What the disturbed run told otherwise, for people: steps that are missing, and those whose
    targets or losses differ, by `tolerance` (relative) or more."""
    expected = {one.step: one for one in straight}
    missing = sorted(expected.keys() - {one.step for one in told})
    # One that dies between a step and its line has told nobody; another has.
    found = [f"steps that nobody told of: {missing[:_SHOWN]}"] if missing else []
    wrong = [line for one in told for line in _difference(one, expected, tolerance)]
    more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
    return [*found, *wrong[:_SHOWN], *more]


def _difference(told: ToldStep, expected: dict[int, ToldStep], tolerance: float) -> Iterator[str]:
    wanted = expected.get(told.step)
    if wanted is None:
        yield f"step {told.step} of replica {told.replica} is beyond the last stored"
        return
    who = f"step {told.step} of replica {told.replica}"
    if told.num_target_tokens != wanted.num_target_tokens:
        yield f"{who}: {told.num_target_tokens} targets, wanted {wanted.num_target_tokens}"
    off = abs(told.loss - wanted.loss) / abs(wanted.loss)
    if not off <= tolerance:
        yield f"{who}: loss {told.loss}, wanted {wanted.loss}: off by {off:.1e}"


def samples_of(folder: Path) -> dict[int, list[int]]:
    """Step -> the samples that ranks wrote down to have used in it, of the sample ledgers of a run
    and of its replicas; `folder` is the dump folder."""
    found: dict[int, set[int]] = {}
    for path in (*folder.glob("samples_rank_*.jsonl"), *folder.glob("*/samples_rank_*.jsonl")):
        for line in path.read_text().splitlines():
            told = json.loads(line)
            found.setdefault(told["step"], set()).update(told["samples"])
    return {step: sorted(samples) for step, samples in found.items()}


def ledger_differences(disturbed: Path, straight: Path, num_deaths: int) -> list[str]:
    """Steps that used other samples than those of the straight run. A process that dies may have
    left out its newest lines, so that up to `num_deaths` steps have some of theirs only."""
    ours, theirs = samples_of(disturbed), samples_of(straight)
    strange = [step for step, used in ours.items() if not set(used) <= set(theirs.get(step, ()))]
    short = [step for step, used in theirs.items() if ours.get(step, []) != used]
    found = [f"steps that used samples of others: {strange[:_SHOWN]}"] if strange else []
    if len(short) > num_deaths:
        found.append(f"{len(short)} steps, such as {short[:_SHOWN]}, did not use all their samples")
    return found


def furthest(told: Sequence[ToldStep], straight: Sequence[ToldStep]) -> float:
    """The largest relative difference of a loss."""
    expected = {one.step: one.loss for one in straight}
    return max(
        (abs(one.loss - expected[one.step]) / abs(expected[one.step]) for one in told), default=0.0
    )


def state_differences(
    disturbed: Path, straight: Path, step: int, tolerance: float
) -> tuple[list[str], float]:
    """Where the state of `step` differs, for people, and the largest difference of a tensor,
    relative to its largest element. `disturbed` and `straight` are the dump folders."""
    name = f"step-{step}"
    storages = [open_storage(str(folder / "checkpoint")) for folder in (disturbed, straight)]
    damage = [str(one) for one in verify(storages[0], name)]
    if damage:
        return damage[:_SHOWN], 1.0
    ours, theirs = (StoredSnapshot(storage, name) for storage in storages)
    if ours.tensors.keys() != theirs.tensors.keys():
        return [f"other tensors: {sorted(ours.tensors.keys() ^ theirs.tensors.keys())}"], 1.0
    found, largest = [], 0.0
    for tensor in ours.tensors:
        one, other = read_tensor(ours, tensor), read_tensor(theirs, tensor)
        scale = other.abs().max().item() or 1.0
        off = (one - other).abs().max().item() / scale if one.numel() else 0.0
        largest = max(largest, off)
        if not off <= tolerance:
            found.append(f"{tensor}: off by {off:.1e}")
    if ours.saved.values != theirs.saved.values:
        found.append(f"values {ours.saved.values}, wanted {theirs.saved.values}")
    return found[:_SHOWN], largest
