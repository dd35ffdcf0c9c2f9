"""Muon on every mesh equals Muon in one process: owners orthogonalize the same matrices, however
these are sharded.

The iteration runs in float64, which shows errors that bfloat16 would round away; some rows run it
in bfloat16, as torch.optim.Muon does, with which `tests/unit/optim/test_muon.py` compares.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import tolerances
from tests.harness.jobs import Outcome, run_job
from tests.harness.ranks import WorkerPool
from tests.parity.meshes import (
    EXPERT_MESHES,
    EXPERTS,
    MESHES,
    assert_same,
    chosen,
    family_case,
    long,
)

Pools = Callable[[int], WorkerPool]

MUON = {"optimizer.name": "Muon", "optimizer.muon_dtype": "float64"}
# One row for each kind of layout: the others differ in forward and backward.
SHORT = ("pp-2-zbv", "cpu-offload")


@pytest.mark.parametrize("mesh", [*SHORT, *long(*(m for m in MESHES if m not in SHORT))])
def test_same_training_as_one_process(
    mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    shared = {"model.flavor": "odd", **chosen(overrides), **MUON}
    expected = reference(**shared)
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", EXPERT_MESHES)
def test_same_training_with_experts(
    mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = EXPERT_MESHES[mesh]
    shared = {**EXPERTS, **chosen(overrides), **MUON}
    expected = reference(**shared)
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("qwen3", "ep-2-fsdp-4"),
        *(("llama3", mesh) for mesh in ("fsdp-4", "tp-2", "hsdp-2x2-tp-2", "pp-2-tp-2-fsdp-2")),
        *(("qwen3", mesh) for mesh in ("ep-4", "fsdp-2-tp-2-ep-4", "ep-2-fsdp-8-few")),
    ],
)
def test_same_training_with_the_iteration_of_torch(
    family: str, mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Float64 weights and the iteration in bfloat16, with all other options changed."""
    world_size, overrides, shared = family_case(family, mesh)
    options = {
        "optimizer.name": "Muon",
        "optimizer.adamw_lr": 3e-3,
        "optimizer.muon_momentum": 0.9,
        "optimizer.muon_nesterov": False,
        "optimizer.muon_ns_steps": 3,
        "optimizer.muon_adjust_lr": "match_rms_adamw",
        "optimizer.weight_decay": 0.5,
    }
    shared = {**shared, **options}
    expected = reference(**shared)
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("qwen3", "ep-2"),
        *long(*(("llama3", mesh) for mesh in MESHES)),
        *long(*(("qwen3", mesh) for mesh in EXPERT_MESHES if mesh != "ep-2")),
    ],
)
def test_same_loss_and_norm_in_float32(
    family: str, mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides, shared = family_case(family, mesh)
    float32 = {"training.dtype": "float32", "optimizer.muon_dtype": "float32"}
    shared = {**shared, "optimizer.name": "Muon", **float32}
    expected = reference(**shared)
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert outcome.losses == pytest.approx(expected.losses, rel=tolerances.PARITY_FLOAT32_LOSS)
        norms = pytest.approx(expected.grad_norms, rel=tolerances.PARITY_FLOAT32_NORM)
        assert outcome.grad_norms == norms
