"""Bitwise: the initial weights and the samples of each step are the same on every mesh."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.job import digest, odd_config, run_job, whole
from tests.pool import WorkerPool
from torchtitan_lite.build import build_model
from torchtitan_lite.device import detect_device
from torchtitan_lite.mesh import start_mesh
from torchtitan_lite.models import model_spec

Pools = Callable[[int], WorkerPool]
HSDP = {"parallelism.data_parallel_replicate_degree": 2}
TP = {"parallelism.tensor_parallel_degree": 2}
STEPS = 5
BATCH = 8


def initial_weights(folder: Path, overrides: dict[str, Any]) -> dict[str, str]:
    """A digest of each whole parameter, before any step."""
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    config = odd_config(folder, overrides)
    with start_mesh(config.parallelism, config.comm, detect_device("cpu")) as mesh:
        model = build_model(config, model_spec(config.model), mesh)
        return digest({name: whole(p) for name, p in model.named_parameters()})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_initial_weights_are_the_same_bits_on_every_mesh(
    dtype: str, pools: Pools, tmp_path: Path
) -> None:
    precision = {"training.dtype": dtype}
    (alone,) = pools(1).run(initial_weights, tmp_path, precision)
    assert len(set(alone.values())) > 10
    for world_size, mesh in ((2, {}), (4, {}), (4, HSDP), (2, TP), (4, TP)):
        for weights in pools(world_size).run(initial_weights, tmp_path, {**precision, **mesh}):
            assert weights == alone
    (other_seed,) = pools(1).run(initial_weights, tmp_path, {**precision, "debug.seed": 1})
    assert other_seed["output.weight"] != alone["output.weight"]


def test_each_step_uses_the_same_samples_on_any_number_of_ranks(
    pools: Pools, tmp_path: Path
) -> None:
    for world_size, mesh in ((1, {}), (2, {}), (4, {}), (4, HSDP), (4, TP)):
        folder = tmp_path / f"{world_size}-{'-'.join(mesh)}"
        overrides = {"debug.sample_ledger": True, "training.steps": STEPS, **mesh}
        outcomes = pools(world_size).run(run_job, folder, overrides)
        for step in range(STEPS):
            used = [sample for outcome in outcomes for sample in outcome.samples[step]]
            copies = mesh.get("parallelism.tensor_parallel_degree", 1)
            expected = [i for i in range(step * BATCH, (step + 1) * BATCH) for _ in range(copies)]
            assert sorted(used) == expected
        assert len(list(folder.glob("samples_rank_*.jsonl"))) == world_size
