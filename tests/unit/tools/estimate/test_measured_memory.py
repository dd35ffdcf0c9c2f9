"""The estimate against `debug.trace_communication`: the same step with memory, on real ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.jobs import odd_config, run_job
from tests.harness.ranks import WorkerPool
from tests.parity.meshes import CP, FSDP, HSDP, OP_CHECKPOINT, PP
from torchtitan_lite.distributed.device import ACCELERATORS
from torchtitan_lite.distributed.mesh import resolve_degrees
from torchtitan_lite.models import model_spec
from torchtitan_lite.tools.estimate.recorder import StepTrace
from torchtitan_lite.tools.estimate.trace import trace_step

Pools = Callable[[int], WorkerPool]

_TP = {"parallelism.tensor_parallel_degree": 2}
_BF16 = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
_MOE = {"model.name": "qwen3", "model.flavor": "many_experts"}
_RECURRENT = {"model.name": "qwen3_next", "model.flavor": "odd"}
_PIPELINE = {**PP, "training.global_batch_size": 4}
"""Few microbatches: the measurement sees the buffers that a stage receives into only once they are
used, and they are a large part of the odd model's memory."""
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "fsdp": (2, FSDP),
    "fsdp-bf16": (2, {**FSDP, **_BF16}),
    "hsdp": (4, HSDP),
    "offload": (2, {**FSDP, "training.enable_cpu_offload": True}),
    "tp": (2, _TP),
    "tp-whole-sequence": (2, {**_TP, "parallelism.enable_sequence_parallel": False}),
    "fsdp-tp": (4, _TP),
    "cp": (2, CP),
    "cp-ulysses": (2, {**CP, "parallelism.context_parallel_rotate_method": "ulysses"}),
    "cp-ring": (
        2,
        {
            **CP,
            "parallelism.context_parallel_rotate_method": "alltoall",
            "model.attention_mask": "causal",
        },
    ),
    "pp": (2, _PIPELINE),
    "pp-gpipe": (2, {**_PIPELINE, "parallelism.pipeline_parallel_schedule": "GPipe"}),
    "recompute-blocks": (2, {**FSDP, "activation_checkpoint.mode": "full"}),
    "recompute-operations": (2, {**FSDP, **OP_CHECKPOINT}),
    "recurrent": (1, _RECURRENT),
    "recurrent-cp": (2, {**_RECURRENT, **CP}),
    "experts": (1, _MOE),
    "ep": (2, {**_MOE, "parallelism.expert_parallel_degree": 2}),
    "ep-tp": (2, {**_MOE, **_TP, "parallelism.expert_parallel_degree": 2}),
}
_IN_EVERY_RUN = ("pp",)
# Larger than the odd model's other tests: else inputs and router counts are most of the memory.
_SIZES = {"training.seq_len": 96, "training.local_batch_size": 2, "training.steps": 2}


def _check(name: str, pools: Pools, folder: Path) -> None:
    world_size, overrides = CASES[name]
    settings = {**_SIZES, **overrides}
    traced = {**settings, "debug.trace_communication": True}
    pools(world_size).run(run_job, folder, traced)
    for rank in {0, world_size - 1}:
        path = folder / f"communication_rank_{rank}.json"
        measured = json.loads(path.read_text())
        predicted = _trace(folder, settings, rank, world_size)
        peak = max(sum(span.peak.values()) for span in predicted.unit_spans)
        # Where the same storages live, the sums are equal. Routing is not even in a run.
        assert peak == pytest.approx(max(measured["peak_memory_bytes"]["model"].values()), rel=0.05)
        if "experts" not in str(overrides):
            assert _bytes(predicted) == pytest.approx(_measured_bytes(measured), rel=0.01)


def _trace(folder: Path, settings: dict[str, Any], rank: int, world_size: int) -> StepTrace:
    config = odd_config(folder, settings)
    degrees = resolve_degrees(config.parallelism, world_size)
    is_pipeline = degrees.pp > 1
    parallelism, training = config.parallelism, config.training
    at_once = (
        parallelism.pipeline_parallel_microbatch_size if is_pipeline else training.local_batch_size
    )
    return trace_step(
        config,
        model_spec(config.model),
        rank=rank,
        world_size=world_size,
        num_microbatches=training.global_batch_size // (at_once * degrees.batch),
        kept=lambda units: units,
        accelerator=ACCELERATORS["h200"],
    )


def _bytes(trace: StepTrace) -> dict[str, float]:
    found: dict[str, float] = {}
    for (axis, _, _), one in (trace.schedule + trace.update).traffic.items():
        if axis != "world":
            found[axis] = found.get(axis, 0) + one.num_bytes
    return found


def _measured_bytes(trace: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in trace["collectives"]:
        if one["axis"] != "world":
            found[one["axis"]] = found.get(one["axis"], 0) + one["num_bytes"]
    return found


@pytest.mark.parametrize("name", _IN_EVERY_RUN)
def test_peak_and_bytes(name: str, pools: Pools, tmp_path: Path) -> None:
    _check(name, pools, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in CASES if name not in _IN_EVERY_RUN])
def test_peak_and_bytes_of_each_technique(name: str, pools: Pools, tmp_path: Path) -> None:
    _check(name, pools, tmp_path)
