"""Moving the train state to another mesh between two steps does not change training.

Each row trains on one mesh, moves model, optimizer and data position to another mesh in the same
processes, continues training, and compares with one process without a move.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import tolerances
from tests.job import Outcome, mesh_for, odd_config, run_job, whole
from tests.parity.meshes import EXPERT_MESHES, FSDP, MESHES, assert_same
from tests.pool import WorkerPool
from torchtitan_lite.builders import build
from torchtitan_lite.config.constraints import check_against
from torchtitan_lite.errors import LayoutError
from torchtitan_lite.move_state import move_state
from torchtitan_lite.preemption import StopRequest
from torchtitan_lite.train_state import TrainState
from torchtitan_lite.trainer import StepReport, train

Pools = Callable[[int], WorkerPool]
STEPS = 4
MOVED_AT = 2
SHARED: dict[str, Any] = {"training.steps": STEPS, "lr_scheduler.total_steps": 12}
DATA_PARALLEL = (4, {**FSDP, "training.local_batch_size": 2})
EXPERTS = {"model.name": "qwen3", "model.flavor": "many_experts"}

DENSE = [
    # from, to, optimizer, in `make test`
    ("fsdp-2", "tp-2", "AdamW", True),
    ("fsdp-4", "hsdp-2x2", "SGD", False),
    ("hsdp-2x2", "fsdp-2-tp-2", "Adagrad", False),
    ("fsdp-2-tp-2", "pp-2-fsdp-2", "AdamW", True),
    ("pp-2-fsdp-2", "fsdp-4", "AdamW", False),
    ("pp-2-tp-2-fsdp-2", "hsdp-2x2-cp-2", "AdamW", False),
    ("fsdp-2", "fsdp-2", "AdamW", False),
    ("tp-2", "cp-2-allgather", "SGD", False),
    ("cp-4-allgather", "replicate-4", "AdamW", False),
    ("pp-2-tp-2", "tp-2-cp-2", "SGD", False),
    ("fsdp-2-cp-2", "pp-4", "Adagrad", False),
    ("pp-4", "pp-2-cp-2", "AdamW", False),
    ("pp-2-zbv", "fsdp-2", "SGD", False),
    ("hsdp-2x2-tp-2", "pp-2-cp-2-fsdp-2", "AdamW", False),
]
EXPERT_ROWS = [
    ("ep-2-fsdp-4", "ep-4", "AdamW", True),
    ("ep-2-etp-2", "data-parallel", "SGD", False),
    ("hsdp-2x2-ep-2", "pp-2-ep-2", "AdamW", False),
    ("ep-2", "tp-2", "AdamW", False),
    ("pp-2-ep-2", "fsdp-2-tp-2-ep-4", "Adagrad", False),
    ("ep-4-fsdp-2-cp-2-tp-2", "pp-2-tp-2-ep-4", "AdamW", False),
    ("ep-2-fsdp-8-few", "pp-2-tp-2-fsdp-2", "AdamW", False),
]


def rows(table: list[tuple[str, str, str, bool]]) -> list[Any]:
    return [
        pytest.param(*row, marks=[] if is_short else [pytest.mark.matrix])
        for *row, is_short in table
    ]


def run_moved(folder: Path, first: dict[str, Any], then: dict[str, Any]) -> Outcome:
    """Train `MOVED_AT` steps with the overrides `first`, the others with `then`, in this worker."""
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    outcome = Outcome()

    def watch(state: TrainState, report: StepReport) -> None:
        outcome.losses.append(report.loss)
        outcome.grad_norms.append(report.grad_norm)
        outcome.targets.append(report.num_target_tokens)

    before, after = (
        odd_config(folder / name, {**SHARED, **overrides})
        for name, overrides in (("first", first), ("then", then))
    )
    for config in (before, after):
        check_against(config, mesh_for(config).world_size)
    with (
        build(before, mesh_for(before), StopRequest()) as old,
        build(after, mesh_for(after), StopRequest()) as new,
    ):
        train(replace(old.job, hooks=[watch], steps=MOVED_AT))
        state = old.job.state
        moved = whole(state.tensors())
        move_state(state, old.job.mesh, new.job.state, new.job.mesh)
        arrived = whole(new.job.state.tensors())
        assert arrived.keys() == moved.keys()
        assert all(arrived[name].equal(tensor) for name, tensor in moved.items())
        assert new.job.state.values() == state.values()
        outcome.finished = train(replace(new.job, hooks=[watch]))
        outcome.state = whole(new.job.state.tensors())
    outcome.weights = {
        name.removeprefix("model."): tensor
        for name, tensor in outcome.state.items()
        if name.startswith("model.")
    }
    return outcome


@pytest.fixture(scope="module")
def reference(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Overrides -> the outcome of one process without a move, computed once."""
    folder = tmp_path_factory.mktemp("reference")

    @cache
    def run(overrides: tuple[tuple[str, Any], ...]) -> Outcome:
        settings = {**SHARED, "training.local_batch_size": 8, **dict(overrides)}
        return pools(1).run(run_job, folder / str(abs(hash(overrides))), settings)[0]

    return lambda **overrides: run(tuple(sorted(overrides.items())))


@pytest.mark.parametrize(("first", "then", "optimizer"), rows(DENSE))
def test_training_continues_after_a_move(
    first: str,
    then: str,
    optimizer: str,
    pools: Pools,
    reference: Callable[..., Outcome],
    tmp_path: Path,
) -> None:
    shared = {"optimizer.name": optimizer}
    _check_move(MESHES[first], MESHES[then], shared, pools, reference, tmp_path)


@pytest.mark.parametrize(("first", "then", "optimizer"), rows(EXPERT_ROWS))
def test_training_continues_after_a_move_of_experts(
    first: str,
    then: str,
    optimizer: str,
    pools: Pools,
    reference: Callable[..., Outcome],
    tmp_path: Path,
) -> None:
    meshes = {**MESHES, **EXPERT_MESHES, "data-parallel": DATA_PARALLEL}
    shared = {**EXPERTS, "optimizer.name": optimizer}
    _check_move(meshes[first], meshes[then], shared, pools, reference, tmp_path)


def move_errors(folder: Path) -> list[str]:
    """The errors of moves between incompatible states on this rank."""
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    found = []
    fsdp, pipeline = MESHES["fsdp-2"][1], MESHES["pp-2"][1]
    for number, (first, then) in enumerate(
        (
            ({"model.name": "qwen3"}, {}),
            ({}, {"model.flavor": "four_kv_heads"}),
            ({"training.dtype": "float32"}, {}),
            ({"optimizer.name": "SGD"}, {"optimizer.name": "Adagrad"}),
        )
    ):
        before = odd_config(folder / f"{number}" / "first", {**SHARED, **pipeline, **first})
        after = odd_config(folder / f"{number}" / "then", {**SHARED, **fsdp, **then})
        with (
            build(before, mesh_for(before), StopRequest()) as old,
            build(after, mesh_for(after), StopRequest()) as new,
            pytest.raises(LayoutError) as raised,
        ):
            move_state(old.job.state, old.job.mesh, new.job.state, new.job.mesh)
        found.append(str(raised.value))
    return found


def test_moves_between_incompatible_states_are_errors_on_every_rank(
    pools: Pools, tmp_path: Path
) -> None:
    first, second = pools(2).run(move_errors, tmp_path)
    assert first == second
    family, flavor, dtype, optimizer = first
    assert "model.layers.0.attention.k_norm.weight is unexpected" in family
    wq = "model.layers.0.attention.wq.weight is (60, 36), torch.float64"
    assert f"{wq}, but must be (80, 36), torch.float64" in flavor
    assert "is (36,), torch.float32, but must be (36,), torch.float64" in dtype
    assert "optimizer.layers.0.attention.wk.weight.step is missing" in optimizer


def _check_move(
    first: tuple[int, dict[str, Any]],
    then: tuple[int, dict[str, Any]],
    shared: dict[str, Any],
    pools: Pools,
    reference: Callable[..., Outcome],
    folder: Path,
) -> None:
    (world_size, one), (other_size, other) = first, then
    assert world_size == other_size
    expected = reference(**shared)
    outcomes = pools(world_size).run(run_moved, folder, {**one, **shared}, {**other, **shared})
    for outcome in outcomes:
        assert outcome.finished
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)
        assert outcome.state.keys() == expected.state.keys()
        for name, tensor in expected.state.items():
            difference = (outcome.state[name] - tensor).abs().max()
            assert difference <= tolerances.PARITY_FLOAT64 * tensor.abs().max(), name
