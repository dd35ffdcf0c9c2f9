"""A loss or gradient that is not finite, or that spikes, changes no weight: the run skips the step,
stops or rolls back, and too many such steps in a row stop it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.jobs import Outcome, digest, mesh_for, odd_config, run_job, whole
from tests.harness.ranks import WorkerPool
from torchtitan_lite.core import rng
from torchtitan_lite.core.errors import TrainingDiverged
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.parallel import GradientAccumulation
from torchtitan_lite.parallel.expert import routers_of
from torchtitan_lite.training.builders import build
from torchtitan_lite.training.trainer import train_step

Pools = Callable[[int], WorkerPool]
SETTINGS: dict[str, Any] = {
    "checkpoint.enable": True,
    "checkpoint.interval": 100,
    "checkpoint.async_mode": "disabled",
    "training.steps": 4,
    "training.local_batch_size": 4,
    "debug.max_skipped_steps": 2,
}


def run_with_bad_steps(
    folder: Path, bad_runs: set[int], overrides: dict[str, Any], value: float = math.inf
) -> Outcome:
    """Train with a corrupted gradient element of `value` on the last rank in the runs of the
    pipeline schedule that `bad_runs` numbers."""
    runs = 0
    healthy = GradientAccumulation.run

    def run(
        self: GradientAccumulation, microbatches: Any, *, backward: bool, before_last: Any = None
    ) -> torch.Tensor:
        nonlocal runs
        runs += 1
        loss = healthy(self, microbatches, backward=backward, before_last=before_last)
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        if runs in bad_runs and last:
            gradient = next(self._model.parameters()).grad
            assert gradient is not None
            gradient.to_local().view(-1)[0] = value  # type: ignore[attr-defined]
        return loss

    GradientAccumulation.run = run
    try:
        return run_job(folder, overrides)
    finally:
        GradientAccumulation.run = healthy


def diverge(folder: Path, bad_runs: set[int], overrides: dict[str, Any]) -> str:
    """Run as above, and return the error with which the run ends."""
    with pytest.raises(TrainingDiverged) as caught:
        run_with_bad_steps(folder, bad_runs, overrides)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_skipped_step_changes_only_the_cursor(dtype: str, pools: Pools, tmp_path: Path) -> None:
    # In float32 the fused optimizer skips the step, in float64 the trainer does.
    settings = {**SETTINGS, "training.dtype": dtype}
    outcomes = pools(2).run(run_with_bad_steps, tmp_path / "run", {2}, settings)
    for outcome in outcomes:
        assert outcome.committed == [True, False, True, True, True]
        assert outcome.finished
    used = sorted(sample for outcome in outcomes for sample in outcome.samples[2])
    assert used == list(range(16, 24))


def test_too_many_skipped_steps_in_a_row_stop_the_run_and_save_the_last_good_state(
    pools: Pools, tmp_path: Path
) -> None:
    good = pools(2).run(run_job, tmp_path / "good", {**SETTINGS, "training.steps": 2})
    error = pools(2).run(diverge, tmp_path / "run", {3, 4}, SETTINGS)[0]
    assert "2 consecutive steps" in error
    assert str(tmp_path / "run" / "checkpoint" / "step-2") in error
    resumed = pools(2).run(run_job, tmp_path / "run", {**SETTINGS, "training.steps": 2})
    assert resumed[0].resumed_at == 2
    assert digest(resumed[0].weights) == digest(good[0].weights)


def test_stop_ends_the_run_at_the_first_bad_step(pools: Pools, tmp_path: Path) -> None:
    settings = {**SETTINGS, "anomalies.on_non_finite": "stop"}
    error = pools(2).run(diverge, tmp_path / "run", {3}, settings)[0]
    assert "Step 3 is not finite: " in error and "samples 16 to 23." in error
    assert str(tmp_path / "run" / "checkpoint" / "step-2") in error
    resumed = pools(2).run(run_job, tmp_path / "run", SETTINGS)
    assert resumed[0].resumed_at == 2
    # Bad samples are not used again.
    assert min(sample for outcome in resumed for sample in outcome.samples[0]) == 24


_STORED = {"checkpoint.interval": 2}
_IN_MEMORY = {"checkpoint.async_mode": "async", "checkpoint.ram_interval": 1}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("where", "bad", "as_if_bad"),
    [
        # From step 4 to the checkpoint of step 2, and from there to that of step 1.
        (_STORED, {5}, {3, 4, 5}),
        (_STORED, {5, 6}, {2, 3, 4, 5, 6}),
        (_IN_MEMORY, {5}, {4, 5}),
        # The run does not return to a step that was rolled back, but may return to its replacement.
        (_IN_MEMORY, {5, 7}, {4, 5, 6, 7}),
    ],
    ids=["stored", "twice", "in memory", "in memory twice"],
)
def test_a_rollback_undoes_steps_and_continues_with_later_samples(
    pools: Pools, tmp_path: Path, where: dict[str, Any], bad: set[int], as_if_bad: set[int]
) -> None:
    settings = {**SETTINGS, **where, "debug.max_skipped_steps": 9, "training.steps": 6}
    rolling = {**settings, "anomalies.on_non_finite": "roll_back"}
    rolled = pools(2).run(run_with_bad_steps, tmp_path / "run", bad, rolling)
    # The run equals one without the steps that were rolled back.
    skipped = pools(2).run(run_with_bad_steps, tmp_path / "skipped", as_if_bad, settings)
    assert rolled[0].finished and skipped[0].finished
    assert rolled[0].losses[-2:] == skipped[0].losses[-2:]
    assert digest(rolled[0].state) == digest(skipped[0].state)
    used = sorted(sample for outcome in rolled for step in outcome.samples for sample in step)
    assert used == list(range(len(used)))


@pytest.mark.matrix
def test_too_many_rollbacks_in_a_row_stop_the_run(pools: Pools, tmp_path: Path) -> None:
    settings = {
        **SETTINGS,
        **_STORED,
        "debug.max_skipped_steps": 9,
        "anomalies.on_non_finite": "roll_back",
        "anomalies.max_roll_backs": 1,
    }
    error = pools(2).run(diverge, tmp_path / "run", {4, 5}, settings)[0]
    assert "after 1 consecutive rollbacks" in error


def test_only_a_spike_is_skipped(pools: Pools, tmp_path: Path) -> None:
    settings = {
        **SETTINGS,
        "training.steps": 12,
        "anomalies.on_spike": "skip",
        "anomalies.spike_window": 8,
        "anomalies.spike_min_steps": 8,
    }
    outcomes = pools(2).run(run_with_bad_steps, tmp_path / "run", {2, 10}, settings, 1e4)
    # The second step is too early for a judgment; it stays in the window without hiding the next
    # spike.
    assert outcomes[0].committed == [number != 10 for number in range(1, 14)]


def change_of_a_skipped_step(folder: Path, overrides: dict[str, Any]) -> list[str]:
    """Return what a skipped step of an MoE model changes in the state."""
    config = odd_config(folder, {"model.name": "qwen3", "model.flavor": "many_experts"} | overrides)
    with build(config, mesh_for(config), StopRequest()) as built:
        job = built.job
        assert train_step(job).committed

        def look() -> dict[str, Any]:
            values = job.state.values()
            values["train_state"].pop("history")
            tensors = {name: tensor.clone() for name, tensor in whole(job.state.tensors()).items()}
            loads = {name: router.load_X.tolist() for name, router in routers_of(model).items()}
            counts = {"loads": loads, "rng": rng.capture(), "lr": job.state.lr_scheduler.lr(1)}
            return {**digest(tensors), **values, **counts}

        model = job.state.model
        before = look()
        healthy = GradientAccumulation.run
        GradientAccumulation.run = lambda self, *args, **how: healthy(self, *args, **how) * math.nan
        try:
            assert not train_step(job).committed
        finally:
            GradientAccumulation.run = healthy
        after = look()
        return sorted(name for name in before if before[name] != after[name])


@pytest.mark.matrix
def test_a_skipped_step_does_not_change_router_biases(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(change_of_a_skipped_step, tmp_path / "run", {})[0] == ["dataloader"]
