"""Training steps on a GPU have the losses of a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import Figure
from tests.gpu.ranks import run_ranks
from tests.gpu.reference import DEBUG, ONE_BILLION, REFERENCE
from tests.gpu.training import long_text, train_job
from tests.harness.tolerances import GPU_BFLOAT16_LOSS, GPU_FLOAT32_LOSS

pytestmark = pytest.mark.gpu

BFLOAT16 = {"training.mixed_precision_param": "bfloat16"}
COMPILE = {"compile.enable": True}
FULL = {"activation_checkpoint.mode": "full"}
PER_OP = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({}, GPU_FLOAT32_LOSS),
    "bfloat16": (BFLOAT16, GPU_BFLOAT16_LOSS),
    "bfloat16, compiled": (BFLOAT16 | COMPILE, GPU_BFLOAT16_LOSS),
    "bfloat16, full checkpointing": (BFLOAT16 | FULL, GPU_BFLOAT16_LOSS),
    "bfloat16, compiled, checkpointing per operation": (
        BFLOAT16 | COMPILE | PER_OP,
        GPU_BFLOAT16_LOSS,
    ),
    "float32, offload": ({"training.enable_cpu_offload": True}, GPU_FLOAT32_LOSS),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_of_the_debug_model_are_those_of_a_cpu(
    name: str, device: str, tmp_path: Path
) -> None:
    changes, tolerance = VARIANTS[name]
    if device == "cpu" and changes.get("compile.enable"):
        pytest.skip("the unit tests compile on a CPU")
    (ours,) = run_ranks(
        train_job,
        tmp_path / "run",
        folder=str(tmp_path),
        device=device,
        overrides=DEBUG | changes,
        with_known_weights=True,
    )
    expected = json.loads(REFERENCE.read_text())["debug"]
    assert ours["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert ours["grad_norms"] == pytest.approx(expected["grad_norms"], rel=10 * tolerance)


def test_the_first_step_of_1B_is_that_of_a_cpu(cuda: str, tmp_path: Path, figure: Figure) -> None:
    (ours,) = run_ranks(
        train_job,
        tmp_path / "run",
        folder=str(tmp_path),
        device=cuda,
        overrides=ONE_BILLION | BFLOAT16,
        with_known_weights=True,
    )
    expected = json.loads(REFERENCE.read_text())["1B"]
    assert ours["losses"][0] == pytest.approx(expected["losses"][0], rel=GPU_BFLOAT16_LOSS)
    assert ours["grad_norms"][0] == pytest.approx(
        expected["grad_norms"][0], rel=10 * GPU_BFLOAT16_LOSS
    )
    figure("1B, eager: peak memory", ours["peak_gib"], "GiB")


@pytest.mark.alone
@pytest.mark.parametrize("variant", ["eager", "compiled", "compiled, checkpointing per operation"])
def test_steps_of_1B(variant: str, cuda: str, tmp_path: Path, figure: Figure) -> None:
    changes = BFLOAT16 | {"training.steps": 8, "training.local_batch_size": 4}
    changes |= {"training.global_batch_size": 4, "training.seq_len": 1024, "optimizer.lr": 1e-4}
    changes |= {"training.dataset_path": str(long_text(tmp_path))}
    changes |= COMPILE if "compiled" in variant else {}
    changes |= PER_OP if "per operation" in variant else {}
    (ours,) = run_ranks(
        train_job,
        tmp_path / "run",
        folder=str(tmp_path),
        device=cuda,
        overrides=ONE_BILLION | changes,
    )
    assert ours["committed"] == [True] * 8
    assert ours["losses"][-1] < ours["losses"][0]
    figure(f"1B, {variant}: tokens per second", 4 * 1024 / min(ours["step_s"][3:]), "tokens/s")
    figure(f"1B, {variant}: peak memory", ours["peak_gib"], "GiB")
