"""Several ranks on one GPU, over gloo, have the losses of one."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import run_ranks
from tests.gpu.training import train_job
from tests.harness.tolerances import GPU_BFLOAT16_LOSS, GPU_FLOAT32_LOSS

pytestmark = pytest.mark.gpu

BFLOAT16 = {"training.mixed_precision_param": "bfloat16"}
SETTINGS: dict[str, Any] = {"training.local_batch_size": 1, "training.steps": 4}
EXPERTS = {"model.name": "qwen3", "model.flavor": "few_experts"}
REPLICATE = {"parallelism.data_parallel_replicate_degree": 2}
TENSOR = {"parallelism.tensor_parallel_degree": 2}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP": (2, {}),
    "TP": (2, TENSOR),
    "EP": (2, EXPERTS | {"parallelism.expert_parallel_degree": 2}),
    "HSDP": (4, REPLICATE),
    "FSDP and TP": (4, TENSOR),
    "FSDP, 4 ranks": (4, {}),
    "FSDP with offload": (2, {"training.enable_cpu_offload": True}),
    "EP and TP": (4, EXPERTS | TENSOR | {"parallelism.expert_parallel_degree": 2}),
    "context parallel by gathering": (2, {"parallelism.context_parallel_degree": 2}),
}


@pytest.fixture(scope="module")
def one_rank() -> dict[str, dict[str, Any]]:
    """Return the results of one rank, by settings."""
    return {}


@pytest.mark.parametrize(
    ("mesh", "precision"),
    [
        *((mesh, "float32") for mesh in MESHES),
        *((mesh, "bfloat16") for mesh in ("FSDP", "EP", "FSDP and TP")),
    ],
)
def test_losses_are_those_of_one_rank(
    mesh: str, precision: str, device: str, tmp_path: Path, one_rank: dict[str, dict[str, Any]]
) -> None:
    num_ranks, changes = MESHES[mesh]
    is_exact = precision == "float32"
    model = {key: value for key, value in changes.items() if key in EXPERTS}
    shared = SETTINGS | model | ({} if is_exact else BFLOAT16)
    key = str(sorted(shared.items()))
    if key not in one_rank:
        (one_rank[key],) = run_ranks(
            train_job,
            tmp_path / "one_rank",
            folder=str(tmp_path / "one_rank_files"),
            device=device,
            overrides=shared,
        )
    found = run_ranks(
        train_job,
        tmp_path / "ranks",
        num_ranks,
        folder=str(tmp_path / "files"),
        device=device,
        overrides=shared | changes,
    )
    assert all(one["losses"] == found[0]["losses"] for one in found)
    tolerance = GPU_FLOAT32_LOSS if is_exact else GPU_BFLOAT16_LOSS
    assert found[0]["losses"] == pytest.approx(one_rank[key]["losses"], rel=tolerance)
    assert found[0]["grad_norms"] == pytest.approx(one_rank[key]["grad_norms"], rel=10 * tolerance)
