"""Initial weights and samples of each step are bitwise equal on every mesh."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import tolerances
from tests.harness.jobs import digest, mesh_for, odd_config, run_job, whole
from tests.harness.ranks import WorkerPool
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.models import model_spec
from torchtitan_lite.parallel.pipeline_stages import join_stages
from torchtitan_lite.training.builders import build, build_model
from torchtitan_lite.training.validation import validate

Pools = Callable[[int], WorkerPool]
HSDP = {"parallelism.data_parallel_replicate_degree": 2}
TP = {"parallelism.tensor_parallel_degree": 2}
CP = {"parallelism.context_parallel_degree": 2}
PP = {"parallelism.pipeline_parallel_degree": 2}
# Consecutive stages on a rank, which no schedule of torch has.
ORDER = "0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n"
STEPS = 2
BATCH = 8


def initial_weights(folder: Path, overrides: dict[str, Any]) -> dict[str, str]:
    """A digest of each full parameter, before any step."""
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    config = odd_config(folder, overrides)
    spec, mesh = model_spec(config.model), mesh_for(config)
    model = join_stages(build_model(config, spec, mesh), spec, mesh)
    return digest(whole(dict(model.named_parameters())))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_initial_weights_are_bitwise_equal_on_every_mesh(
    dtype: str, pools: Pools, tmp_path: Path
) -> None:
    precision = {"training.dtype": dtype}
    (alone,) = pools(1).run(initial_weights, tmp_path, precision)
    assert len(set(alone.values())) > 10
    for world_size, mesh in ((4, HSDP), (4, TP), (4, PP)):
        for weights in pools(world_size).run(initial_weights, tmp_path, {**precision, **mesh}):
            assert weights == alone
    (other_seed,) = pools(1).run(initial_weights, tmp_path, {**precision, "debug.seed": 1})
    assert other_seed["output.weight"] != alone["output.weight"]


def test_initial_weights_are_bitwise_equal_in_every_replica(pools: Pools, tmp_path: Path) -> None:
    """torchft's init_sync would mix the weights of two seeds."""
    (alone,) = pools(1).run(initial_weights, tmp_path, {})
    for number in (0, 7):
        replica = {"fault_tolerance.enable": True, "fault_tolerance.replica_id": number}
        assert pools(1).run(initial_weights, tmp_path, replica) == [alone]


@pytest.mark.matrix
def test_samples_of_a_step_are_independent_of_the_number_of_ranks(
    pools: Pools, tmp_path: Path
) -> None:
    for world_size, mesh in ((1, {}), (2, {}), (4, TP)):
        folder = tmp_path / f"{world_size}-{'-'.join(mesh)}"
        overrides = {"debug.sample_ledger": True, "training.steps": STEPS, **mesh}
        outcomes = pools(world_size).run(run_job, folder, overrides)
        for step in range(STEPS):
            used = [sample for outcome in outcomes for sample in outcome.samples[step]]
            copies = mesh.get("parallelism.tensor_parallel_degree", 1)
            expected = [i for i in range(step * BATCH, (step + 1) * BATCH) for _ in range(copies)]
            assert sorted(used) == expected
        assert len(list(folder.glob("samples_rank_*.jsonl"))) == world_size


def order_from_a_file(folder: Path) -> dict[str, Any]:
    """Overrides for a pipeline with the order `ORDER`."""
    file = folder / "order.csv"
    file.write_text(ORDER)
    return {**PP, "parallelism.pipeline_parallel_schedule_csv": str(file)}


def validation_loss(folder: Path, overrides: dict[str, Any]) -> float:
    """The untrained model's loss on held-out documents."""
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    held_out = {
        "validation.enable": True,
        "validation.local_batch_size": 1,
        "training.held_out_fraction": 0.1,
    }
    config = odd_config(folder, {**held_out, **overrides})
    mesh = mesh_for(config)
    with build(config, mesh, StopRequest()) as built:
        assert built.data.validation is not None
        model, schedule = built.job.state.model, built.job.pipeline_schedule
        return validate(model, schedule, built.data.validation, mesh).mean


def test_validation_loss_is_the_same_on_every_mesh(pools: Pools, tmp_path: Path) -> None:
    (alone,) = pools(1).run(validation_loss, tmp_path / "1", {})
    interleaved = {**PP, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}
    for world_size, mesh in [
        (2, {}),
        (2, CP),
        (2, interleaved),
        (2, order_from_a_file(tmp_path)),
    ]:
        for loss in pools(world_size).run(validation_loss, tmp_path / "n", mesh):
            assert loss == pytest.approx(alone, rel=tolerances.PARITY_FLOAT64)
