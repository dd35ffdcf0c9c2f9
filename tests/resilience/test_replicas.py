"""Replicas that are killed and restarted do not change the losses: real processes, real kills."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness import launch
from tests.harness.replicas import (
    ENDLESS,
    Replicas,
    check_against_undisturbed_run,
    kill_and_restart,
    replicas,
)

_ARGUMENTS: tuple[str, ...] = (
    *ENDLESS,
    # Three rounds, which two replicas cannot split evenly.
    "--training.global_batch_size=6",
    "--metrics.enable_tensorboard=true",
    "--checkpoint.interval=10",
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
            "--model.flavor=tiny_moe",
            "--model.router_bias_update_rate=1e-3",
            "--training.global_batch_size=12",
            "--parallelism.expert_parallel_degree=2",
        ],
    ),
    "Muon": (
        2,
        [
            "--model.name=qwen3",
            "--model.flavor=tiny_moe",
            "--training.global_batch_size=12",
            "--optimizer.name=Muon",
            "--optimizer.muon_dtype=float64",
        ],
    ),
    # The first steps are one round, which only one replica has.
    "batch size warm-up": (1, ["--training.batch_size_warmup=[[24, 2], [200, 4]]"]),
    # Two and four microbatches of six.
    "PP, experts": (
        2,
        [
            "--model.name=qwen3",
            "--model.flavor=tiny_moe",
            "--model.router_bias_update_rate=1e-3",
            "--parallelism.pipeline_parallel_degree=2",
        ],
    ),
}


def _events(run: Replicas, number: int) -> set[str]:
    """Return the events, which metrics.jsonl and TensorBoard must agree on."""
    records = launch.events_of(run.output(number))
    drawn = EventAccumulator(str(run.output(number) / "tb"))
    drawn.Reload()
    tags = drawn.Tags()
    for event in records:
        for name in event.keys() - {"event", "step", "time"}:
            value, tag = event[name], f"train_events/{event['event']}/{name}"
            if isinstance(value, str):
                assert f"{tag}/text_summary" in tags["tensors"]
            else:
                assert value in [pytest.approx(one.value) for one in drawn.Scalars(tag)], tag
    return {event["event"] for event in records}


def _check_time_accounting(run: Replicas) -> None:
    """Check that faults and recoveries are reported, and that all wall time is accounted for."""
    assert _events(run, 0) >= {"quorum", "step_failed", "time_accounting"}
    assert _events(run, 1) >= {"quorum", "healed", "time_accounting"}
    survivor, returned = (launch.time_accounting_of(run.output(number)) for number in run.running)
    assert survivor["lost_s"] > 0
    assert survivor["idle_s"] == 0
    assert returned["idle_s"] > 0
    assert returned["healing_s"] > 0
    assert returned["wall_s"] > returned["start_s"] > 0


def _check_kept_work(run: Replicas, batch: int) -> None:
    """Check that the survivor has computed only what was lost of the step in which the other one
    was killed."""
    events = [event for event in launch.events_of(run.output(0)) if event["event"] == "kept_work"]
    assert any(0 < event["samples_kept"] < batch for event in events), events
    for event in events:
        assert event["samples_kept"] + event["samples_computed"] <= batch


def _check_kill_and_restart(
    num_ranks: int, arguments: Sequence[str], tmp_path: Path, *, keeps_work: int = 0
) -> None:
    """`keeps_work`: the samples of a step, of which the survivor keeps some; 0: possibly none."""
    with replicas(tmp_path / "run", num_ranks, arguments) as run:
        kill_and_restart(run, tmp_path / "halt")
        _check_time_accounting(run)
        if keeps_work:
            _check_kept_work(run, batch=keeps_work)
        check_against_undisturbed_run(run, num_ranks, arguments, tmp_path)


@pytest.mark.timeout(300)
def test_a_killed_and_restarted_replica_does_not_change_the_losses(tmp_path: Path) -> None:
    _check_kill_and_restart(1, _ARGUMENTS, tmp_path, keeps_work=6)


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mesh", _MESHES)
def test_with_parallelism_inside_the_replicas(mesh: str, tmp_path: Path) -> None:
    num_ranks, changes = _MESHES[mesh]
    batch = {"FSDP": 12, "TP": 6, "EP": 12, "Muon": 12, "CP": 6}.get(mesh, 0)
    _check_kill_and_restart(num_ranks, [*_ARGUMENTS, *changes], tmp_path, keeps_work=batch)
