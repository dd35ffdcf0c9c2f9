"""A run that is stopped and resumed on a GPU equals a straight one, bit by bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import run_ranks
from tests.gpu.training import train_job

pytestmark = pytest.mark.gpu

SETTINGS = {
    "debug.deterministic": True,
    "debug.seed": 3,
    "checkpoint.enable": True,
    "checkpoint.interval": 2,
    "training.mixed_precision_param": "bfloat16",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "offload": {"training.enable_cpu_offload": True},
    "compiled": {"compile.enable": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_stop_and_resume_is_bitwise_equal_to_a_straight_run(
    variant: str, device: str, tmp_path: Path
) -> None:
    if device == "cpu" and variant == "compiled":
        pytest.skip("the tests of resume compile on a CPU")
    overrides = SETTINGS | VARIANTS[variant]

    def run(name: str, folder: str, stop_after: int = 0) -> dict[str, Any]:
        arguments: dict[str, Any] = {"folder": str(tmp_path / folder), "device": device}
        (result,) = run_ranks(
            train_job, tmp_path / name, **arguments, overrides=overrides, stop_after=stop_after
        )
        return result

    straight = run("straight", "whole")
    first = run("first", "parts", stop_after=3)
    second = run("second", "parts")
    assert (first["resumed_at"], second["resumed_at"]) == (0, 3)
    assert first["losses"] + second["losses"] == straight["losses"]
    assert first["grad_norms"] + second["grad_norms"] == straight["grad_norms"]
    assert second["state"] == straight["state"]
    assert any(name.startswith("optimizer.") for name in straight["state"])
