"""Runs of the odd model of `tests.job`, as one rank of a job on a GPU without values."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fake_cuda.device import FakeDevice
from tests.job import odd_config
from torchtitan_lite.builders import build
from torchtitan_lite.config.constraints import check_against
from torchtitan_lite.device import detect_device
from torchtitan_lite.mesh import Mesh, resolve_degrees
from torchtitan_lite.preemption import StopRequest
from torchtitan_lite.torch_compat import local_tensor
from torchtitan_lite.train_state import TrainState
from torchtitan_lite.trainer import StepReport, train

Observed = dict[str, Any]
"""`waits`: per step, the host's waits by line; `state`: shapes and devices of the state's local tensors."""


def observe(folder: Path, size: int, rank: int, overrides: Mapping[str, Any]) -> Observed:
    """Train two steps as `rank` of `size` ranks."""
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    config = odd_config(
        folder,
        {"training.dtype": "float32", "training.steps": 2, **overrides, "job.device": "cuda"},
    )
    device = FakeDevice(_values)
    steps: list[dict[str, int]] = []

    def watch(state: TrainState, report: StepReport) -> None:
        assert report.committed
        steps.append(dict(device.waits))
        device.waits.clear()

    # The other ranks send nothing: also rank 0's name of the run does not arrive.
    identity = json.dumps(["0" * 32, "0" * 12]).encode()
    leader = patch("torchtitan_lite.checkpoint.save_context.broadcast_bytes", lambda text: identity)
    with leader, device.running():
        mesh = Mesh(detect_device("cuda"), resolve_degrees(config.parallelism, size))
        check_against(config, size)
        with build(config, mesh, StopRequest()) as built:
            device.waits.clear()
            assert train(replace(built.job, hooks=[*built.job.hooks, watch]))
            state = {
                name: [list(local_tensor(one).shape), str(one.dtype), str(local_tensor(one).device)]
                for name, one in built.job.state.tensors().items()
            }
    compiled = counters["stats"]["unique_graphs"]
    return {"waits": steps, "state": state, "graphs": compiled}


def observe_in_child(send: Connection, *args: Any) -> None:
    """Send what `observe(*args)` returns."""
    send.send(json.dumps(observe(*args)))


def _values(tensor: torch.Tensor, frame: FrameType) -> torch.Tensor | None:
    """Values with which the product goes on: no rank asks to stop, and tokens are spread evenly."""
    if frame.f_code.co_name == "reduce_step":
        values = torch.ones(tensor.shape, dtype=tensor.dtype)
        values[1] = 0
        return values
    if frame.f_code.co_name == "run" and frame.f_code.co_filename.endswith("expert.py"):
        num_owners, num_tokens = frame.f_locals["self"].num_owners, len(frame.f_locals["tokens_ND"])
        share = [num_tokens // num_owners + (place < num_tokens % num_owners) for place in range(num_owners)]
        row = torch.tensor(share).repeat_interleave(tensor.shape[-1] // num_owners)
        return torch.stack([row, row])
    return None
