"""The meshes of the parity tables, and what equal training means."""

from typing import Any

import pytest

from tests.job import Outcome

FSDP: dict[str, Any] = {"parallelism.data_parallel_shard_degree": -1}
HSDP = {"parallelism.data_parallel_replicate_degree": 2}
BIG_LOCAL_BATCH = {"training.local_batch_size": 2}
TP = {"parallelism.tensor_parallel_degree": 2, **BIG_LOCAL_BATCH}
CP = {"parallelism.context_parallel_degree": 2}
PP = {"parallelism.pipeline_parallel_degree": 2}
ONE_BY_ONE = {"training.local_batch_size": 1}
OP_RECOMPUTE = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}

# name -> (processes, overrides)
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp-2": (2, {**FSDP, "training.local_batch_size": 4}),
    "fsdp-4": (4, {**FSDP, **BIG_LOCAL_BATCH}),
    "hsdp-2x2": (4, {**HSDP, **BIG_LOCAL_BATCH}),
    "replicate-2": (2, {**HSDP, "parallelism.data_parallel_shard_degree": 1}),
    "replicate-4": (
        4,
        {
            **BIG_LOCAL_BATCH,
            "parallelism.data_parallel_replicate_degree": 4,
            "parallelism.data_parallel_shard_degree": 1,
        },
    ),
    "accumulation-1": (1, {"training.local_batch_size": 2}),
    "accumulation-fsdp-2": (2, FSDP),
    "accumulation-hsdp-2x2": (4, HSDP),
    "reshard-never": (2, {**FSDP, "parallelism.fsdp_reshard_after_forward": "never"}),
    "reshard-always": (2, {**FSDP, "parallelism.fsdp_reshard_after_forward": "always"}),
    "cpu-offload": (2, {**FSDP, "training.enable_cpu_offload": True}),
    "tp-2": (2, TP),
    "tp-2-whole-sequence": (2, {**TP, "parallelism.enable_sequence_parallel": False}),
    "tp-2-whole-logits": (2, {**TP, "parallelism.disable_loss_parallel": True}),
    "tp-2-recompute-op": (2, {**TP, **OP_RECOMPUTE}),
    "tp-4": (
        4,
        {
            "model.flavor": "four_kv_heads",
            "parallelism.tensor_parallel_degree": 4,
            "training.local_batch_size": 8,
        },
    ),
    "fsdp-2-tp-2": (4, TP),
    "replicate-2-tp-2": (4, {**TP, **HSDP}),
    "cp-2-allgather": (2, {**CP, **BIG_LOCAL_BATCH}),
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
    "tp-2-cp-2": (4, {**TP, **CP}),
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
    "pp-2-tp-2": (4, {**PP, **TP}),
    "pp-2-cp-2": (4, {**PP, **CP}),
    "pp-2-tp-2-fsdp-2": (8, {**PP, **TP}),
    "pp-2-cp-2-fsdp-2": (8, {**PP, **CP}),
    "tp-2-cp-2-fsdp-2": (8, {**TP, **CP}),
    "hsdp-2x2-tp-2": (8, {**HSDP, **TP, **ONE_BY_ONE}),
    "hsdp-2x2-cp-2": (8, {**HSDP, **CP}),
    "recompute-full": (1, {"activation_checkpoint.mode": "full"}),
    "recompute-full-fsdp-2": (2, {**FSDP, "activation_checkpoint.mode": "full"}),
    "recompute-selective": (2, {**FSDP, "activation_checkpoint.mode": "selective"}),
    "recompute-op": (2, {**FSDP, **OP_RECOMPUTE}),
}

EP = {"parallelism.expert_parallel_degree": 2}
ETP = {"parallelism.expert_tensor_parallel_degree": 2}
EXPERT_MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "ep-2": (2, EP),
    "etp-2": (2, ETP),
    "ep-2-fsdp-4": (4, EP),
    "ep-4": (4, {"parallelism.expert_parallel_degree": 4}),
    "ep-2-etp-2": (4, {**EP, **ETP}),
    "hsdp-2x2-ep-2": (4, {**EP, **HSDP}),
    "ep-2-cp-2": (4, {**EP, **CP}),
    "tp-2": (2, TP),
    "tp-2-ep-2": (2, {**TP, **EP}),
    "tp-2-etp-2": (2, {**TP, **ETP}),
    "tp-2-ep-2-whole-sequence": (2, {**TP, **EP, "parallelism.enable_sequence_parallel": False}),
    "fsdp-2-tp-2-ep-4": (4, {**TP, "parallelism.expert_parallel_degree": 4}),
    "fsdp-2-tp-2-ep-2": (4, {**TP, **EP}),
    "pp-2-ep-2": (4, {**PP, **EP}),
    "ep-2-recompute-full": (2, {**EP, "activation_checkpoint.mode": "full"}),
    "ep-2-recompute-op": (2, {**EP, **OP_RECOMPUTE}),
    "pp-2-tp-2-ep-4": (8, {**PP, **TP, "parallelism.expert_parallel_degree": 4}),
    "ep-2-fsdp-8": (8, EP),
    # 2 experts over 4 shards: one stack is cut along another dim, the others leave ranks empty.
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
        {**CP, **TP, **ONE_BY_ONE, "parallelism.expert_parallel_degree": 4},
    ),
}


# Left to `make test-all` with both optimizers: each pair of techniques has a smaller row.
_LONG = {
    "accumulation-hsdp-2x2",
    "cp-4-allgather",
    "fsdp-4",
    "pp-4",
    "pp-2-tp-2-fsdp-2",
    "recompute-full-fsdp-2",
    "replicate-4",
    "reshard-always",
    "tp-4",
    "ep-2-fsdp-8-few",
    "ep-2-recompute-full",
    "ep-4",
    "pp-2-zbv-ep-2-fsdp-4",
    "pp-2-cp-2-fsdp-2",
    "tp-2-cp-2-fsdp-2",
    "hsdp-2x2-cp-2",
    "pp-2-tp-2-ep-4",
    "ep-2-fsdp-8",
    "ep-4-fsdp-2-cp-2-tp-2",
}
# Rows that run with AdamW under `make test` too: one for each way in which parameters lie.
_WITH_ADAMW = {"fsdp-2", "hsdp-2x2", "tp-2", "fsdp-2-tp-2", "pp-2", "cpu-offload", "ep-2-fsdp-4"}


def rows(meshes: dict[str, tuple[int, dict[str, Any]]]) -> list[Any]:
    """(mesh, optimizer) for each mesh: with SGD, because AdamW hides a wrong scale of the gradient,
    and with AdamW. `make test` covers each pair of techniques; `make test-all` runs all rows."""
    found = []
    for name in meshes:
        long = {"SGD": name in _LONG, "AdamW": name not in _WITH_ADAMW}
        for optimizer, is_long in long.items():
            marks = [pytest.mark.matrix] if is_long else []
            found.append(pytest.param(name, optimizer, marks=marks))
    return found


def assert_same(
    outcome: Outcome, expected: Outcome, tolerance: float, *, unequal_targets: bool = True
) -> None:
    assert outcome.targets == expected.targets
    assert (len(set(expected.targets)) > 1) == unequal_targets
    assert outcome.losses == pytest.approx(expected.losses, rel=tolerance)
    assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=tolerance)
    assert outcome.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        difference = (outcome.weights[name] - weight).abs().max().item()
        assert difference <= tolerance * weight.abs().max().item(), name
