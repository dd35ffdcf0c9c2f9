"""The host waits for the GPU only where it must; experts compile."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import run_ranks
from tests.gpu.training import train_job
from tests.harness.tolerances import GPU_BFLOAT16_LOSS

pytestmark = pytest.mark.gpu

BFLOAT16 = {"training.mixed_precision_param": "bfloat16"}
COMPILE = {"compile.enable": True}
WAITS_PER_MOE_LAYER = 1
"""The token counts per expert. The wait for the totals of the step is on an event, which torch does
not count, and a microbatch in pinned memory is copied without a wait."""


@pytest.mark.parametrize(
    ("name", "changes", "allowed"),
    [
        ("dense", {}, 0),
        ("dense, compiled", COMPILE, 0),
        (
            "experts",
            {"model.name": "qwen3", "model.flavor": "few_experts"},
            4 * 2 * WAITS_PER_MOE_LAYER,
        ),
    ],
)
def test_the_host_waits_only_where_it_must(
    name: str, changes: dict[str, Any], allowed: int, cuda: str, tmp_path: Path
) -> None:
    (ours,) = run_ranks(
        train_job,
        tmp_path / "run",
        folder=str(tmp_path),
        device=cuda,
        overrides=BFLOAT16 | {"training.local_batch_size": 2} | changes,
        counts_waits_from=4,
    )
    assert ours["waits"].keys() == {"4", "5", "6"}
    for step, places in ours["waits"].items():
        assert len(places) <= allowed, (step, places)


def test_experts_compile_and_keep_their_losses(cuda: str, tmp_path: Path) -> None:
    moe = BFLOAT16 | {"model.name": "qwen3", "model.flavor": "few_experts"}
    eager, compiled = (
        run_ranks(
            train_job,
            tmp_path / f"run_{number}",
            folder=str(tmp_path / str(number)),
            device=cuda,
            overrides=moe | changes,
        )[0]
        for number, changes in enumerate(({}, COMPILE))
    )
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=GPU_BFLOAT16_LOSS)
