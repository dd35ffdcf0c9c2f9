"""Training on every mesh equals training in one process.

Each row trains the model of odd sizes for two steps on unequal documents and compares loss,
gradient norm and all weights. SGD is included because AdamW hides a wrong gradient scale.
"""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import tolerances
from tests.harness.jobs import Outcome, mesh_for, odd_config, run_job
from tests.harness.ranks import WorkerPool
from tests.parity.meshes import (
    EP,
    EXPERT_MESHES,
    EXPERTS,
    FSDP,
    MESHES,
    OP_CHECKPOINT,
    PP,
    assert_identical,
    assert_same,
    chosen,
    family_case,
    long,
    rows,
)
from torchtitan_lite.parallel import fsdp, pipeline

Pools = Callable[[int], WorkerPool]


TIED = [("pp-2", "SGD")]
TIED_LONG = [
    ("tp-2", "SGD"),
    ("tp-2", "AdamW"),
    ("fsdp-2", "SGD"),
    ("fsdp-2", "AdamW"),
    ("pp-2-zbv", "SGD"),
    ("pp-2-zbv", "AdamW"),
    ("pp-2-fsdp-2", "SGD"),
    ("pp-2-tp-2", "SGD"),
    *((mesh, "AdamW") for mesh, _ in TIED),
    ("pp-2-fsdp-2", "AdamW"),
    ("pp-2-tp-2", "AdamW"),
]
FLOAT32 = {"training.dtype": "float32"}
BFLOAT16 = {**FLOAT32, "training.mixed_precision_param": "bfloat16"}
"""As on a GPU: float32 parameters, bfloat16 forward and backward."""
Z_LOSS = {"training.z_loss_weight": 0.05}


@pytest.mark.parametrize(("mesh", "optimizer"), rows(MESHES))
def test_same_training_as_one_process(
    mesh: str, optimizer: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    shared = {"model.flavor": "odd", **chosen(overrides), "optimizer.name": optimizer}
    expected = reference(**shared)
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "mesh",
    ["tp-2-whole-sequence", "tp-2", "tp-2-whole-logits", "fsdp-2-tp-2", "pp-2-tp-2"],
)
def test_no_redistribution_is_implicit(
    mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    explicit = {**overrides, "debug.explicit_redistribution": True}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", explicit):
        assert_same(outcome, reference(), tolerances.PARITY_FLOAT64)


@pytest.mark.parametrize("mesh", ["tp-2", *long("fsdp-2", "hsdp-2x2", "tp-2-whole-sequence")])
def test_same_training_with_dropout(
    mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    shared = {"model.dropout": 0.2}
    expected = reference(**shared)
    assert expected.losses != reference().losses
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama3", "pp-2"),
        *long(
            *(("llama3", "tp-2"), ("qwen3", "tp-2-ep-2")),
            *(("llama3", mesh) for mesh in ("fsdp-2", "tp-2-whole-logits", "cp-2-allgather")),
            ("llama3", "pp-2-tp-2"),
            *(("qwen3", mesh) for mesh in ("ep-2", "tp-2-ep-2-whole-sequence", "pp-2-ep-2")),
            *(("deepseek_v3", mesh) for mesh in ("fsdp-2", "tp-2", "pp-2")),
        ),
    ],
)
def test_same_training_with_z_losses(
    family: str, mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = {**EXPERT_MESHES, **MESHES}[mesh]
    models = {"llama3": {"model.flavor": "odd"}, "qwen3": EXPERTS}
    model = models.get(family, {"model.name": family, "model.flavor": "odd"})
    shared = {**model, **chosen(overrides), **Z_LOSS}
    if family != "llama3":
        shared["model.router_z_loss_weight"] = 0.05
    expected, without = reference(**shared), reference(**{**model, **chosen(overrides)})
    # The first weights are equal, and the loss is without the z-loss.
    assert expected.losses[0] == pytest.approx(without.losses[0], rel=tolerances.PARITY_FLOAT64)
    assert expected.grad_norms[0] != without.grad_norms[0]
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
def test_same_loss_and_norm_in_float32_with_a_z_loss(
    pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES["tp-2"]
    shared = {**Z_LOSS, "training.dtype": "float32"}
    expected = reference(**shared)
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert outcome.losses == pytest.approx(expected.losses, rel=tolerances.PARITY_FLOAT32_LOSS)
        norms = pytest.approx(expected.grad_norms, rel=tolerances.PARITY_FLOAT32_NORM)
        assert outcome.grad_norms == norms


@pytest.mark.parametrize("mesh", ["fsdp-2", *long("fsdp-2-tp-2", "tp-2", "pp-2")])
def test_same_training_when_all_parameters_decay(
    mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    shared = {"optimizer.weight_decay": 0.5, "optimizer.decay_norms_biases_embeddings": True}
    expected = reference(**shared)
    exempt = reference(**{**shared, "optimizer.decay_norms_biases_embeddings": False})
    assert not torch.equal(expected.weights["norm.weight"], exempt.weights["norm.weight"])
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


def _run_validated(folder: Path, overrides: dict[str, Any]) -> Outcome:
    """Run a job in which torch compares what stages receive with the shapes and dtypes that they
    have announced."""
    # Not groups that are created with it.
    mesh_for(odd_config(folder, overrides))
    debug: Any = dist
    level = debug.get_debug_level()
    debug.set_debug_level(debug.DebugLevel.DETAIL)
    try:
        return run_job(folder, overrides)
    finally:
        debug.set_debug_level(level)


@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [*TIED, *long(*TIED_LONG)],
)
def test_same_training_with_tied_embeddings(
    mesh: str, optimizer: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    shared = {"model.flavor": "odd_tied", "optimizer.name": optimizer}
    expected = reference(**shared)
    assert "output.weight" not in expected.weights
    for outcome in pools(world_size).run(_run_validated, tmp_path / "run", {**overrides, **shared}):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("flavor", "mesh"),
    [
        *(("odd", mesh) for mesh in ("tp-2", "cp-2-ulysses", "fsdp-2", "pp-2", "recompute-op")),
        *(("odd_experts", mesh) for mesh in ("pp-2", "fsdp-2", "cp-2-allgather")),
        *(("odd_experts", mesh) for mesh in ("accumulation-1", "recompute-full")),
    ],
)
def test_same_training_of_qwen3(
    flavor: str, mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    shared = {"model.name": "qwen3", "model.flavor": flavor}
    expected = reference(**shared)
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


@pytest.mark.parametrize(("mesh", "optimizer"), rows(EXPERT_MESHES))
def test_same_training_with_experts(
    mesh: str, optimizer: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = EXPERT_MESHES[mesh]
    shared = {**EXPERTS, **chosen(overrides), "optimizer.name": optimizer}
    expected = reference(**shared)
    bias = expected.weights["layers.0.feed_forward.router.expert_bias_X"]
    assert (bias.abs().max() > 0) == (shared["model.flavor"] == "many_experts")
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["ep-2-fsdp-4", "pp-2-zbv-ep-2-fsdp-4", "hsdp-2x2-ep-2"])
def test_same_training_with_experts_in_an_fsdp_unit_of_their_own(
    mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    """As on torch 2.11, in which a unit cannot have parameters on two meshes, and a pipeline stage
    cannot split its backward."""
    world_size, overrides = EXPERT_MESHES[mesh]
    shared = {**EXPERTS, **chosen(overrides)}
    expected = reference(**shared)
    outcomes = pools(world_size).run(
        _run_as_on_torch_2_11, tmp_path / "run", {**overrides, **shared}
    )
    for outcome in outcomes:
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


def _run_as_on_torch_2_11(folder: Path, overrides: dict[str, Any]) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "shards_on", lambda mesh, dims: None)
        patch.setattr(pipeline, "can_split_backward", lambda: False)
        return run_job(folder, overrides)


@pytest.mark.matrix
def test_training_is_independent_of_string_hashes(
    reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    """In separate processes, an order that depends on a hash would differ between ranks."""
    shared = {"model.name": "qwen3", "model.flavor": "many_experts"}
    world_size, overrides = EXPERT_MESHES["tp-2-ep-2"]
    pool = WorkerPool(world_size, multiprocessing.get_context("spawn"))
    try:
        for outcome in pool.run(run_job, tmp_path / "run", {**overrides, **shared}):
            assert_same(outcome, reference(**shared), tolerances.PARITY_FLOAT64)
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama3", "fsdp-4"),
        ("qwen3", "ep-2"),
        *long(*(("llama3", mesh) for mesh in MESHES if mesh != "fsdp-4")),
        *long(*(("qwen3", mesh) for mesh in EXPERT_MESHES if mesh != "ep-2")),
    ],
)
def test_same_loss_and_norm_in_float32(
    family: str, mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides, shared = family_case(family, mesh)
    shared = {**shared, "training.dtype": "float32"}
    expected = reference(**shared)
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert outcome.losses == pytest.approx(expected.losses, rel=tolerances.PARITY_FLOAT32_LOSS)
        norms = pytest.approx(expected.grad_norms, rel=tolerances.PARITY_FLOAT32_NORM)
        assert outcome.grad_norms == norms


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama3", "fsdp-2"),
        *long(*(("llama3", mesh) for mesh in MESHES if mesh != "fsdp-2")),
        *long(*(("qwen3", mesh) for mesh in EXPERT_MESHES)),
    ],
)
def test_same_loss_in_bfloat16_compute(
    family: str, mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides, shared = family_case(family, mesh)
    float32 = {**shared, **FLOAT32}
    shared = {**shared, **BFLOAT16}
    expected = reference(**shared)
    assert expected.losses != reference(**float32).losses
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert outcome.losses == pytest.approx(expected.losses, rel=tolerances.PARITY_BFLOAT16_LOSS)


@pytest.mark.matrix
def test_same_loss_in_bfloat16_compute_with_tied_embeddings(
    pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES["pp-2"]
    shared = {**BFLOAT16, "model.flavor": "odd_tied"}
    expected = reference(**shared)
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert outcome.losses == pytest.approx(expected.losses, rel=tolerances.PARITY_BFLOAT16_LOSS)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_checkpoint.mode": "full", "model.dropout": 0.2},
        *long(
            OP_CHECKPOINT,
            {"compile.enable": True, "compile.backend": "aot_eager"},
            {**OP_CHECKPOINT, "compile.enable": True, "compile.backend": "aot_eager"},
            {"model.name": "qwen3", "model.flavor": "odd_experts"},
            {"model.flavor": "odd_tied"},
        ),
    ],
    ids=["dense", "full", "op", "compiled", "compiled-op", "experts", "tied"],
)
def test_one_rank_casts_its_weights_as_fsdp_does(
    changes: dict[str, Any], reference: Callable[..., Outcome]
) -> None:
    casts, copies = (
        reference(**BFLOAT16, **changes, **{"training.enable_cpu_offload": offload})
        for offload in (False, True)
    )
    assert casts.losses != reference(**FLOAT32, **changes).losses
    if changes.get("model.flavor") == "odd_tied":
        # FSDP adds the two gradients of the weight in bfloat16.
        assert casts.weights.keys() == copies.weights.keys()
        assert casts.losses[0] == copies.losses[0]
        assert casts.losses == pytest.approx(copies.losses, rel=tolerances.PARITY_BFLOAT16_LOSS)
    else:
        assert_identical(casts, copies)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "backend",
    # inductor needs a minute for the C++ compiler.
    ["aot_eager", "inductor"],
)
def test_compiled_blocks_train_equally(
    backend: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    overrides = {
        **FSDP,
        "compile.enable": True,
        "compile.backend": backend,
        "activation_checkpoint.mode": "full",
        "model.dropout": 0.2,
    }
    expected = reference(**{"model.dropout": 0.2})
    for outcome in pools(2).run(run_job, tmp_path / "run", overrides, timeout_s=280):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


COMPILED = {"compile.enable": True, "compile.backend": "aot_eager"}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {"activation_checkpoint.mode": "none"},
    "full": {"activation_checkpoint.mode": "full"},
    "every-2": {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "2",
    },
    "op": OP_CHECKPOINT,
}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "recompute"),
    [
        (mesh, recompute)
        for mesh in ("tp-2", "cp-2-allgather", "pp-2", "pp-2-tp-2", "fsdp-2-tp-2", "tp-2-cp-2")
        for recompute in RECOMPUTE
    ],
)
def test_compiled_blocks_train_equally_on_meshes(
    mesh: str, recompute: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    overrides = {**overrides, **COMPILED, **RECOMPUTE[recompute]}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", overrides, timeout_s=280):
        assert_same(outcome, reference(), tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "recompute"),
    [
        (mesh, recompute)
        for mesh in ("ep-2", "etp-2", "tp-2-ep-2", "ep-2-etp-2", "ep-2-cp-2", "pp-2-ep-2")
        for recompute in RECOMPUTE
    ],
)
def test_compiled_experts_train_equally_on_meshes(
    mesh: str, recompute: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = EXPERT_MESHES[mesh]
    overrides = {**overrides, **EXPERTS, **COMPILED, **RECOMPUTE[recompute]}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", overrides, timeout_s=280):
        assert_same(outcome, reference(**EXPERTS), tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize("recompute", ["op", "none", "full"])
def test_compiled_z_losses_train_equally(
    recompute: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = EXPERT_MESHES["tp-2"]
    shared = {**EXPERTS, **Z_LOSS, "model.router_z_loss_weight": 0.05}
    overrides = {**overrides, **shared, **COMPILED, **RECOMPUTE[recompute]}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", overrides, timeout_s=280):
        assert_same(outcome, reference(**shared), tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
def test_compiled_experts_support_another_batch_size_in_validation(
    pools: Pools, tmp_path: Path
) -> None:
    world_size, overrides = EXPERT_MESHES["tp-2-ep-2"]
    validated = {
        "training.held_out_fraction": 0.3,
        "validation.enable": True,
        "validation.freq": 1,
        "validation.local_batch_size": 3,
    }
    overrides = {**overrides, **EXPERTS, **validated}
    (expected, _) = pools(world_size).run(run_job, tmp_path / "eager", overrides)
    compiled = {**overrides, **COMPILED}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", compiled, timeout_s=280):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)
    losses = [
        [line["loss"] for line in map(json.loads, text.splitlines()) if "validation" in str(line)]
        for folder in ("eager", "run")
        for text in [(tmp_path / folder / "metrics.jsonl").read_text()]
    ]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["accumulation-1", "fsdp-2"])
def test_compiled_experts_with_a_capacity(
    mesh: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = MESHES[mesh]
    model = {"model.name": "qwen3", "model.flavor": "capped_experts"}
    compiled = {**overrides, **model, **COMPILED}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", compiled, timeout_s=280):
        assert_same(outcome, reference(**model), tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_inductor_trains_equally(
    model: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, overrides = STAGED[model] if model == "experts" else MESHES["tp-2"]
    compiled = {**overrides, **COMPILED, **RECOMPUTE["full"], "compile.backend": "inductor"}
    expected = reference(**(EXPERTS if model == "experts" else {"model.flavor": "odd"}))
    for outcome in pools(world_size).run(run_job, tmp_path / "run", compiled, timeout_s=280):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


# Every pair of pipeline schedule, activation checkpointing, model and compilation has a row.
SCHEDULES = (
    *("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"),
    *("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV"),
)
STAGED: dict[str, tuple[int, dict[str, Any]]] = {
    "dense": (2, {**PP, "model.flavor": "odd"}),
    "experts": (2, {**PP, **EXPERTS}),
    "experts-ep-2": (4, {**PP, **EXPERTS, **EP}),
}


def schedule_rows() -> list[Any]:
    return [
        (schedule, recompute, model, compiled)
        for row, schedule in enumerate(SCHEDULES)
        for column, recompute in enumerate(RECOMPUTE)
        for place, model in enumerate(STAGED)
        for compiled in (False, True)
        # All rows with "op", where recompute interacts with the split backward.
        if recompute == "op" or (row + column + place + compiled) % 3 == 0
    ]


@pytest.mark.matrix
@pytest.mark.parametrize(("schedule", "recompute", "model", "compiled"), schedule_rows())
def test_schedules_recompute(
    schedule: str,
    recompute: str,
    model: str,
    compiled: bool,
    pools: Pools,
    reference: Callable[..., Outcome],
    tmp_path: Path,
) -> None:
    world_size, overrides = STAGED[model]
    overrides = {
        **overrides,
        **RECOMPUTE[recompute],
        **(COMPILED if compiled else {}),
        "parallelism.pipeline_parallel_schedule": schedule,
    }
    expected = reference(**(EXPERTS if model != "dense" else {"model.flavor": "odd"}))
    for outcome in pools(world_size).run(run_job, tmp_path / "run", overrides, timeout_s=280):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_same_loss_in_emulated_float8(
    recipe: str | None, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    # With one microbatch size, because activation scales are per microbatch.
    shared = {
        "model.flavor": "debugmodel",
        "training.dtype": "float32",
        "training.local_batch_size": 4,
        "model.converters": ["quantize.linear.float8"],
        "optimizer.name": "SGD",
        "quantize.linear": {"float8": {"recipe_name": recipe, "emulate": True}},
    }
    expected = pools(1).run(run_job, tmp_path / "alone", shared)[0]
    plain = pools(1).run(run_job, tmp_path / "plain", {**shared, "model.converters": []})[0]
    assert expected.losses[-1] < expected.losses[0]
    assert expected.losses != plain.losses
    assert expected.losses == pytest.approx(plain.losses, rel=tolerances.FLOAT8_LOSS)
    for outcome in pools(2).run(run_job, tmp_path / "run", {**FSDP, **shared}):
        first = pytest.approx(expected.losses[0], rel=tolerances.PARITY_FLOAT32_LOSS)
        assert outcome.losses[0] == first
        assert outcome.losses == pytest.approx(expected.losses, rel=tolerances.PARITY_FLOAT8_LOSS)


@pytest.mark.matrix
def test_compiled_blocks_with_expert_parallelism_train_equally(
    pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    shared = {"model.name": "qwen3", "model.flavor": "many_experts"}
    overrides = {
        **EXPERT_MESHES["ep-2"][1],
        "compile.enable": True,
        "compile.backend": "aot_eager",
    }
    expected = reference(**shared)
    for outcome in pools(2).run(run_job, tmp_path / "run", {**overrides, **shared}, timeout_s=280):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)


@pytest.mark.parametrize(
    ("world_size", "balancer"),
    [
        (2, "headtail"),
        pytest.param(2, None, marks=pytest.mark.matrix),
        pytest.param(4, "headtail", marks=pytest.mark.matrix),
        pytest.param(4, None, marks=pytest.mark.matrix),
    ],
)
def test_same_training_with_ring_attention(
    world_size: int,
    balancer: str | None,
    pools: Pools,
    reference: Callable[..., Outcome],
    tmp_path: Path,
) -> None:
    shared = {"model.attention_mask": "causal"}
    overrides = {
        "parallelism.context_parallel_degree": world_size,
        "parallelism.context_parallel_rotate_method": "alltoall",
        "parallelism.context_parallel_load_balancer": balancer,
    }
    expected = reference(**shared)
    for outcome in pools(world_size).run(run_job, tmp_path / "run", {**overrides, **shared}):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64, unequal_targets=False)


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["LoopedBFS", "InterleavedZeroBubble", "DualPipeV"])
def test_same_training_under_every_schedule(
    schedule: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    overrides = {**PP, "parallelism.pipeline_parallel_schedule": schedule}
    for outcome in pools(2).run(run_job, tmp_path / "run", overrides):
        assert_same(outcome, reference(), tolerances.PARITY_FLOAT64)


def rounds_of_two(num_microbatches: int) -> str:
    """An order of two stages per rank: forward and backward of two microbatches at a time."""
    return "\n".join(
        ",".join(
            f"{stage}{kind}{microbatch}"
            for first in range(0, num_microbatches, 2)
            for kind, stages in (("F", (rank, 2 + rank)), ("B", (2 + rank, rank)))
            for stage in stages
            for microbatch in (first, first + 1)
        )
        for rank in range(2)
    )


# name -> (processes, file); a pipeline has 8 microbatches on 2 processes, 4 on 4.
ORDERS = {
    "1f1b": (
        2,
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0F4,0B3,0F5,0B4,0F6,0B5,0F7,0B6,0B7\n"
        ",1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,1F4,1B4,1F5,1B5,1F6,1B6,1F7,1B7\n",
    ),
    "two-stages-per-rank": (2, rounds_of_two(8)),
    "two-stages-per-rank-fsdp-2": (4, rounds_of_two(4)),
    # One stage on rank 0, two consecutive stages on rank 1, split backward.
    "uneven": (
        2,
        ",".join(f"0F{m},0I{m},0W{m}" for m in range(8))
        + "\n"
        + ",".join(f"1F{m},2F{m},2I{m},1I{m},2W{m},1W{m}" for m in range(8)),
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", ["uneven", "1f1b", "two-stages-per-rank", "two-stages-per-rank-fsdp-2"]
)
def test_same_training_in_an_order_from_a_file(
    name: str, pools: Pools, reference: Callable[..., Outcome], tmp_path: Path
) -> None:
    world_size, order = ORDERS[name]
    file = tmp_path / "order.csv"
    file.write_text(order)
    overrides = {**PP, "parallelism.pipeline_parallel_schedule_csv": str(file)}
    for outcome in pools(world_size).run(run_job, tmp_path / "run", overrides):
        assert_same(outcome, reference(), tolerances.PARITY_FLOAT64)
