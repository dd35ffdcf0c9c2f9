"""A loss or gradient that is not finite changes no weight, and too many in a row stop the run."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.job import Outcome, digest, run_job
from tests.pool import WorkerPool
from torchtitan_lite.parallel import OneStage

Pools = Callable[[int], WorkerPool]
SETTINGS: dict[str, Any] = {
    "checkpoint.enable": True,
    "checkpoint.interval": 100,
    "training.steps": 4,
    "training.local_batch_size": 4,
    "debug.max_skipped_steps": 2,
}


def run_with_bad_steps(folder: Path, bad_runs: set[int], overrides: dict[str, Any]) -> Outcome:
    """Train with a gradient that is not finite on the last rank in the runs of the schedule that
    `bad_runs` numbers."""
    runs = 0
    healthy = OneStage.run

    def run(
        self: OneStage, microbatches: Any, *, backward: bool, before_last: Any = None
    ) -> torch.Tensor:
        nonlocal runs
        runs += 1
        loss = healthy(self, microbatches, backward=backward, before_last=before_last)
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        if runs in bad_runs and last:
            gradient = next(self._model.parameters()).grad
            assert gradient is not None
            gradient.to_local().view(-1)[0] = math.inf  # type: ignore[attr-defined]
        return loss

    OneStage.run = run
    try:
        return run_job(folder, overrides)
    finally:
        OneStage.run = healthy


def test_a_refused_step_changes_nothing_but_the_cursor(pools: Pools, tmp_path: Path) -> None:
    outcomes = pools(2).run(run_with_bad_steps, tmp_path / "run", {2}, SETTINGS)
    for outcome in outcomes:
        assert outcome.committed == [True, False, True, True, True]
        assert outcome.finished
    used = sorted(sample for outcome in outcomes for sample in outcome.samples[2])
    assert used == list(range(16, 24))
    straight = pools(2).run(run_job, tmp_path / "other", {**SETTINGS, "training.steps": 1})
    assert straight[0].losses == outcomes[0].losses[:1]


def test_too_many_in_a_row_stop_the_run_with_the_last_good_state_saved(
    pools: Pools, tmp_path: Path
) -> None:
    good = pools(2).run(run_job, tmp_path / "good", {**SETTINGS, "training.steps": 2})
    with pytest.raises(AssertionError, match="2 steps in a row") as caught:
        pools(2).run(run_with_bad_steps, tmp_path / "run", {3, 4}, SETTINGS)
    saved = tmp_path / "run" / "checkpoint" / "step-2"
    assert str(saved) in str(caught.value)
    resumed = pools(2).run(run_job, tmp_path / "run", {**SETTINGS, "training.steps": 2})
    assert resumed[0].resumed_at == 2
    assert digest(resumed[0].weights) == digest(good[0].weights)
