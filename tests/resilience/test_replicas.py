"""Replicas that die and return leave no trace in the loss: real processes, real kills."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import launch
from tests.replicas import Replicas, replicas
from tests.tolerances import FAULTS_FLOAT64

_ARGUMENTS: tuple[str, ...] = (
    *launch.SMALL,
    "--training.dtype=float64",
    "--training.seq_len=128",
    "--training.local_batch_size=2",
    # Three rounds, which two replicas cannot share evenly.
    "--training.global_batch_size=6",
    "--metrics.log_freq=1",
    "--metrics.enable_tensorboard=true",
    "--debug.sample_ledger=true",
    "--training.steps=100000",
    "--checkpoint.interval=10",
    "--fault_tolerance.process_group_timeout_ms=20000",
)
_MESHES: dict[str, tuple[int, list[str]]] = {
    "FSDP": (2, ["--training.global_batch_size=12"]),
    "TP": (2, ["--parallelism.tensor_parallel_degree=2"]),
    "PP": (2, ["--parallelism.pipeline_parallel_degree=2"]),
    "CP": (2, ["--parallelism.context_parallel_degree=2"]),
    "EP": (
        2,
        [
            "--model.name=qwen3",
            "--model.flavor=debugmodel_moe",
            "--model.router_bias_update_rate=1e-3",
            "--training.global_batch_size=12",
            "--parallelism.expert_parallel_degree=2",
        ],
    ),
}


def _until_stopped(run: Replicas) -> None:
    """Ask all to leave, and let them."""
    for process in run.running.values():
        # Without torchrun the process is the rank.
        for rank in launch.ranks_of(process) or [process]:
            rank.send_signal(signal.SIGTERM)
    for number in run.running:
        run.wait(number)


def _losses(steps: Sequence[dict[str, Any]]) -> dict[int, float]:
    return {step["step"]: step["loss"] for step in steps}


def _samples(run: Replicas) -> dict[int, list[int]]:
    """Step -> the samples of all ranks that share no sample, as they used them."""
    found: dict[int, set[int]] = {}
    for path in run.folder.glob("replica_*/samples_rank_*.jsonl"):
        for line in path.read_text().splitlines():
            told = json.loads(line)
            found.setdefault(told["step"], set()).update(told["samples"])
    return {step: sorted(samples) for step, samples in found.items()}


def _check_against_a_straight_run(
    run: Replicas, num_ranks: int, arguments: Sequence[str], tmp_path: Path
) -> None:
    """The losses of all replicas are those of a run that nothing has disturbed."""
    told = [_losses(run.steps(number)) for number in run.running]
    last = max(max(losses) for losses in told)
    straight = tmp_path / "straight"
    own = [f"--job.dump_folder={straight}", f"--training.steps={last}"]
    own += ["--checkpoint.enable=false"]
    launch.run(num_ranks, [*arguments, *own], tmp_path / "straight.log")
    expected = _losses(launch.steps_of(straight))
    for losses in told:
        for step, loss in losses.items():
            assert loss == pytest.approx(expected[step], rel=FAULTS_FLOAT64), step
    used = _samples(run)
    batch = len(used[1])
    incomplete = []
    for step, samples in used.items():
        expected_samples = list(range((step - 1) * batch, step * batch))
        assert set(samples) <= set(expected_samples), step
        if samples != expected_samples:
            incomplete.append(step)
    # Who is killed may have committed a step and not written down what it used.
    assert len(incomplete) <= 1


def _events(run: Replicas, number: int) -> set[str]:
    """What has happened, as metrics.jsonl and TensorBoard both tell it."""
    told = launch.events_of(run.output(number))
    drawn = EventAccumulator(str(run.output(number) / "tb"))
    drawn.Reload()
    tags = drawn.Tags()
    for event in told:
        for name in event.keys() - {"event", "step"}:
            value, tag = event[name], f"{event['event']}/{name}"
            if isinstance(value, str):
                assert f"{tag}/text_summary" in tags["tensors"]
            else:
                assert value in [pytest.approx(one.value) for one in drawn.Scalars(tag)], tag
    return {event["event"] for event in told}


def _check_books(run: Replicas) -> None:
    """Faults and recoveries are told of, and each second has its place."""
    assert _events(run, 0) >= {"quorum", "step_failed", "books"}
    assert _events(run, 1) >= {"quorum", "healed", "books"}
    survivor, returned = (launch.books_of(run.output(number)) for number in run.running)
    assert survivor["lost_s"] > 0
    assert survivor["idle_s"] == 0
    assert returned["idle_s"] > 0
    assert returned["healing_s"] > 0
    assert returned["wall_s"] > returned["start_s"] > 0


def _check_kill_and_return(
    num_ranks: int, arguments: Sequence[str], tmp_path: Path, *, kill: str = "replica"
) -> None:
    with replicas(tmp_path / "run", num_ranks, arguments) as run:
        run.start(0)
        run.start(1)
        run.wait_for_step(0, 4)
        run.wait_for_step(1, 4)
        run.kill(1)
        run.wait_for_step(0, run.steps(0)[-1]["step"] + 3)
        assert run.steps(0)[-1]["num_replicas"] == 1
        run.start(1)
        returned = run.steps(0)[-1]["step"]
        while run.steps(0)[-1]["num_replicas"] == 1:
            run.wait_for_step(0, run.steps(0)[-1]["step"] + 1)
        run.wait_for_step(1, max(returned, run.steps(0)[-1]["step"]) + 3)
        _until_stopped(run)
        assert [run.wait(number) for number in run.running] == [0, 0]
        _check_books(run)
        _check_against_a_straight_run(run, num_ranks, arguments, tmp_path)


@pytest.mark.timeout(300)
def test_a_replica_that_is_killed_and_returns_leaves_no_trace(tmp_path: Path) -> None:
    _check_kill_and_return(1, _ARGUMENTS, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mesh", _MESHES)
def test_with_parallelism_inside_the_replicas(mesh: str, tmp_path: Path) -> None:
    num_ranks, changes = _MESHES[mesh]
    _check_kill_and_return(num_ranks, [*_ARGUMENTS, *changes], tmp_path)
