"""Short training runs through the product's own `build` and `train`, in a process of `ranks.py`."""

import hashlib
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_case import fill_weights
from tests.harness.jobs import FIXTURE
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot, read_tensor
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.config import Config
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import start_mesh
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.models import llama3, qwen3
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.training.builders import build
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.run_config import config_from
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import StepReport, train

_MOST_DIGESTED_BYTES = 1 << 30


def job_config(folder: Path, device: str, overrides: Mapping[str, Any]) -> Config:
    """Return the config of a debug model with `section.key` overrides: 4 samples of 256 tokens per
    step, in float32 unless `training.mixed_precision_param` says otherwise."""
    llama3.FLAVORS["four_blocks_of_1B"] = replace(
        llama3.FLAVORS["1B"], num_layers=4, tied_embeddings=False
    )
    qwen3.FLAVORS["few_experts"] = replace(
        qwen3.FLAVORS["tiny"],
        hidden_dim=None,
        moe=MoEDims(num_experts=8, top_k=2, hidden_dim=192),
    )
    values: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(folder / "outputs"), "device": device},
        "model": {"flavor": "debugmodel"},
        "training": {
            "dataset_path": str(FIXTURE),
            "cache_folder": str(folder / "cache"),
            "local_batch_size": 2,
            "global_batch_size": 4,
            "seq_len": 256,
            "steps": 6,
            "mixed_precision_param": "float32",
        },
        "optimizer": {"lr": 1e-3},
        "lr_scheduler": {"warmup_steps": 2, "total_steps": 100},
        "activation_checkpoint": {"mode": "none"},
        "metrics": {"enable_tensorboard": False},
    }
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    return config_from(values, "the test")


def train_job(
    folder: str,
    device: str,
    overrides: dict[str, Any],
    *,
    stop_after: int = 0,
    with_known_weights: bool = False,
    counts_waits_from: int = 0,
    keeps_saved_states: bool = False,
) -> dict[str, Any]:
    """Train in this rank and return losses, norms, times, and digests of the state after the last
    step.

    With `stop_after`, stop is requested in that step. `with_known_weights` replaces the initial
    weights by numbers that do not depend on torch's version or the device. From step
    `counts_waits_from`, operations that make the host wait for the GPU are listed by step.
    `keeps_saved_states` compares each checkpoint in the folder with the state of its step.
    """
    config = job_config(Path(folder), device, overrides)
    stop = StopRequest()
    recording = _Recording(stop, stop_after)
    with (
        start_mesh(config.parallelism, config.comm, detect_device(device), folder) as mesh,
        build(config, mesh, stop) as built,
    ):
        check_against(config, mesh.world_size)
        job = built.job
        resumed_at = job.state.step
        if with_known_weights:
            named = job.state.model.named_parameters()
            fill_weights({n: local_tensor(p).detach() for n, p in named}, draws_on="cpu")
        hooks = [*job.hooks, recording.record]
        if keeps_saved_states:
            interval = config.checkpoint.interval
            hooks.append(lambda state, report: recording.keep(state, report, interval))
        context = job.step_context
        if counts_waits_from:
            context = _WaitCounter(counts_waits_from, recording.waits).step
        began_s = time.perf_counter()
        train(replace(job, hooks=hooks, step_context=context))
        if device == "cuda":
            torch.cuda.synchronize()
        train_s = time.perf_counter() - began_s
        tensors = job.state.tensors()
        state_bytes = sum(local_tensor(tensor).nbytes for tensor in tensors.values())
        # Of a large state, reading it all would take longer than the test.
        state = digests(tensors) if state_bytes < _MOST_DIGESTED_BYTES else {}
    result = {
        "losses": recording.losses,
        "grad_norms": recording.grad_norms,
        "committed": recording.committed,
        "resumed_at": resumed_at,
        "train_s": train_s,
        "step_s": recording.step_s,
        "stall_s": recording.stall_s,
        "state": state,
        "state_bytes": state_bytes,
        "waits": recording.waits,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0,
    }
    if keeps_saved_states:
        result["saved"] = recording.differences(Path(config.job.dump_folder) / "checkpoint")
    return result


def long_text(folder: Path) -> Path:
    """Write a text of more tokens than a long sequence has, and return its path."""
    path = folder / "long_text.jsonl"
    path.write_text(FIXTURE.read_text(encoding="utf-8") * 40, encoding="utf-8")
    return path


class _Recording:
    """What a run's hooks record."""

    def __init__(self, stop: StopRequest, stop_after: int) -> None:
        self._stop, self._stop_after = stop, stop_after
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.committed: list[bool] = []
        self.step_s: list[float] = []
        self.stall_s: list[float] = []
        self.waits: dict[str, list[str]] = {}

    def record(self, state: TrainState, report: StepReport) -> None:
        self.losses.append(report.loss)
        self.grad_norms.append(report.grad_norm)
        self.committed.append(report.committed)
        self.step_s.append(report.step_time_s)
        self.stall_s.append(report.checkpoint_stall_s)
        if report.number == self._stop_after - 1:
            self._stop.was_signaled = True

    def keep(self, state: TrainState, report: StepReport, interval: int) -> None:
        """Copy the state of a step that is saved, on its own device, without waiting."""
        if report.number % interval == 0:
            tensors = {
                name: local_tensor(tensor).detach().clone()
                for name, tensor in state.tensors().items()
            }
            self._states[report.number] = tensors

    def differences(self, folder: Path) -> dict[str, list[str]]:
        """Compare the stored checkpoints with the copies. Returns the names of tensors that
        differ, by step."""
        storage = open_storage(str(folder))
        found = {}
        for step in storage.steps():
            if step not in self._states:
                continue
            stored = StoredSnapshot(storage, f"step-{step}")
            copies = self._states[step]
            found[str(step)] = [
                name
                for name in sorted(copies.keys() | stored.tensors.keys())
                if name not in copies
                or name not in stored.tensors
                or not _same_bits(read_tensor(stored, name), copies[name])
            ]
        return found


def _same_bits(stored: torch.Tensor, copy: torch.Tensor) -> bool:
    here = copy.cpu().reshape(stored.shape)
    return stored.dtype == here.dtype and digests({"": stored}) == digests({"": here})


class _WaitCounter:
    """Lists the operations of a step that make the host wait, by torch's own detection."""

    def __init__(self, first_step: int, found: dict[str, list[str]]) -> None:
        self._first, self._found = first_step, found

    def step(self, number: int) -> Any:
        """Return the context of a step."""
        if number < self._first:
            return nullcontext()
        return self._detecting(number)

    def _detecting(self, number: int) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def detect() -> Any:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    yield
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            self._found[str(number)] = [
                f"{Path(one.filename).name}:{one.lineno}"
                for one in caught
                if "synchronizing CUDA operation" in str(one.message)
            ]

        return detect()


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a hash of the bits of this rank's part of each tensor."""
    found = {}
    for name, tensor in tensors.items():
        here = local_tensor(tensor).detach().cpu().contiguous().reshape(-1)
        found[name] = hashlib.blake2b(here.view(torch.uint8).numpy().tobytes()).hexdigest()
    return found
