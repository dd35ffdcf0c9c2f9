"""A suspicious step is recomputed: this identifies a faulty machine, and clears bad data."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.jobs import run_job
from tests.harness.ranks import WorkerPool
from torchtitan_lite.core.errors import DamagedState, MachineFault
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.nn.feed_forward import FeedForward
from torchtitan_lite.training import trainer

_SETTINGS: dict[str, Any] = {
    "training.steps": 4,
    "training.global_batch_size": 4,
    "checkpoint.enable": True,
    "checkpoint.interval": 100,
    "checkpoint.async_mode": "disabled",
    "fault_tolerance.replay_check": True,
}
_CALLS_OF_A_STEP = 2 * 3
"""Microbatches per rank times layers."""


def train_with_flips(folder: Path, flips: int, overrides: dict[str, Any]) -> str:
    """Train while a gradient element in rank 1's backward is wrong in `flips` consecutive calls
    from the third step on. Return the error with which the run ends, if any."""
    calls = 0

    def flip(gradient: torch.Tensor) -> torch.Tensor:
        wrong = gradient.clone()
        wrong.view(-1)[0] = math.inf
        return wrong

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal calls
        if isinstance(module, FeedForward) and dist.get_rank() == 1 and output.requires_grad:
            first = 2 * _CALLS_OF_A_STEP
            if first <= calls < first + flips:
                output.register_hook(flip)
            calls += 1

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        outcome = run_job(folder, {**_SETTINGS, **overrides})
        return "".join("+" if committed else "-" for committed in outcome.committed)
    except MachineFault as error:
        return str(error)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        pytest.param(
            {
                "parallelism.data_parallel_replicate_degree": 2,
                "parallelism.data_parallel_shard_degree": 1,
            },
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["FSDP", "HSDP"],
)
def test_a_rank_that_differs_is_named_and_the_good_state_saved(
    pools: Callable[[int], WorkerPool], tmp_path: Path, mesh: dict[str, Any]
) -> None:
    first, second = pools(2).run(train_with_flips, tmp_path / "run", 1, mesh)
    assert first == second
    assert "Step 3 was anomalous" in first and "differs on rank 1 of participant 0:" in first
    assert "rank 0" not in first
    assert str(tmp_path / "run" / "checkpoint" / "step-2") in first
    # The samples were good, and are used.
    resumed = pools(2).run(run_job, tmp_path / "run", _SETTINGS)
    assert resumed[0].resumed_at == 2
    assert min(sample for outcome in resumed for sample in outcome.samples[0]) == 8


def train_with_a_wrong_shard(folder: Path) -> str:
    """Train while a shard of a gradient changes on rank 1 after the reduction over ranks in step
    3. Return the error with which the run ends."""
    run, calls = trainer._forward_backward, 0

    def changed(job: trainer.Job, *args: Any) -> torch.Tensor:
        nonlocal calls
        loss = run(job, *args)
        calls += 1
        if calls == 3 and dist.get_rank() == 1:
            gradient = next(job.state.model.parameters()).grad
            assert gradient is not None
            local_tensor(gradient).view(-1)[0] = math.inf
        return loss

    trainer._forward_backward = changed
    try:
        run_job(folder, _SETTINGS)
        return ""
    except MachineFault as error:
        return str(error)
    finally:
        trainer._forward_backward = run


def test_a_shard_that_changes_after_the_reduction_is_named(
    pools: Callable[[int], WorkerPool], tmp_path: Path
) -> None:
    first, second = pools(2).run(train_with_a_wrong_shard, tmp_path / "run")
    assert first == second and "differs on rank 1 of participant 0:" in first


def train_with_damaged_state(folder: Path) -> str:
    """Train while a weight changes on rank 1 between steps 2 and 3. Return the error with which the
    run ends."""
    step, calls = trainer.train_step, 0

    def damaged(job: trainer.Job) -> trainer.StepReport:
        nonlocal calls
        calls += 1
        if calls == 3 and dist.get_rank() == 1:
            weight = local_tensor(next(job.state.model.parameters())).detach()
            weight.view(-1).numpy()[0] += 1e-3
        return step(job)

    trainer.train_step = damaged
    try:
        run_job(folder, {**_SETTINGS, "fault_tolerance.state_check": True})
        return ""
    except DamagedState as error:
        return str(error)
    finally:
        trainer.train_step = step


def test_a_rank_whose_state_changes_is_named(
    pools: Callable[[int], WorkerPool], tmp_path: Path
) -> None:
    first, second = pools(2).run(train_with_damaged_state, tmp_path / "run")
    assert first == second
    assert "changed in memory before step 3 on rank 1 of participant 0:" in first
    found = (tmp_path / "run").glob("diagnoses_rank_*.jsonl")
    said = [json.loads(line) for path in found for line in path.read_text().splitlines()]
    assert [(one["cause"], one["rank"]) for one in said] == [("memory_corruption", 1)]


@pytest.mark.matrix
def test_a_reproducible_anomaly_is_left_to_the_policy(
    pools: Callable[[int], WorkerPool], tmp_path: Path
) -> None:
    actual = pools(2).run(train_with_flips, tmp_path / "run", 2 * _CALLS_OF_A_STEP, {})
    assert actual == ["++-++"] * 2
    # Checking does not change the result.
    watching = {**_SETTINGS, "training.steps": 2}
    watched = pools(2).run(run_job, tmp_path / "watched", watching)
    plain = {**watching, "fault_tolerance.replay_check": False}
    assert watched[0].losses == pools(2).run(run_job, tmp_path / "plain", plain)[0].losses
