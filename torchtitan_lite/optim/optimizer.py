"""A torch optimizer over this rank's shards of the parameters.

Updates are element-wise, so shards are independent, and the optimizer gets plain tensors. With
DTensors each step would pay DTensor's dispatch, which costs more than the update of a small model
and, for parameters on a mesh of four axes, minutes in the first step (torch 2.13). It also allows
parameters of several meshes in one call. Layer: above device and mesh; `config`.
"""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.device import Device
from torchtitan_lite.schema.optimizer import OptimizerConfig
from torchtitan_lite.torch_compat import as_dtensor, foreach_mul_, local_tensor

_COUNT = "step"
"""The only slot that does not have its parameter's shape."""


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, no_decay: Iterable[str], device: Device
) -> "ShardedOptimizer":
    """Build the optimizer of `model`, in two groups: with and without weight decay.

    `no_decay` are the model's patterns of parameters without weight decay.
    """
    patterns = () if config.decay_norms_biases_embeddings else tuple(no_decay)
    decayed, undecayed = [], []
    for name, parameter in model.named_parameters():
        exempt = any(fnmatchcase(name, pattern) for pattern in patterns)
        (undecayed if exempt else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    how = {
        "for-loop": {"foreach": False, "fused": False},
        "foreach": {"foreach": True, "fused": False},
        "fused": {"foreach": False, "fused": device.fused_optimizer},
    }[config.implementation]
    betas = (config.beta1, config.beta2)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if config.name == "SGD":
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.beta1, **how)
        if config.name == "Adagrad":
            return torch.optim.Adagrad(groups, lr=config.lr, eps=config.eps, **how)
        kind = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[config.name]
        return kind(groups, lr=config.lr, betas=betas, eps=config.eps, **how)

    return ShardedOptimizer(make, groups)


class ShardedOptimizer:
    """The optimizer. Use `build_optimizer`."""

    def __init__(
        self,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        groups: list[dict[str, Any]],
    ) -> None:
        """`make` gets `groups` with this rank's shard in place of each parameter."""
        self._parts: dict[nn.Parameter, nn.Parameter] = {
            parameter: nn.Parameter(_local(parameter.detach()))
            if isinstance(parameter, DTensor)
            else parameter
            for group in groups
            for parameter in group["params"]
        }
        # Its parameters are this rank's parts.
        self.inner = make(
            [{**group, "params": [self._parts[p] for p in group["params"]]} for group in groups]
        )
        # The scale is float32, so a kernel in float64 would lose precision.
        self._divides_gradients = all(
            group.get("fused") and part.dtype.itemsize <= torch.float32.itemsize
            for group in self.inner.param_groups
            for part in group["params"]
        )
        self._counts_beside = {
            part: bool(group.get("fused") or group.get("capturable"))
            for group in self.inner.param_groups
            for part in group["params"]
        }

    @torch.no_grad()
    def step(self, lr: float, gradient_factor: float = 1.0) -> None:
        """Update every parameter that has a gradient, by the gradients times `gradient_factor`. The
        gradients are invalid afterwards."""
        gradients = self._begin_step(lr)
        if self._divides_gradients:
            # torch copies it to other devices.
            device = gradients[0].device if gradients else torch.device("cpu")
            self._step(torch.full((), 1 / gradient_factor, device=device), None)
        else:
            foreach_mul_([one for one in gradients if one.numel()], gradient_factor)
            self.inner.step()

    def can_step_unless(self, device: torch.device) -> bool:
        """Return whether `step_unless` is supported with tensors on `device`."""
        # A skipped first step of SGD would leave its momentum uninitialized.
        is_adam = isinstance(self.inner, torch.optim.Adam)
        return (
            self._divides_gradients
            and is_adam
            and all(_device(parameter) == device for parameter in self._parts)
        )

    @torch.no_grad()
    def step_unless(self, skip: torch.Tensor, lr: float, divisor: torch.Tensor) -> None:
        """`step` by the gradients divided by `divisor`, unless `skip` is 1; both are 0-d float32 on
        the device, so that the host does not wait for their values."""
        self._begin_step(lr)
        self._step(divisor, skip)

    def _begin_step(self, lr: float) -> list[torch.Tensor]:
        """Set the rate and the gradients of the inner optimizer. Returns the gradients."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        for parameter, part in self._parts.items():
            if part is not parameter:
                # FSDP may have moved the part since the last step.
                part.data = _local(parameter)
                part.grad = None if parameter.grad is None else _local(parameter.grad)
        return [part.grad for part in self._parts.values() if part.grad is not None]

    def _step(self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Step with what `torch.amp.GradScaler` hands to fused kernels: they divide the gradients
        as they read them, which saves a pass over them, and do nothing if `found_inf` is 1."""
        self.inner.grad_scale = grad_scale  # type: ignore[attr-defined]
        self.inner.found_inf = found_inf  # type: ignore[attr-defined]
        self.inner.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter, part in self._parts.items():
            parameter.grad = part.grad = None

    def slots(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the optimizer state of a parameter by name, with the parameter's placements if it
        has its shape. Empty before the first step, except Adagrad's."""
        part = self._parts[parameter]
        return {
            name: value if name == _COUNT else placed_like(value, parameter)
            for name, value in self.inner.state.get(part, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def allocate(self, parameter: nn.Parameter, slot: str, shape: tuple[int, ...]) -> None:
        """Create a slot of global `shape`, which most optimizers create in their first step, filled
        with zeros; keep an existing one."""
        part = self._parts[parameter]
        if slot in self.inner.state[part]:
            return
        if slot != _COUNT:
            value = torch.zeros_like(part, requires_grad=False)
        else:
            # A count of steps lies beside its parameter only for the fused kernels.
            device = part.device if self._counts_beside[part] else torch.device("cpu")
            value = torch.zeros(shape, dtype=torch.float32, device=device)
        self.inner.state[part][slot] = value


def _device(parameter: nn.Parameter) -> torch.device:
    return local_tensor(parameter).device


def _local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def placed_like(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return a tensor like this rank's shard of a parameter, with the same placements. It shares
    memory: with CPU offload both are on the host, though the mesh is of devices."""
    if not isinstance(parameter, DTensor):
        return value
    return as_dtensor(value, parameter.device_mesh, parameter.placements, parameter.shape)
