"""A warm-up of the global batch size: the same steps on every mesh, after a resume on another one,
and after a step that was skipped."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.harness import tolerances
from tests.harness.jobs import Outcome, run_job
from tests.harness.ranks import WorkerPool
from tests.parity.meshes import MESHES, OP_CHECKPOINT, assert_same
from tests.resilience.test_skipped_steps import run_with_bad_steps

Pools = Callable[[int], WorkerPool]
WARMUP: dict[str, Any] = {
    "training.batch_size_warmup": [[5, 2], [8, 4]],
    "training.local_batch_size": 1,
    "training.steps": 6,
}
STEPS = [range(2), range(2, 4), range(4, 6), range(6, 10), range(10, 14), range(14, 22)]
"""Samples of each step, up to a global batch of 8."""
COMPILED = {"compile.enable": True, "compile.backend": "aot_eager"}


def long(*rows: Any) -> list[Any]:
    """Rows that `make test-all` adds."""
    return [pytest.param(row, marks=pytest.mark.matrix) for row in rows]


@pytest.fixture(scope="module")
def one_process(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Data type -> the outcome of one process, computed once."""
    folder = tmp_path_factory.mktemp("one_process")

    @cache
    def run(dtype: str = "float64") -> Outcome:
        settings = {**WARMUP, "training.dtype": dtype}
        (outcome,) = pools(1).run(run_job, folder / dtype, settings)
        assert outcome.samples == [tuple(step) for step in STEPS]
        return outcome

    return run


@pytest.mark.parametrize(
    "mesh",
    [
        *long(
            "fsdp-2",
            "pp-2",
            "tp-2",
            "cp-2-allgather",
            "replicate-2-tp-2",
            "fsdp-2-cp-2",
            "pp-2-tp-2",
        ),
    ],
)
def test_same_steps_as_one_process(
    mesh: str, pools: Pools, one_process: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **WARMUP}):
        assert_same(outcome, one_process(), tolerances.PARITY_FLOAT64)


def test_same_steps_in_float32(
    pools: Pools, one_process: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES["fsdp-2"]
    overrides = {**overrides, **WARMUP, "training.dtype": "float32"}
    expected = one_process("float32")
    for outcome in pools(world_size).run(run_job, tmp_path / "run", overrides):
        assert outcome.losses == pytest.approx(expected.losses, rel=tolerances.PARITY_FLOAT32_LOSS)
        norms = pytest.approx(expected.grad_norms, rel=tolerances.PARITY_FLOAT32_NORM)
        assert outcome.grad_norms == norms


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["fsdp-2", "pp-2"])
def test_same_steps_with_compile_and_activation_checkpointing(
    mesh: str, pools: Pools, one_process: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    overrides = {**overrides, **WARMUP, **COMPILED, **OP_CHECKPOINT}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", overrides, timeout_s=280):
        assert_same(outcome, one_process(), tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
def test_a_warmup_resumes_on_other_meshes(
    pools: Pools, one_process: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Each mesh resumes within the warm-up, the second one in the middle of a stage."""
    saving = {"checkpoint.enable": True, "checkpoint.interval": 100, "lr_scheduler.total_steps": 12}
    expected, done = one_process(), 0
    for mesh, last in (("fsdp-2", 1), ("pp-2", 4), ("tp-2", 6)):
        world_size, overrides = MESHES[mesh]
        settings = {**overrides, **WARMUP, **saving, "training.steps": last}
        outcomes = pools(world_size).run(run_job, tmp_path / "moving", settings)
        for outcome in outcomes:
            assert outcome.resumed_at == done
            part = expected.losses[done:last]
            assert outcome.losses == pytest.approx(part, rel=tolerances.PARITY_FLOAT64), mesh
        for number, step in enumerate(STEPS[done:last]):
            used = {sample for outcome in outcomes for sample in outcome.samples[number]}
            assert used == set(step), mesh
        done = last


@pytest.mark.matrix
def test_a_skipped_step_advances_the_warmup(pools: Pools, tmp_path: Path) -> None:
    settings = {**WARMUP, "training.steps": 5}
    outcomes = pools(2).run(run_with_bad_steps, tmp_path / "run", {2}, settings)
    for outcome in outcomes:
        assert outcome.committed == [True, False, True, True, True, True]
    for number, step in enumerate(STEPS):
        used = sorted(sample for outcome in outcomes for sample in outcome.samples[number])
        assert used == list(step)
