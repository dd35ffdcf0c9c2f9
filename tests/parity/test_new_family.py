"""A new model family is one file: every parallelism supports it without other changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tolerances
from tests.job import Outcome, run_job
from tests.parity.meshes import MESHES, assert_same
from tests.pool import WorkerPool
from torchtitan_lite import models

Pools = Callable[[int], WorkerPool]
FOLDER = Path(__file__).parents[1] / "assets" / "new_family"


def run_with_the_file(folder: Path, overrides: dict[str, Any]) -> Outcome:
    """Train the new family in this worker, as if its file were in `models/`."""
    if str(FOLDER) not in models.__path__:
        models.__path__.append(str(FOLDER))
    return run_job(folder, {"model.flavor": "small", **overrides, "model.name": "toy"})


@pytest.mark.parametrize(
    "mesh",
    [
        *("cp-2-ulysses", "pp-2", "fsdp-2-tp-2"),
        *(
            pytest.param(mesh, marks=pytest.mark.matrix)
            for mesh in ("fsdp-2", "tp-2", "tp-2-whole-sequence")
        ),
    ],
)
def test_a_family_in_one_file_trains_on_every_mesh(mesh: str, pools: Pools, tmp_path: Path) -> None:
    (alone,) = pools(1).run(run_with_the_file, tmp_path / "1", {"training.local_batch_size": 8})
    assert alone.losses[-1] < alone.losses[0]
    world_size, overrides = MESHES[mesh]
    for outcome in pools(world_size).run(run_with_the_file, tmp_path / "n", overrides):
        assert_same(outcome, alone, tolerances.PARITY_FLOAT64)
