"""The meshes of the parity tables, and the comparison of two training runs."""

from typing import Any

import pytest
import torch

from tests.harness.jobs import Outcome

FSDP: dict[str, Any] = {"parallelism.data_parallel_shard_degree": -1}
HSDP = {"parallelism.data_parallel_replicate_degree": 2}
BATCH_OF_2 = {"training.local_batch_size": 2}
_BATCH_OF_4 = {"training.local_batch_size": 4}
_TP = {"parallelism.tensor_parallel_degree": 2}
TP = {**_TP, **BATCH_OF_2}
CP = {"parallelism.context_parallel_degree": 2}
PP = {"parallelism.pipeline_parallel_degree": 2}
BATCH_OF_1 = {"training.local_batch_size": 1}
OP_CHECKPOINT = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}

# name -> (processes, overrides)
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp-2": (2, FSDP),
    "fsdp-4": (4, {**FSDP, **BATCH_OF_2}),
    "hsdp-2x2": (4, {**HSDP, **BATCH_OF_2}),
    "replicate-2": (2, {**HSDP, "parallelism.data_parallel_shard_degree": 1}),
    "replicate-4": (
        4,
        {
            **BATCH_OF_2,
            "parallelism.data_parallel_replicate_degree": 4,
            "parallelism.data_parallel_shard_degree": 1,
        },
    ),
    "accumulation-1": (1, BATCH_OF_1),
    "accumulation-fsdp-2": (2, {**FSDP, **BATCH_OF_1}),
    "accumulation-hsdp-2x2": (4, {**HSDP, **BATCH_OF_1}),
    "reshard-never": (2, {**FSDP, "parallelism.fsdp_reshard_after_forward": "never"}),
    "reshard-always": (2, {**FSDP, "parallelism.fsdp_reshard_after_forward": "always"}),
    "cpu-offload": (2, {**FSDP, "training.enable_cpu_offload": True}),
    "tp-2": (2, _TP),
    "tp-2-whole-sequence": (2, {**_TP, "parallelism.enable_sequence_parallel": False}),
    "tp-2-whole-logits": (2, {**_TP, "parallelism.disable_loss_parallel": True}),
    "tp-2-recompute-op": (2, {**_TP, **OP_CHECKPOINT}),
    "tp-4": (
        4,
        {
            "model.flavor": "four_kv_heads",
            "parallelism.tensor_parallel_degree": 4,
            "training.local_batch_size": 8,
        },
    ),
    "fsdp-2-tp-2": (4, _TP),
    "replicate-2-tp-2": (4, {**_TP, **HSDP}),
    "cp-2-allgather": (2, CP),
    "cp-2-unbalanced": (2, {**CP, "parallelism.context_parallel_load_balancer": None}),
    "cp-2-ulysses": (2, {**CP, "parallelism.context_parallel_rotate_method": "ulysses"}),
    "cp-4-allgather": (4, {"parallelism.context_parallel_degree": 4}),
    "cp-4-ulysses": (
        4,
        {
            "model.flavor": "four_kv_heads",
            "parallelism.context_parallel_degree": 4,
            "parallelism.context_parallel_rotate_method": "ulysses",
        },
    ),
    "fsdp-2-cp-2": (4, CP),
    "replicate-2-cp-2-ulysses": (
        4,
        {**CP, **HSDP, "parallelism.context_parallel_rotate_method": "ulysses"},
    ),
    "tp-2-cp-2": (4, {**_TP, **CP}),
    "pp-2": (2, PP),
    "pp-2-gpipe-microbatches-of-2": (
        2,
        {
            **PP,
            "parallelism.pipeline_parallel_schedule": "GPipe",
            "parallelism.pipeline_parallel_microbatch_size": 2,
        },
    ),
    "pp-2-interleaved": (2, {**PP, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}),
    "pp-2-zbv": (2, {**PP, "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}),
    "pp-4": (4, {"parallelism.pipeline_parallel_degree": 4}),
    "pp-2-fsdp-2": (4, PP),
    "replicate-2-pp-2": (4, {**PP, **HSDP}),
    "pp-2-tp-2": (4, {**PP, **_TP}),
    "pp-2-cp-2": (4, {**PP, **CP}),
    "pp-2-tp-2-fsdp-2": (8, {**PP, **_TP}),
    "pp-2-cp-2-fsdp-2": (8, {**PP, **CP}),
    "tp-2-cp-2-fsdp-2": (8, {**_TP, **CP}),
    "hsdp-2x2-tp-2": (8, {**HSDP, **_TP, **BATCH_OF_1}),
    "hsdp-2x2-cp-2": (8, {**HSDP, **CP, **BATCH_OF_2}),
    "recompute-full": (1, {"activation_checkpoint.mode": "full"}),
    "recompute-full-fsdp-2": (2, {**FSDP, "activation_checkpoint.mode": "full"}),
    "recompute-selective": (2, {**FSDP, "activation_checkpoint.mode": "selective"}),
    "recompute-op": (2, {**FSDP, **OP_CHECKPOINT}),
}
MESHES = {name: (size, {**_BATCH_OF_4, **row}) for name, (size, row) in MESHES.items()}

EP = {"parallelism.expert_parallel_degree": 2}
ETP = {"parallelism.expert_tensor_parallel_degree": 2}
EXPERT_MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "ep-2": (2, {**EP, **BATCH_OF_1}),
    "etp-2": (2, ETP),
    "ep-2-fsdp-4": (4, {**EP, **BATCH_OF_2}),
    "ep-4": (4, {**BATCH_OF_2, "parallelism.expert_parallel_degree": 4}),
    "ep-2-etp-2": (4, {**EP, **ETP, **BATCH_OF_2}),
    "hsdp-2x2-ep-2": (4, {**EP, **HSDP, **BATCH_OF_2}),
    "ep-2-cp-2": (4, {**EP, **CP}),
    "tp-2": (2, _TP),
    "tp-2-ep-2": (2, {**_TP, **EP}),
    "tp-2-etp-2": (2, {**_TP, **ETP}),
    "tp-2-ep-2-whole-sequence": (2, {**_TP, **EP, "parallelism.enable_sequence_parallel": False}),
    "fsdp-2-tp-2-ep-4": (4, {**_TP, "parallelism.expert_parallel_degree": 4}),
    "fsdp-2-tp-2-ep-2": (4, {**_TP, **EP}),
    "pp-2-ep-2": (4, {**PP, **EP}),
    "ep-2-recompute-full": (2, {**EP, "activation_checkpoint.mode": "full"}),
    "ep-2-recompute-op": (2, {**EP, **OP_CHECKPOINT}),
    "pp-2-tp-2-ep-4": (8, {**PP, **_TP, "parallelism.expert_parallel_degree": 4}),
    "ep-2-fsdp-8": (8, EP),
    # 2 experts over 4 shards: one stack is sharded along another dim, the others leave ranks empty.
    "ep-2-fsdp-8-few": (8, {**EP, "model.flavor": "capped_experts"}),
    "ep-2-softmax": (2, {**EP, "model.flavor": "capped_experts"}),
    "ep-2-cpu-offload": (2, {**EP, "training.enable_cpu_offload": True}),
    "pp-2-zbv-ep-2-fsdp-4": (
        8,
        {
            **PP,
            **EP,
            "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble",
            "training.global_batch_size": 16,
        },
    ),
    "ep-4-fsdp-2-cp-2-tp-2": (
        8,
        {**CP, **_TP, **BATCH_OF_1, "parallelism.expert_parallel_degree": 4},
    ),
}
EXPERT_MESHES = {
    name: (size, {**(_BATCH_OF_4 if size < 8 else BATCH_OF_1), **row})
    for name, (size, row) in EXPERT_MESHES.items()
}

EXPERTS = {"model.name": "qwen3", "model.flavor": "many_experts", "training.global_batch_size": 8}
REFERENCE = {"training.local_batch_size": 8}
"""Overrides of one process, with which the meshes are compared."""


def chosen(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides of a mesh for model and global batch, which one process needs too."""
    keys = ("model.flavor", "training.global_batch_size")
    return {key: overrides[key] for key in keys if key in overrides}


def family_case(family: str, mesh: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return the processes and overrides of a mesh of MESHES (llama3) or EXPERT_MESHES (qwen3), and
    the overrides that one process needs too."""
    is_dense = family == "llama3"
    world_size, overrides = (MESHES if is_dense else EXPERT_MESHES)[mesh]
    model = {"model.flavor": "odd"} if is_dense else EXPERTS
    return world_size, overrides, {**model, **chosen(overrides)}


def long(*rows: Any) -> list[Any]:
    """Rows that `make test-all` adds: values, or tuples of them."""
    tuples = (row if isinstance(row, tuple) else (row,) for row in rows)
    return [pytest.param(*row, marks=pytest.mark.matrix) for row in tuples]


# With SGD in `make test`: the rows that reach what no two others reach. What a pair of techniques
# shows needs no row alone.
_SHORT = {
    *("hsdp-2x2", "accumulation-fsdp-2", "recompute-full", "recompute-op", "fsdp-2-tp-2"),
    *("fsdp-2-cp-2", "replicate-2-cp-2-ulysses", "pp-2-zbv", "replicate-2-pp-2", "pp-2-tp-2"),
    *("ep-2-etp-2", "hsdp-2x2-ep-2", "fsdp-2-tp-2-ep-4", "pp-2-ep-2", "tp-2-ep-2-whole-sequence"),
}
# With AdamW: one row for each kind of parameter layout.
_SHORT_ADAMW = {"fsdp-2-tp-2", "cpu-offload", "ep-2-fsdp-4"}
assert MESHES.keys() | EXPERT_MESHES.keys() >= _SHORT | _SHORT_ADAMW


def in_short_suite(mesh: str) -> bool:
    """Whether `make test` covers a mesh."""
    return mesh in _SHORT


def rows(meshes: dict[str, tuple[int, dict[str, Any]]]) -> list[Any]:
    """(mesh, optimizer) for each mesh, with SGD and AdamW: AdamW hides a wrong gradient scale.

    `make test` runs few of them, `make test-all` all.
    """
    return [
        pytest.param(name, optimizer, marks=[] if name in short else [pytest.mark.matrix])
        for name in meshes
        for optimizer, short in (("SGD", _SHORT), ("AdamW", _SHORT_ADAMW))
    ]


def assert_same(
    outcome: Outcome, expected: Outcome, tolerance: float, *, unequal_targets: bool = True
) -> None:
    """Assert equal losses, gradient norms and weights.

    With `unequal_targets`, the number of target tokens must vary between steps.
    """
    assert outcome.targets == expected.targets
    is_unequal = len(set(expected.targets)) > 1
    assert is_unequal == unequal_targets, f"targets per step: {expected.targets}; see odd_config"
    assert outcome.losses == pytest.approx(expected.losses, rel=tolerance)
    assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=tolerance)
    if outcome.rank > 0:
        return
    assert outcome.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        difference = (outcome.weights[name] - weight).abs().max().item()
        assert difference <= tolerance * weight.abs().max().item(), name


def assert_identical(outcome: Outcome, expected: Outcome) -> None:
    """Assert losses, gradient norms and weights that are equal bit by bit."""
    assert outcome.losses == expected.losses
    assert outcome.grad_norms == expected.grad_norms
    if outcome.rank > 0:
        return
    assert outcome.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert torch.equal(outcome.weights[name], weight), name
