"""Experts on meshes: initial weights, router load and its balancing, validation loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import tolerances
from tests.harness.jobs import Outcome, mesh_for, odd_config, run_job
from tests.harness.launch import steps_of
from tests.harness.ranks import WorkerPool
from tests.parity.meshes import EXPERT_MESHES
from tests.parity.test_mesh_independence import initial_weights, validation_loss
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.nn.spec import Microbatch, PipelineSchedule
from torchtitan_lite.parallel.expert import routers_of
from torchtitan_lite.training.builders import build
from torchtitan_lite.training.trainer import train_step

Pools = Callable[[int], WorkerPool]
EXPERTS = {"model.name": "qwen3", "model.flavor": "many_experts"}
MESHES = ["ep-2-etp-2", "tp-2", "pp-2-ep-2"]


def test_initial_weights_are_bitwise_equal_on_every_mesh(pools: Pools, tmp_path: Path) -> None:
    settings = {**EXPERTS, "training.dtype": "float32"}
    (alone,) = pools(1).run(initial_weights, tmp_path, settings)
    assert "layers.2.feed_forward.experts.w2" in alone
    for mesh in MESHES:
        world_size, overrides = EXPERT_MESHES[mesh]
        for weights in pools(world_size).run(initial_weights, tmp_path, {**settings, **overrides}):
            assert weights == alone, mesh


def test_validation_loss_is_the_same(pools: Pools, tmp_path: Path) -> None:
    (alone,) = pools(1).run(validation_loss, tmp_path / "1", EXPERTS)
    for mesh in ("pp-2-ep-2",):
        world_size, overrides = EXPERT_MESHES[mesh]
        for loss in pools(world_size).run(
            validation_loss, tmp_path / "n", {**EXPERTS, **overrides}
        ):
            assert loss == pytest.approx(alone, rel=tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["ep-2", "pp-2-ep-2", "tp-2-ep-2-whole-sequence"])
def test_router_load_is_logged_and_sums_to_the_tokens(
    mesh: str, pools: Pools, tmp_path: Path
) -> None:
    settings = {**EXPERTS, "training.steps": 2}
    pools(1).run(run_job, tmp_path / "alone", settings)
    world_size, overrides = EXPERT_MESHES[mesh]
    pools(world_size).run(run_job, tmp_path / "mesh", {**settings, **overrides})
    alone, shared = (steps_of(tmp_path / name) for name in ("alone", "mesh"))
    routers = [f"layers.{layer}.feed_forward.router" for layer in range(3)]
    assert [list(line["router_load"]) for line in shared] == [routers, routers]
    assert [line["router_load"] for line in shared] == [line["router_load"] for line in alone]
    assert [line["idle_experts"] for line in shared] == [line["idle_experts"] for line in alone]
    # 8 samples of 24 tokens, each with 2 of 12 experts: the mean load is 32 copies.
    busiest = shared[0]["router_load"][routers[0]] * 32
    assert busiest == round(busiest) > 32


class _Scaled:
    """A pipeline schedule whose losses are multiplied by a factor."""

    def __init__(self, inner: PipelineSchedule, factor: float) -> None:
        self.min_microbatches = inner.min_microbatches
        self._inner, self._factor = inner, factor

    def run(
        self,
        microbatches: Sequence[Microbatch],
        *,
        backward: bool,
        before_last: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        loss = self._inner.run(microbatches, backward=backward, before_last=before_last)
        return loss * self._factor


def biases_around_a_skipped_step(folder: Path, overrides: dict[str, Any]) -> list[torch.Tensor]:
    """All biases: at the start, after a step with a non-finite loss, and after a good step."""
    config = odd_config(folder, {**overrides, **EXPERTS})
    with build(config, mesh_for(config), StopRequest()) as built:
        job = built.job
        routers = routers_of(job.state.model).values()

        def biases() -> torch.Tensor:
            return torch.stack([router.expert_bias_X.clone() for router in routers])

        found = [biases()]
        for factor in (math.nan, 1.0):
            report = train_step(
                replace(job, pipeline_schedule=_Scaled(job.pipeline_schedule, factor))
            )
            assert report.committed == (factor == 1.0)
            loads = torch.stack(list(report.router_loads.values()))
            assert loads.sum(1).tolist() == [8 * 24 * 2] * 3
            found.append(biases())
        return found


def test_a_skipped_step_changes_no_bias(pools: Pools, tmp_path: Path) -> None:
    world_size, overrides = EXPERT_MESHES["ep-2"]
    for start, skipped, committed in pools(world_size).run(
        biases_around_a_skipped_step, tmp_path / "run", overrides
    ):
        assert torch.equal(skipped, start)
        change = (committed - skipped).abs()
        assert change.max() == pytest.approx(0.02)
        assert ((change == 0) | (change == change.max())).all()


def test_capacity_with_sharded_sequences_is_an_error(pools: Pools, tmp_path: Path) -> None:
    settings = {"model.name": "qwen3", "model.flavor": "capped_experts"}
    ep, tp = ({**settings, **EXPERT_MESHES[mesh][1]} for mesh in ("ep-2", "tp-2"))
    (alone,) = pools(1).run(run_job, tmp_path / "1", {**settings, "training.local_batch_size": 8})
    outcome: Outcome = pools(2).run(run_job, tmp_path / "ep", ep)[0]
    assert outcome.losses == pytest.approx(alone.losses, rel=tolerances.PARITY_FLOAT64)
    with pytest.raises(AssertionError, match="ranks of tp have only parts"):
        pools(2).run(run_job, tmp_path / "tp", tp)
