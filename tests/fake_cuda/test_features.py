"""Features of a run on a GPU without values, on one or two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fake_cuda.device import FakeDevice
from tests.fake_cuda.job import observe_in_child
from tests.fake_cuda.test_meshes import COMPILED, EXPERTS, STEP_BUDGET, TOTALS
from tests.harness.jobs import FIXTURE
from tests.harness.ranks import exit_status
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.fault_tolerance.replica.gradient_reducer import GradientReducer
from torchtitan_lite.nn.attention import Attention, FlexKernel
from torchtitan_lite.nn.attention_sinks import SinkKernel
from torchtitan_lite.training.trainer import Job

OFFLOAD = {"training.enable_cpu_offload": True}
EVEN = {"model.flavor": "tiny", "training.seq_len": 32}
"""Sizes that FlexAttention and float8 support."""
MUON = {"optimizer.name": "Muon"}
MUON_STEP = "torchtitan_lite/optim/muon.py step"
FLOAT8 = {"model.converters": ["quantize.linear.float8"]}
VALIDATION = "torchtitan_lite/training/validation.py validate"

FEATURES: dict[str, tuple[int, dict[str, Any], dict[str, int]]] = {
    # name -> (ranks, overrides, host waits beside the totals)
    "snapshots": (1, {"checkpoint.enable": True, "checkpoint.interval": 1}, {}),
    "offload-snapshots": (
        1,
        # FSDP waits for each gradient that it accumulates on the host: here are none.
        {
            **OFFLOAD,
            "training.local_batch_size": 8,
            "checkpoint.enable": True,
            "checkpoint.interval": 1,
        },
        {},
    ),
    "synchronous-saves": (
        1,
        {"checkpoint.enable": True, "checkpoint.async_mode": "disabled", "checkpoint.interval": 2},
        {},
    ),
    "validation": (
        2,
        {
            "validation.enable": True,
            "validation.freq": 1,
            "validation.steps": 2,
            "validation.dataset_path": str(FIXTURE),
        },
        {VALIDATION: 1},
    ),
    "experts-on-one-rank": (1, EXPERTS, {}),
    "experts-fsdp": (2, EXPERTS, {}),
    "float8": (2, {**EVEN, **FLOAT8}, {}),
    "float8-compiled": (2, {**EVEN, **FLOAT8, **COMPILED}, {}),
    "replay-check": (2, {"fault_tolerance.replay_check": True}, {}),
    "foreach-optimizer": (2, {"optimizer.implementation": "foreach"}, {}),
    "muon": (2, MUON, {}),
    "muon-replicated-experts": (
        4,
        {
            **MUON,
            **EXPERTS,
            "parallelism.data_parallel_replicate_degree": 2,
            "training.local_batch_size": 2,
        },
        {},
    ),
    "muon-offload": (2, {**MUON, **OFFLOAD, "training.local_batch_size": 4}, {MUON_STEP: 1}),
    "sample-ledger": (2, {"debug.sample_ledger": True}, {}),
    "dropout": (2, {"model.dropout": 0.1}, {}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_adds_no_wait(feature: str, tmp_path: Path) -> None:
    size, overrides, waits = FEATURES[feature]
    observed = observe_in_child(tmp_path, size, 0, overrides)
    assert observed.waits[-1] == {**STEP_BUDGET, **waits}


@pytest.mark.parametrize("size", [1, 2])
def test_state_that_is_offloaded_shares_the_memory_of_the_optimizer(
    size: int, tmp_path: Path
) -> None:
    observe_in_child(tmp_path, size, 0, OFFLOAD, _what_is_loaded_arrives)


def _what_is_loaded_arrives(job: Job) -> None:
    for tensor in job.state.tensors().values():
        local_tensor(tensor).fill_(7)
    slots = [
        value
        for inner in job.state.optimizer.inner
        for slots in inner.state.values()
        for value in slots.values()
    ]
    assert len(slots) > 3 * 3
    for value in [*slots, *map(local_tensor, job.state.model.parameters())]:
        assert value.device.type == "cpu" and (value == 7).all()


@pytest.mark.parametrize("cp", [1, 2])
def test_a_document_mask_takes_flex_attention(cp: int, tmp_path: Path) -> None:
    overrides = {
        **EVEN,
        "model.attention_mask": "document",
        "parallelism.context_parallel_degree": cp,
    }
    observed = observe_in_child(tmp_path, cp, 0, overrides, _uses_flex_attention)
    assert observed.waits[-1] == STEP_BUDGET


@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_windows_chunks_and_sinks_take_flex_attention(family: str, tmp_path: Path) -> None:
    overrides = {**EVEN, "model.name": family, "model.attention_mask": "causal"}
    observed = observe_in_child(tmp_path, 1, 0, overrides, _uses_flex_attention)
    assert observed.waits[-1][TOTALS] == 1


def _uses_flex_attention(job: Job) -> None:
    kernels = [
        module.kernel for module in job.state.model.modules() if isinstance(module, Attention)
    ]
    assert kernels
    for kernel in kernels:
        is_flex = isinstance(kernel, SinkKernel) and kernel.backend == "flex"
        assert is_flex or isinstance(kernel, FlexKernel)


def test_sums_over_replicas_do_not_wait() -> None:
    assert exit_status(_reduce_over_replicas) == 0


def _reduce_over_replicas() -> None:
    device = FakeDevice(lambda tensor, frame: None)
    with device.running():
        parameters = [nn.Parameter(torch.zeros(8, 8, device="cuda")) for _ in range(5)]
        reducer = GradientReducer(_Manager(), 2 * 8 * 8 * 4)  # pyright: ignore[reportArgumentType]
        counts = torch.zeros(3, dtype=torch.float64, device="cuda")
        for _ in range(2):
            reducer.reduce_during_backward(parameters)
            torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
            reducer.reduce(parameters, counts)
            assert not device.waits
        # Only then the others' counts decide whether a gradient exists.
        parameters[0].grad = None
        reducer.reduce(parameters, counts)
        assert dict(device.waits) == {
            "torchtitan_lite/fault_tolerance/replica/gradient_reducer.py reduce": 1
        }


class _Manager:
    """The manager of a single replica: each sum is that of this replica."""

    def all_reduce_sum(self, flat: torch.Tensor) -> "_Done":
        return _Done()


class _Done:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass
