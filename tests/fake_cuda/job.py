"""Runs of the odd model of `tests.harness.jobs`, as one rank of a job on a GPU without values."""

import logging
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fake_cuda.device import FakeDevice
from tests.harness.jobs import odd_config
from tests.harness.ranks import FORK_SERVER
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, resolve_degrees
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.models import model_spec
from torchtitan_lite.parallel.pipeline_stages import join_stages
from torchtitan_lite.training.builders import build, build_model
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import Job, StepReport, train

_TIMEOUT_S = 240


@dataclass(frozen=True)
class Observed:
    """What a rank showed in two steps."""

    waits: list[dict[str, int]]
    """Host waits per step, by file and function."""
    devices: dict[str, str]
    """Device of each tensor of the train state."""
    num_graphs: int
    """Graphs that torch.compile captured."""
    order: list[str]
    """Waits, and updates by a fused optimizer, in the last step."""


def observe_in_child(
    folder: Path, size: int, rank: int, overrides: Mapping[str, Any], check: Any = None
) -> Observed:
    """Train two steps as `rank` of `size` ranks, in a process of its own. `check(job)` is called
    after them."""
    result = _in_child(_observe, folder / "outputs" / "run", size, rank, overrides, check)
    assert isinstance(result, Observed), result
    return result


Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of this rank's part of each tensor of the train state."""


def shapes_in_child(
    folder: Path, size: int, rank: int, overrides: Mapping[str, Any]
) -> tuple[Shapes, Shapes]:
    """Return the shapes on the device and on a CPU, before the first step."""
    result = _in_child(_shapes, folder / "outputs" / "run", size, rank, overrides)
    assert isinstance(result, tuple), result
    return result


def _in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of `function(*args)` in a process of its own, or its error as text."""
    receive, send = FORK_SERVER.Pipe(duplex=False)
    child = FORK_SERVER.Process(target=_child, args=(send, function, *args))
    child.start()
    send.close()
    try:
        assert receive.poll(_TIMEOUT_S), "the process did not answer in time"
        return receive.recv()
    finally:
        child.kill()
        child.join()


def _child(send: Connection, function: Callable[..., Any], *args: Any) -> None:
    try:
        send.send(function(*args))
    except BaseException:
        send.send(traceback.format_exc())


def _shapes(
    folder: Path, size: int, rank: int, overrides: Mapping[str, Any]
) -> tuple[Shapes, Shapes]:
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    found: list[Shapes] = []
    for kind in ("cuda", "cpu"):
        given = {"training.dtype": "float32", **overrides, "job.device": kind}
        config = odd_config(folder / kind, given)
        with FakeDevice(_values).running() if kind == "cuda" else nullcontext():
            mesh = Mesh(detect_device(kind), resolve_degrees(config.parallelism, size))
            state = join_stages(
                build_model(config, model_spec(config.model), mesh), model_spec(config.model), mesh
            ).state_dict()
            found.append(
                {
                    name: (tuple(local_tensor(one).shape), str(one.dtype))
                    for name, one in state.items()
                }
            )
    return found[0], found[1]


def _observe(
    folder: Path, size: int, rank: int, overrides: Mapping[str, Any], check: Any
) -> Observed:
    logging.getLogger("torchtitan_lite").setLevel(logging.ERROR)
    folder.mkdir(parents=True)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    given = {"training.dtype": "float32", "training.steps": 2, **overrides, "job.device": "cuda"}
    config = odd_config(folder, given)
    device = FakeDevice(_values)
    steps: list[dict[str, int]] = []
    orders: list[list[str]] = []

    def watch(state: TrainState, report: StepReport) -> None:
        assert report.committed
        steps.append(dict(device.waits))
        orders.append(list(device.order))
        device.waits.clear()
        device.order.clear()

    # The other ranks send nothing, so the run's identity does not arrive from rank 0.
    identity = b'["00000000000000000000000000000000", "000000000000"]'
    leader = patch(
        "torchtitan_lite.checkpoint.history.identity.broadcast_bytes", lambda _: identity
    )
    # Without a driver, inductor cannot generate kernels.
    kernel = patch("torchtitan_lite.nn.attention.compiled_flex", lambda: flex_attention)
    sinks = patch("torchtitan_lite.nn.attention_sinks.compiled_flex", lambda: flex_attention)
    caps = patch("torchtitan_lite.nn.attention_scores.compiled_flex", lambda: flex_attention)
    mask = patch("torchtitan_lite.nn.attention._compiled_block_mask", lambda: create_block_mask)
    with leader, kernel, sinks, caps, mask, device.running():
        mesh = Mesh(detect_device("cuda"), resolve_degrees(config.parallelism, size))
        check_against(config, size)
        with build(config, mesh, StopRequest()) as built:
            device.waits.clear()
            job: Job = replace(built.job, hooks=[*built.job.hooks, watch])
            assert train(job)
            tensors = job.state.tensors()
            devices = {name: str(local_tensor(one).device) for name, one in tensors.items()}
            if check is not None:
                check(job)
    return Observed(steps, devices, counters["stats"]["unique_graphs"], orders[-1])


def _values(tensor: torch.Tensor, frame: FrameType) -> torch.Tensor | None:
    """Return values with which a run continues: no rank asks to stop, and tokens are spread evenly
    over the experts."""
    if frame.f_code.co_filename.endswith("step/totals.py"):
        totals = torch.ones(tensor.shape, dtype=tensor.dtype)
        totals[1] = 0
        return totals
    if frame.f_code.co_name == "run" and frame.f_code.co_filename.endswith("expert.py"):
        num_owners, num_tokens = frame.f_locals["self"].num_owners, len(frame.f_locals["tokens_ND"])
        owners = torch.arange(num_owners)
        shares = num_tokens // num_owners + (owners < num_tokens % num_owners)
        row = shares.repeat_interleave(tensor.shape[-1] // num_owners)
        return torch.stack([row, row])
    return None
