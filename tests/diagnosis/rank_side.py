"""Faults in a rank, by orders of the injector; a module for `experimental.custom_import`.

After each step, a rank reads the file that `order_file` names, and follows an order once. Each rank
also calls a collective of its own after each step, as a user's hook does, which a fault can skip,
repeat or change.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tests.diagnosis.small_model  # noqa: F401 (registers the model)
from tests.diagnosis.slow_writer import ORDERS, OWN_RANK
from torchtitan_lite.checkpoint.background.process import WriterProcess
from torchtitan_lite.core.registry import register_hook
from torchtitan_lite.data import loader
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.nn.feed_forward import FeedForward
from torchtitan_lite.training import trainer
from torchtitan_lite.training.hooks import HookContext
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import Hook, StepReport

_VALUES = 8
"""Elements of the collective after each step."""
_ALLOWANCE_BYTES = 64 << 20


def order_file(folder: Path, replica: int, rank: int) -> Path:
    """Return the file for orders to a rank."""
    return folder / f"rank-{replica}-{rank}.json"


class _Faults:
    """Faults that this rank has at present, by name, with their parameters."""

    def __init__(self) -> None:
        self.data_s = self.layer_s = 0.0
        self.is_nan = False
        self.flips_activation = self.flips_shard = False
        self.state: TrainState | None = None

    def follow(self, order: dict[str, Any]) -> None:
        getattr(self, order["name"])(**order["values"])

    def lagging_loader(self, seconds: float) -> None:
        self.data_s = seconds

    def slow_layers(self, seconds: float) -> None:
        self.layer_s = seconds

    def nan_in_data(self) -> None:
        self.is_nan = True

    def flip_weight(self, place: float, bit: int) -> None:
        assert self.state is not None
        _flip([one.detach() for one in self.state.model.parameters()], place, bit)

    def flip_optimizer_state(self, place: float, bit: int) -> None:
        assert self.state is not None
        slots = [
            slot
            for parameter in self.state.model.parameters()
            for slot in self.state.optimizer.slots(parameter).values()
        ]
        _flip(slots, place, bit)

    def flip_gradient(self, where: str) -> None:
        self.flips_activation, self.flips_shard = where == "activation", where == "shard"

    def skip_collective(self) -> None:
        self.collective = lambda: None

    def repeat_collective(self) -> None:
        self.collective = lambda: (_collective(_VALUES), _collective(_VALUES))

    def other_collective(self) -> None:
        self.collective = lambda: dist.broadcast(torch.ones(_VALUES), src=0)

    def wrong_shape(self, values: int) -> None:
        self.collective = lambda: _collective(values)

    def exhaust_memory(self) -> None:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _ALLOWANCE_BYTES, resource.RLIM_INFINITY))
        self.kept = [torch.ones(_ALLOWANCE_BYTES) for _ in range(64)]

    def collective(self) -> Any:
        _collective(_VALUES)


def _collective(values: int) -> None:
    dist.all_reduce(torch.ones(values))


_FAULTS = _Faults()


def _hook(context: HookContext) -> Hook:
    folder = Path(os.environ[ORDERS])
    replica, rank = context.config.fault_tolerance.replica or 0, context.mesh.rank
    path, done = order_file(folder, replica, rank), [0]
    # The checkpoint writer inherits it.
    os.environ[OWN_RANK] = f"{replica}-{rank}"

    def hook(state: TrainState, report: StepReport) -> None:
        _FAULTS.state, _FAULTS.is_nan = state, False
        if path.exists() and (order := json.loads(path.read_text()))["id"] != done[0]:
            done[0] = order["id"]
            path.unlink()
            _FAULTS.follow(order)
        if context.mesh.world_size > 1:
            _FAULTS.collective()

    return hook


def _read_slowly(self: loader.DataLoader, request: Any) -> Any:
    time.sleep(_FAULTS.data_s)
    return _read(self, request)


def _forward(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(module, FeedForward):
        return None
    time.sleep(_FAULTS.layer_s)
    if _FAULTS.flips_activation and output.requires_grad:
        _FAULTS.flips_activation = False
        output.register_hook(_flipped)
    return output * float("nan") if _FAULTS.is_nan else None


def _flipped(gradient: torch.Tensor) -> torch.Tensor:
    changed = gradient.clone()
    _flip([changed], 0.5, 30)
    return changed


def _forward_backward(
    job: trainer.Job, microbatches: Any, parameters: Sequence[nn.Parameter]
) -> torch.Tensor:
    if not _FAULTS.flips_shard:
        return _run(job, microbatches, parameters)
    _FAULTS.flips_shard = False
    # Before the sum over replicas, which starts during backward. Of a layer: most gradients of the
    # embedding are 0, of which a flip makes a 2.
    parameter = parameters[len(parameters) // 2]
    hook = parameter.register_post_accumulate_grad_hook(_flip_shard)
    hooks: Any = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    hooks.move_to_end(hook.id, last=False)
    try:
        return _run(job, microbatches, parameters)
    finally:
        hook.remove()


def _flip_shard(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    _flip([parameter.grad], 0.5, 30)


def _flip(tensors: list[torch.Tensor], place: float, bit: int) -> None:
    """Flip a bit in memory, as a cosmic ray does: autograd and version counters do not see it.
    `place` is a fraction of all elements; elements of 0 are avoided in gradients by `bit`."""
    arrays = [local_tensor(one).detach().view(-1).numpy().view("int32") for one in tensors
              if local_tensor(one).numel() and local_tensor(one).element_size() == 4]  # fmt: skip
    index = int(place * sum(len(array) for array in arrays))
    for array in arrays:
        if index < len(array):
            array[index] ^= 1 << bit
            return
        index -= len(array)


def _writer_init(self: WriterProcess, region: Path, settings: Any, command: Any = None) -> None:
    _init(self, region, settings, command or [sys.executable, "-m", "tests.diagnosis.slow_writer"])


_read: Callable[..., Any] = loader.DataLoader._read
_run, _init = trainer._forward_backward, WriterProcess.__init__


if ORDERS in os.environ:
    register_hook(_hook)
    loader.DataLoader._read = _read_slowly
    # The hook may return another output.
    nn.modules.module.register_module_forward_hook(_forward)  # pyright: ignore[reportArgumentType]
    trainer._forward_backward = _forward_backward
    WriterProcess.__init__ = _writer_init
