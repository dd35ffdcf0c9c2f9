"""DeepSeek-V3 trains on every mesh as in one process: latent attention, dense layers before those
with experts, groups of experts, multi-token prediction."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.harness import tolerances
from tests.harness.jobs import Outcome, run_job
from tests.harness.ranks import RankFailed, WorkerPool
from tests.parity.meshes import (
    CP,
    EP,
    EXPERT_MESHES,
    MESHES,
    OP_CHECKPOINT,
    PP,
    assert_same,
)

Pools = Callable[[int], WorkerPool]
MODEL = {"model.name": "deepseek_v3"}
RING = {
    "model.attention_mask": "causal",
    "parallelism.context_parallel_rotate_method": "alltoall",
}
TP = {"parallelism.tensor_parallel_degree": 2}
BATCH_OF_2 = {"training.local_batch_size": 2}
COMPILED = {"compile.enable": True, "compile.backend": "aot_eager"}
# With flavors of other families.
_OTHER = {"tp-4", "cp-4-ulysses", "ep-2-fsdp-8-few", "ep-2-softmax"}
ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: row for name, row in MESHES.items() if name not in _OTHER},
    **{f"experts-{name}": row for name, row in EXPERT_MESHES.items() if name not in _OTHER},
    "tp-4": (4, {"parallelism.tensor_parallel_degree": 4, "training.local_batch_size": 8}),
    "cp-2-ring": (2, {**CP, **RING, **BATCH_OF_2}),
    "cp-2-ring-unbalanced": (
        2,
        {**CP, **RING, **BATCH_OF_2, "parallelism.context_parallel_load_balancer": None},
    ),
    "tp-2-cp-2-ring": (4, {**TP, **CP, **RING, **BATCH_OF_2}),
    "tp-2-cp-2-ulysses": (
        4,
        {**TP, **CP, **BATCH_OF_2, "parallelism.context_parallel_rotate_method": "ulysses"},
    ),
    "pp-2-cp-2-ep-2": (4, {**PP, **CP, **EP}),
    "pp-2-cp-2-tp-2-ep-2": (8, {**PP, **CP, **TP, **EP}),
    "pp-2-cp-2-ring": (4, {**PP, **CP, **RING}),
    "pp-2-tp-2-recompute-op": (4, {**PP, **TP, **OP_CHECKPOINT}),
    "tp-2-cp-2-recompute-op": (4, {**TP, **CP, **OP_CHECKPOINT, **BATCH_OF_2}),
    "experts-ep-2-recompute-every-2": (
        2,
        {
            **EP,
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "2",
        },
    ),
}
for _schedule in ("GPipe", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV"):
    ROWS[f"pp-2-{_schedule}"] = (2, {**PP, "parallelism.pipeline_parallel_schedule": _schedule})
for _mesh in ("fsdp-2", "tp-2", "cp-2-allgather", "pp-2"):
    for _recompute in ("none", "full"):
        _size, _row = MESHES[_mesh]
        _more = {**COMPILED, "activation_checkpoint.mode": _recompute}
        ROWS[f"compiled-{_mesh}-{_recompute}"] = (_size, {**_row, **_more})
_SHORT = {"experts-ep-2-etp-2"}
assert ROWS.keys() >= _SHORT


def long(names: Any, short: set[str]) -> list[Any]:
    """Rows of which `make test` runs only some."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.matrix) for name in names]


@pytest.fixture(scope="module")
def reference(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Overrides -> the outcome of one process, computed once."""
    folder = tmp_path_factory.mktemp("reference")

    @cache
    def run(overrides: tuple[tuple[str, Any], ...]) -> Outcome:
        name = str(abs(hash(overrides)))
        return pools(1).run(run_job, folder / name, {**MODEL, **dict(overrides)})[0]

    return lambda **overrides: run(tuple(sorted(overrides.items())))


def shared_with(overrides: dict[str, Any]) -> dict[str, Any]:
    """The overrides that one process needs too."""
    keys = ("model.attention_mask", "training.global_batch_size")
    return {key: overrides[key] for key in keys if key in overrides}


@pytest.mark.parametrize("mesh", long(ROWS, _SHORT))
def test_same_training_as_one_process(
    mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = ROWS[mesh]
    shared = {"model.flavor": "odd", "optimizer.name": "SGD", **shared_with(overrides)}
    expected = reference(**shared)
    run = {**overrides, **MODEL, **shared}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", run, timeout_s=280):
        is_causal = "model.attention_mask" in shared
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64, unequal_targets=not is_causal)


ADAMW = ("fsdp-2-tp-2", "experts-ep-2-fsdp-4", "pp-2-cp-2", "cpu-offload")


@pytest.mark.parametrize("mesh", long(ADAMW, set()))
def test_same_training_with_adamw(
    mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = ROWS[mesh]
    shared = {"model.flavor": "odd"}
    run = {**overrides, **MODEL, **shared}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", run):
        assert_same(outcome, reference(**shared), tolerances.PARITY_FLOAT64)


LITE = ("fsdp-2", "tp-2", "tp-2-whole-sequence", "cp-2-allgather", "experts-fsdp-2-tp-2-ep-2")


@pytest.mark.parametrize("mesh", long(LITE, {"tp-2"}))
def test_same_training_of_v2_lite(
    mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = ROWS[mesh]
    shared = {"model.flavor": "odd_lite", "optimizer.name": "SGD"}
    run = {**overrides, **MODEL, **shared}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", run):
        assert_same(outcome, reference(**shared), tolerances.PARITY_FLOAT64)


@pytest.mark.parametrize("mesh", long(ROWS, set()))
def test_same_loss_and_norm_in_float32(
    mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = ROWS[mesh]
    shared = {"model.flavor": "odd", "training.dtype": "float32", **shared_with(overrides)}
    expected = reference(**shared)
    run = {**overrides, **MODEL, **shared}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", run, timeout_s=280):
        assert outcome.losses == pytest.approx(expected.losses, rel=tolerances.PARITY_FLOAT32_LOSS)
        norms = pytest.approx(expected.grad_norms, rel=tolerances.PARITY_FLOAT32_NORM)
        assert outcome.grad_norms == norms


BFLOAT16 = ("fsdp-2", "tp-2", "experts-ep-2", "pp-2-cp-2")


@pytest.mark.parametrize("mesh", long(BFLOAT16, set()))
def test_same_loss_in_bfloat16_compute(
    mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = ROWS[mesh]
    shared = {
        "model.flavor": "odd",
        "training.dtype": "float32",
        "training.mixed_precision_param": "bfloat16",
    }
    expected = reference(**shared)
    for outcome in pools(world_size).run(
        run_job, tmp_path / "run", {**overrides, **MODEL, **shared}
    ):
        assert outcome.losses == pytest.approx(expected.losses, rel=tolerances.PARITY_BFLOAT16_LOSS)


@pytest.mark.matrix
def test_no_redistribution_is_implicit(
    pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = ROWS["experts-tp-2-ep-2"]
    shared = {"model.flavor": "odd", "optimizer.name": "SGD"}
    run = {**overrides, **MODEL, **shared, "debug.explicit_redistribution": True}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", run):
        assert_same(outcome, reference(**shared), tolerances.PARITY_FLOAT64)


def test_further_predictions_change_the_gradient_and_not_the_loss(
    reference: Callable[..., Outcome],
) -> None:
    shared = {"model.flavor": "odd", "optimizer.name": "SGD"}
    without = reference(**shared, **{"model.mtp_depth": 0})
    outcome = reference(**shared)
    assert outcome.losses[0] == without.losses[0]
    assert outcome.losses[-1] != without.losses[-1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {**CP, "parallelism.context_parallel_rotate_method": "alltoall"},
            "ring attention. cannot keep attention within documents",
        ),
        (
            {
                **PP,
                "parallelism.module_fqns_per_model_part": [
                    ["tok_embeddings", *(f"layers.{number}" for number in range(4))],
                    ["layers.4", "norm", "output"],
                ],
            },
            r"layers.3 of deepseek_v3 odd predict further tokens .* must be on the last stage",
        ),
    ],
)
def test_what_is_not_supported_is_one_clear_error(
    overrides: dict[str, Any], message: str, pools: Pools, tmp_path: Path
) -> None:
    with pytest.raises(RankFailed, match=message):
        pools(2).run(run_job, tmp_path / "run", {**MODEL, "model.flavor": "odd", **overrides})
