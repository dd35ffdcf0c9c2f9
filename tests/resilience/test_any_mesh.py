"""A checkpoint saved on one mesh is resumed on another: the following losses equal those of an
uninterrupted run, bitwise on the same mesh (`test_resume`)."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.jobs import run_job
from tests.harness.ranks import WorkerPool
from tests.harness.tolerances import PARITY_FLOAT64

Pools = Callable[[int], WorkerPool]
Meshes = dict[str, tuple[int, dict[str, Any]]]
"""Number of ranks and settings by name."""
HSDP = {"parallelism.data_parallel_replicate_degree": 2}
TP = {"parallelism.tensor_parallel_degree": 2, "training.local_batch_size": 2}
CP = {"parallelism.context_parallel_degree": 2}
PP = {"parallelism.pipeline_parallel_degree": 2}
MESHES: Meshes = {
    "one process": (1, {}),
    "fsdp-2": (2, {}),
    "fsdp-4": (4, {}),
    "hsdp-2x2": (4, HSDP),
    "tp-2": (2, TP),
    "pp-2": (2, PP),
    "fsdp-2-tp-2": (4, TP),
    "pp-2-fsdp-2": (4, PP),
    "fsdp-2-cp-2": (4, CP),
    "pp-2-tp-2": (4, {**PP, **TP}),
}
EXPERTS = {"model.name": "qwen3", "model.flavor": "many_experts"}
EXPERT_MESHES: Meshes = {
    "one process": (1, EXPERTS),
    "ep-2": (2, {**EXPERTS, "parallelism.expert_parallel_degree": 2}),
    "fsdp-4": (4, EXPERTS),
    "fsdp-2-ep-2": (4, {**EXPERTS, "parallelism.expert_parallel_degree": 2}),
    "ep-4": (4, {**EXPERTS, "parallelism.expert_parallel_degree": 4}),
    "replicate-2-ep-2": (4, {**EXPERTS, **HSDP, "parallelism.expert_parallel_degree": 2}),
}
SAVING = {
    "checkpoint.enable": True,
    "checkpoint.interval": 100,
    # Asynchronous saves: `test_resume`.
    "checkpoint.async_mode": "disabled",
    "training.global_batch_size": 4,
}


def with_settings(meshes: Meshes, more: dict[str, Any]) -> Meshes:
    return {name: (size, {**settings, **more}) for name, (size, settings) in meshes.items()}


MUON = {"optimizer.name": "Muon", "optimizer.muon_dtype": "float64"}
"""In bfloat16, a weight that another order of sums changes in its last bit may round to another
number."""
TIED = {"model.flavor": "odd_tied"}
SHORT = ("one process", "fsdp-2-tp-2", "pp-2")
SHORT_EXPERTS = ("one process", "ep-2")


@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param(
            with_settings({name: MESHES[name] for name in SHORT}, TIED), marks=pytest.mark.matrix
        ),
        with_settings({name: EXPERT_MESHES[name] for name in SHORT_EXPERTS}, MUON),
        pytest.param(MESHES, marks=pytest.mark.matrix),
        pytest.param(EXPERT_MESHES, marks=pytest.mark.matrix),
        pytest.param(with_settings(MESHES, MUON), marks=pytest.mark.matrix),
        pytest.param(with_settings(EXPERT_MESHES, MUON), marks=pytest.mark.matrix),
    ],
    ids=[
        *("tied", "experts, Muon", "all dense", "all experts"),
        *("all dense, Muon", "all experts, Muon"),
    ],
)
def test_a_run_moves_from_mesh_to_mesh(meshes: Meshes, pools: Pools, tmp_path: Path) -> None:
    """Each mesh saves once and resumes once."""
    last = 2 * len(meshes)
    always = {**SAVING, "lr_scheduler.total_steps": last}
    _, plain = next(iter(meshes.values()))
    uninterrupted = pools(1).run(
        run_job, tmp_path / "uninterrupted", {**plain, "training.steps": last, **always}
    )[0]
    for number, (name, (world_size, settings)) in enumerate(meshes.items()):
        settings = {**settings, **always, "training.steps": 2 * number + 2}
        outcomes = pools(world_size).run(run_job, tmp_path / "moving", settings)
        assert outcomes[0].resumed_at == 2 * number, name
        expected = uninterrupted.losses[2 * number : 2 * number + 2]
        assert outcomes[0].losses == pytest.approx(expected, rel=PARITY_FLOAT64), name


@pytest.mark.matrix
@pytest.mark.parametrize("meshes", [MESHES, EXPERT_MESHES], ids=["dense", "experts"])
@pytest.mark.parametrize("position", range(len(MESHES)))
def test_every_mesh_resumes_a_checkpoint_of_one(
    meshes: Meshes, position: int, pools: Pools, tmp_path: Path
) -> None:
    if position >= len(meshes):
        pytest.skip("this table has fewer meshes")
    world_size, settings = list(meshes.values())[position]
    settings = {**settings, **SAVING}
    first = pools(world_size).run(run_job, tmp_path / "first", {**settings, "training.steps": 3})
    uninterrupted = pools(world_size).run(
        run_job, tmp_path / "uninterrupted", {**settings, "training.steps": 6}
    )
    assert uninterrupted[0].losses[:3] == first[0].losses
    for name, (other_size, others) in meshes.items():
        shutil.copytree(tmp_path / "first", tmp_path / name)
        (tmp_path / name / "run_id").unlink()
        again = {**others, **SAVING, "training.steps": 6}
        outcomes = pools(other_size).run(run_job, tmp_path / name, again)
        assert outcomes[0].resumed_at == 3
        assert outcomes[0].losses == pytest.approx(
            uninterrupted[0].losses[3:], rel=PARITY_FLOAT64
        ), name
