"""The optimizer on every kind of parameter: 2D shards, experts, replicated, without a gradient."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.harness import tolerances
from tests.harness.jobs import run_job
from tests.harness.ranks import WorkerPool
from tests.parity.meshes import EXPERT_MESHES, MESHES, REFERENCE, assert_same, chosen, long
from tests.parity.test_new_family import run_with_the_file

Pools = Callable[[int], WorkerPool]


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=pytest.mark.matrix) for name in ("AdamW", "SGD", "Adagrad")],
)
def test_implementations_agree_on_all_kinds_of_shards(
    optimizer: str, pools: Pools, tmp_path: Path
) -> None:
    # Shards over tp and dp, experts over ep and expert_shard, and replicated routers.
    world_size, mesh = EXPERT_MESHES["fsdp-2-tp-2-ep-2"]
    settings = {**mesh, "model.name": "qwen3", "model.flavor": "many_experts"}
    weights = {}
    for implementation in ("for-loop", "foreach", "fused"):
        overrides = {"optimizer.name": optimizer, "optimizer.implementation": implementation}
        outcomes = pools(world_size).run(
            run_job, tmp_path / implementation, {**settings, **overrides}
        )
        weights[implementation] = outcomes[0].weights
    frozen = {**settings, "optimizer.lr": 0.0, "training.steps": 1}
    start = pools(world_size).run(run_job, tmp_path / "start", frozen)[0].weights
    expected = weights["for-loop"]
    for name in start:
        assert not torch.equal(expected[name], start[name]) or "expert_bias" in name
    for implementation in ("foreach", "fused"):
        for name, weight in weights[implementation].items():
            torch.testing.assert_close(
                weight,
                expected[name],
                rtol=tolerances.PARITY_FLOAT64,
                atol=tolerances.PARITY_FLOAT64,
                msg=f"{name} by {implementation}",
            )


@pytest.mark.parametrize("optimizer", ["Adagrad"])
def test_a_step_is_that_of_one_process(optimizer: str, pools: Pools, tmp_path: Path) -> None:
    """AdamW, SGD and Muon are in the other parity tests."""
    world_size, mesh = MESHES["fsdp-2-tp-2"]
    shared = {"model.flavor": "odd", **chosen(mesh), "optimizer.name": optimizer}
    (expected,) = pools(1).run(run_job, tmp_path / "1", {**REFERENCE, **shared})
    for outcome in pools(world_size).run(run_job, tmp_path / "n", {**mesh, **shared}):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [
        ("fsdp-2-tp-2", "Muon"),
        *long(*((mesh, "AdamW") for mesh in ("accumulation-1", "fsdp-2-tp-2", "pp-2"))),
    ],
)
def test_a_parameter_without_a_gradient_is_unchanged(
    mesh: str, optimizer: str, pools: Pools, tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    settings = {
        "model.flavor": "with_unused",
        "optimizer.name": optimizer,
        "optimizer.weight_decay": 0.5,
    }
    frozen = {**settings, "optimizer.lr": 0.0, "training.steps": 1}
    (before,) = pools(1).run(run_with_the_file, tmp_path / "1", frozen)
    after = pools(world_size).run(run_with_the_file, tmp_path / "n", {**settings, **overrides})[0]
    unused, used = "blocks.1.unused", "blocks.1.norm.weight"
    assert torch.equal(after.weights[unused], before.weights[unused])
    assert not torch.equal(after.weights[used], before.weights[used])
    assert f"optimizer.{used}.exp_avg" in after.state
    assert not any(name.startswith(f"optimizer.{unused}.") for name in after.state)
    matrix = "blocks.1.attention.wq.weight"
    slot = "momentum_buffer" if optimizer == "Muon" else "exp_avg"
    assert f"optimizer.{matrix}.{slot}" in after.state
