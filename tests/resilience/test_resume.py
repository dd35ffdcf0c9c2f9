"""A run that is stopped and resumed is bitwise equal to an uninterrupted one."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.harness.jobs import Outcome, digest, run_job
from tests.harness.ranks import WorkerPool

Pools = Callable[[int], WorkerPool]
SAVING: dict[str, Any] = {
    "checkpoint.enable": True,
    "checkpoint.interval": 100,
    "training.steps": 4,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "model.dropout": 0.1,
    "debug.sample_ledger": True,
}
HSDP = {"parallelism.data_parallel_replicate_degree": 2}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "fsdp-2": (2, {}),
    "hsdp-2x2": (4, HSDP),
    "pp-2-fsdp-2": (4, {"parallelism.pipeline_parallel_degree": 2}),
    "fsdp-2-tp-2": (4, {"parallelism.tensor_parallel_degree": 2}),
    "fsdp-2-ep-2": (
        4,
        {
            "model.name": "qwen3",
            "model.flavor": "many_experts",
            "parallelism.expert_parallel_degree": 2,
        },
    ),
    "fsdp-2-cp-2": (4, {"parallelism.context_parallel_degree": 2}),
    "pp-2-tp-2": (
        4,
        {"parallelism.pipeline_parallel_degree": 2, "parallelism.tensor_parallel_degree": 2},
    ),
    "ep-4": (
        4,
        {
            "model.name": "qwen3",
            "model.flavor": "many_experts",
            "parallelism.expert_parallel_degree": 4,
        },
    ),
    "pp-2-tied": (2, {"model.flavor": "odd_tied", "parallelism.pipeline_parallel_degree": 2}),
}


# `test_any_mesh` resumes on the others, and on the mesh of the same size.
_SHORT = (("one process", "SGD"),)
ROWS = [
    pytest.param(*row, marks=[] if row in _SHORT else [pytest.mark.matrix])
    for row in product(MESHES, ("AdamW", "SGD"))
]


@pytest.mark.parametrize(("mesh", "optimizer"), ROWS)
def test_stopped_and_resumed_equals_uninterrupted_bitwise(
    mesh: str, optimizer: str, pools: Pools, tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    settings = {**SAVING, **overrides, "optimizer.name": optimizer, "training.dtype": "float32"}
    pool = pools(world_size)
    uninterrupted = pool.run(run_job, tmp_path / "uninterrupted", settings)
    stopped = pool.run(run_job, tmp_path / "resumed", settings, 2)
    resumed = pool.run(run_job, tmp_path / "resumed", settings)
    for whole_run, first, second in zip(uninterrupted, stopped, resumed, strict=True):
        assert not first.finished
        assert (len(first.losses), second.resumed_at, len(second.losses)) == (2, 2, 2)
        assert first.losses + second.losses == whole_run.losses
        assert first.samples + second.samples == whole_run.samples
        assert digest(second.state) == digest(whole_run.state)
    kept = ("step", "loss", "grad_norm", "lr", "tokens", "num_target_tokens")
    uninterrupted_lines, resumed_lines = (
        [
            {key: line[key] for key in kept}
            for line in map(
                json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            )
            if "event" not in line
        ]
        for name in ("uninterrupted", "resumed")
    )
    assert resumed_lines == uninterrupted_lines


@pytest.mark.matrix
def test_a_finished_run_continues_when_its_steps_are_raised(pools: Pools, tmp_path: Path) -> None:
    pool, fewer = pools(1), {**SAVING, "training.steps": 2}
    uninterrupted = pool.run(run_job, tmp_path / "uninterrupted", SAVING)
    pool.run(run_job, tmp_path / "resumed", fewer)
    again = pool.run(run_job, tmp_path / "resumed", fewer)
    assert [outcome.losses for outcome in again] == [[]]
    raised = pool.run(run_job, tmp_path / "resumed", SAVING)
    assert [outcome.resumed_at for outcome in raised] == [2]
    assert digest(raised[0].state) == digest(uninterrupted[0].state)


@pytest.mark.matrix
def test_optimizer_implementations_continue_each_other(pools: Pools, tmp_path: Path) -> None:
    first = {**SAVING, "training.steps": 2, "optimizer.implementation": "for-loop"}
    pools(1).run(run_job, tmp_path / "run", first)
    outcome = pools(1).run(run_job, tmp_path / "run", SAVING)[0]
    assert outcome.resumed_at == 2
    assert outcome.finished


@pytest.mark.matrix
def test_model_only_start_loads_only_the_weights(pools: Pools, tmp_path: Path) -> None:
    first: Outcome = pools(1).run(run_job, tmp_path / "first", SAVING)[0]
    path = str(tmp_path / "first" / "checkpoint" / "step-4")
    settings = {**SAVING, "checkpoint.initial_load_path": path, "optimizer.lr": 0.0}
    second: Outcome = pools(1).run(run_job, tmp_path / "second", settings)[0]
    assert second.resumed_at == 0
    assert digest(second.weights) == digest(first.weights)
    assert second.samples == first.samples
