"""gpt-oss, Llama 4, Qwen3-Next and the rows of `models/auto/` train on every mesh as in one
process: windows and chunks of attention, sinks, biases, layers without rotary embedding, clamped
experts, weights of experts' inputs; recurrent layers, gated attention, zero-centered norms, gated
shared experts."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.harness import tolerances
from tests.harness.jobs import Outcome, odd_config, run_job
from tests.harness.ranks import RankFailed, WorkerPool
from tests.parity.meshes import CP, assert_same
from tests.parity.test_deepseek_v3 import ROWS, shared_with
from torchtitan_lite.training.checks.constraints import check_against

Pools = Callable[[int], WorkerPool]
ROTATION = "parallelism.context_parallel_rotate_method"
ROTATIONS = {
    "auto": ("allgather", "ulysses"),
    "auto_parallel": ("allgather", "ulysses", "alltoall"),
    "auto_sparse": ("allgather", "ulysses", "alltoall"),
    "gpt_oss": ("allgather",),
    "llama4": ("allgather", "ulysses"),
    "qwen3_next": ("allgather", "ulysses", "alltoall"),
}
SHORT = {
    ("auto", "fsdp-2-tp-2"),
    ("gpt_oss", "experts-ep-2-etp-2"),
    ("llama4", "cp-2-ulysses"),
    ("qwen3_next", "cp-2-ring"),
}
CASES = [
    (family, mesh)
    for family, rotations in ROTATIONS.items()
    for mesh, (_, overrides) in ROWS.items()
    if overrides.get(ROTATION, "allgather") in rotations
    # 4 does not divide the features of its feed-forward.
    and (family, mesh) != ("llama4", "tp-4")
    and (family not in ("auto", "auto_parallel") or not any("expert_" in key for key in overrides))
]
assert set(CASES) >= SHORT


def cases(short: set[tuple[str, str]]) -> Any:
    """All families and meshes, of which `make test` runs some."""
    rows = [
        pytest.param(*case, marks=() if case in short else pytest.mark.matrix) for case in CASES
    ]
    return pytest.mark.parametrize(("family", "mesh"), rows)


@pytest.fixture(scope="module")
def reference(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Overrides -> the outcome of one process, computed once."""
    folder = tmp_path_factory.mktemp("reference")

    @cache
    def run(overrides: tuple[tuple[str, Any], ...]) -> Outcome:
        name = str(abs(hash(overrides)))
        return pools(1).run(run_job, folder / name, dict(overrides))[0]

    return lambda overrides: run(tuple(sorted(overrides.items())))


def settings(family: str, **more: Any) -> dict[str, Any]:
    name, _, flavor = family.partition("auto_")
    chosen = {"model.name": name or "auto", "model.flavor": f"odd_{flavor}" if flavor else "odd"}
    return chosen | more


def test_every_case_is_valid(tmp_path: Path) -> None:
    """Most are in the long matrices, which seldom run as a whole."""
    for family, mesh in CASES:
        world_size, overrides = ROWS[mesh]
        run = {**overrides, **settings(family), **shared_with(overrides)}
        check_against(odd_config(tmp_path, run), world_size)


@cases(SHORT)
def test_same_training_as_one_process(
    family: str, mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = ROWS[mesh]
    shared = settings(family, **{"optimizer.name": "SGD"}, **shared_with(overrides))
    run = {**overrides, **shared}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", run, timeout_s=280):
        is_causal = "model.attention_mask" in shared
        expected = reference(shared)
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64, unequal_targets=not is_causal)


@cases({("qwen3_next", "cp-2-ulysses")})
def test_same_loss_and_norm_in_float32(
    family: str, mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = ROWS[mesh]
    shared = settings(family, **{"training.dtype": "float32"}, **shared_with(overrides))
    if family == "auto_sparse":
        # AdamW's first step has the size of the learning rate also where a gradient is nothing but
        # rounding, and by that the second loss differs in three of the rows, by up to 5e-6.
        shared["optimizer.name"] = "SGD"
    expected = reference(shared)
    run = {**overrides, **shared}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", run, timeout_s=280):
        assert outcome.losses == pytest.approx(expected.losses, rel=tolerances.PARITY_FLOAT32_LOSS)
        norms = pytest.approx(expected.grad_norms, rel=tolerances.PARITY_FLOAT32_NORM)
        assert outcome.grad_norms == norms


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["gpt_oss", "llama4", "qwen3_next"])
def test_no_redistribution_is_implicit(
    family: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = ROWS["experts-tp-2-ep-2"]
    shared = settings(family, **{"optimizer.name": "SGD"}, **shared_with(overrides))
    run = {**overrides, **shared, "debug.explicit_redistribution": True}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", run):
        assert_same(outcome, reference(shared), tolerances.PARITY_FLOAT64)


@pytest.mark.parametrize(
    ("family", "method", "message"),
    [
        ("gpt_oss", "alltoall", "with sinks.*allgather"),
        ("gpt_oss", "ulysses", "with sinks.*allgather"),
        ("llama4", "alltoall", "in chunks of 5 positions.*allgather"),
    ],
)
def test_other_rotations_are_one_clear_error(
    family: str, method: str, message: str, pools: Pools, tmp_path: Path
) -> None:
    run = settings(family, **CP, **{ROTATION: method, "model.attention_mask": "causal"})
    with pytest.raises(RankFailed, match=message):
        pools(2).run(run_job, tmp_path / "run", run)
