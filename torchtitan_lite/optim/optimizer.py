"""Torch optimizers over this rank's shards of the parameters.

Element-wise updates of shards are independent, so the optimizers get plain tensors; Muon moves its
matrices itself (`muon`). With DTensors each step would pay DTensor's dispatch, which costs more
than the update of a small model and, for parameters on a mesh of four axes, minutes in the first
step (torch 2.13). It also allows parameters of several meshes in one call.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.tables.optimizer import OPTIMIZERS, OptimizerConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.registry import REGISTRY, unknown_name
from torchtitan_lite.distributed.device import Device
from torchtitan_lite.distributed.torch_compat import (
    as_dtensor,
    foreach_mul_,
    keep_compiler_out_of_optimizers,
    local_tensor,
    step_without_compiler,
)
from torchtitan_lite.optim.muon import Muon, Orthogonalization, sharded_orthogonalization
from torchtitan_lite.optim.newton_schulz import NewtonSchulz
from torchtitan_lite.optim.registered import registered_optimizer

_COUNT = "step"
"""The only slot that does not have its parameter's shape."""

EMA = "ema"
"""The slot with the moving average of a parameter."""

_LR_RATIO = "lr_ratio"
"""Key of a group: its learning rate relative to the schedule's."""

MakeOptimizer = Callable[[list[dict[str, Any]], list[nn.Parameter]], torch.optim.Optimizer]
"""Builds a torch optimizer, from groups with this rank's shard in place of each parameter, and the
parameters in the order of the groups."""

MakeOrthogonalization = Callable[
    [Sequence[nn.Parameter], NewtonSchulz, torch.device], Orthogonalization
]


def build_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    no_decay: Iterable[str],
    device: Device,
    *,
    no_muon: Iterable[str] = (),
    orthogonalization: MakeOrthogonalization = sharded_orthogonalization,
) -> "ShardedOptimizer":
    """Build the optimizer of the parameters of `model` that are not frozen, in groups with and
    without weight decay.

    `no_decay` are the model's patterns of parameters without weight decay, `no_muon` those of
    matrices that Muon leaves to AdamW. `orthogonalization` builds what Muon does to its matrices.

    Raises ConfigError if there is no such optimizer.
    """
    if problem := name_problem(config.name):
        raise ConfigError(problem)
    undecayed = () if config.decay_norms_biases_embeddings else tuple(no_decay)
    excluded = tuple(no_muon)
    by_muon: dict[bool, list[tuple[str, nn.Parameter]]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_of_muon = config.name == "Muon" and uses_muon(name, parameter, excluded)
        by_muon[is_of_muon].append((name, parameter))
    made: list[tuple[MakeOptimizer, list[dict[str, Any]]]] = []
    if by_muon[True]:
        groups = _groups(by_muon[True], undecayed, config.weight_decay)
        made.append((partial(_muon, config, device, orthogonalization), groups))
    if by_muon[False]:
        groups = _groups(by_muon[False], undecayed, config.weight_decay)
        if config.name == "Muon" and config.adamw_lr is not None:
            groups = [{**group, _LR_RATIO: config.adamw_lr / config.lr} for group in groups]
        made.append((partial(element_wise_optimizer, config, device), groups))
    return ShardedOptimizer(made, ema_decay=config.ema_decay)


def name_problem(name: str) -> str | None:
    """Describe why there is no optimizer of this name; None if there is one."""
    if name in OPTIMIZERS:
        if name in REGISTRY.optimizers:
            return f'optimizer.name = "{name}": that name is built in. Register another one.'
        return None
    if name in REGISTRY.optimizers:
        return None
    known = unknown_name("optimizer.name", name, [*OPTIMIZERS, *sorted(REGISTRY.optimizers)])
    return f"{known} Set experimental.custom_import to the module that registers another one."


def uses_muon(name: str, parameter: torch.Tensor, no_muon: Iterable[str]) -> bool:
    """Whether Muon updates a parameter: a matrix, or a stack of matrices along dim 0, that no
    pattern of `no_muon` matches."""
    return parameter.ndim in (2, 3) and not _matches(name, no_muon)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _groups(
    parameters: Iterable[tuple[str, nn.Parameter]], undecayed: Iterable[str], weight_decay: float
) -> list[dict[str, Any]]:
    by_decay: dict[float, list[nn.Parameter]] = {weight_decay: [], 0.0: []}
    for name, parameter in parameters:
        by_decay[0.0 if _matches(name, undecayed) else weight_decay].append(parameter)
    return [
        {"params": params, "weight_decay": decay} for decay, params in by_decay.items() if params
    ]


def element_wise_optimizer(
    config: OptimizerConfig,
    device: Device,
    groups: list[dict[str, Any]],
    parameters: list[nn.Parameter],
) -> torch.optim.Optimizer:
    """Build an optimizer whose updates are element-wise, from groups with this rank's shards."""
    del parameters
    how = {
        "for-loop": {"foreach": False, "fused": False},
        "foreach": {"foreach": True, "fused": False},
        "fused": {"foreach": False, "fused": device.fused_optimizer},
    }[config.implementation]
    if config.name in _ELEMENT_WISE:
        return _ELEMENT_WISE[config.name](groups, config, how)
    if config.name in REGISTRY.optimizers:
        return registered_optimizer(groups, config)
    raise AssertionError(f"optimizer.name = {config.name!r} has no entry in _ELEMENT_WISE")


def _adam(
    kind: type[torch.optim.Adam],
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    how: dict[str, bool],
) -> torch.optim.Optimizer:
    betas = (config.beta1, config.beta2)
    return kind(groups, lr=config.lr, betas=betas, eps=config.eps, **how)


def _sgd(
    groups: list[dict[str, Any]], config: OptimizerConfig, how: dict[str, bool]
) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.beta1, **how)


def _adagrad(
    groups: list[dict[str, Any]], config: OptimizerConfig, how: dict[str, bool]
) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(groups, lr=config.lr, eps=config.eps, **how)


_ELEMENT_WISE: Mapping[
    str,
    Callable[[list[dict[str, Any]], OptimizerConfig, dict[str, bool]], torch.optim.Optimizer],
] = {
    "AdamW": partial(_adam, torch.optim.AdamW),
    "Adam": partial(_adam, torch.optim.Adam),
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "Muon": partial(_adam, torch.optim.AdamW),
}
"""The optimizer of each name in OPTIMIZERS, of Muon that of the parameters it leaves to AdamW."""


def _muon(
    config: OptimizerConfig,
    device: Device,
    orthogonalization: MakeOrthogonalization,
    groups: list[dict[str, Any]],
    parameters: list[nn.Parameter],
) -> torch.optim.Optimizer:
    dtype = getattr(torch, config.muon_dtype)
    iteration = NewtonSchulz(steps=config.muon_ns_steps, dtype=dtype)
    return Muon(
        groups,
        [parameter.shape for parameter in parameters],
        orthogonalization(parameters, iteration, device.torch_device),
        lr=config.lr,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        adjust_lr=config.muon_adjust_lr,
        dtype=dtype,
        device=device.torch_device,
    )


class ShardedOptimizer:
    """The optimizer. Use `build_optimizer`."""

    def __init__(
        self,
        made: Sequence[tuple[MakeOptimizer, list[dict[str, Any]]]],
        *,
        ema_decay: float = 0.0,
    ) -> None:
        """`made` are optimizers to build, and their groups of parameters. `ema_decay` is that of
        the moving average of the parameters; 0: none."""
        self._ema_decay = ema_decay
        self._averages: dict[nn.Parameter, torch.Tensor] = {}
        self._parts: dict[nn.Parameter, nn.Parameter] = {
            parameter: nn.Parameter(local_tensor(parameter.detach()))
            if isinstance(parameter, DTensor)
            else parameter
            for _, groups in made
            for group in groups
            for parameter in group["params"]
        }
        # Their parameters are this rank's parts.
        self.inner: list[torch.optim.Optimizer] = []
        keep_compiler_out_of_optimizers()
        self._inner_of: dict[nn.Parameter, torch.optim.Optimizer] = {}
        for make, groups in made:
            parameters = [parameter for group in groups for parameter in group["params"]]
            of_parts = [
                {**group, "params": [self._parts[p] for p in group["params"]]} for group in groups
            ]
            inner = make(of_parts, parameters)
            self.inner.append(inner)
            self._inner_of |= dict.fromkeys((self._parts[p] for p in parameters), inner)
        self._is_state_checked = False
        # The scale is float32, so a kernel in float64 would lose precision.
        self._divides_gradients = all(
            group.get("fused") and part.dtype.itemsize <= torch.float32.itemsize
            for group in self._inner_groups()
            for part in group["params"]
        )
        self._counts_beside = {
            part: bool(group.get("fused") or group.get("capturable"))
            for group in self._inner_groups()
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
            foreach_mul_([gradient for gradient in gradients if gradient.numel()], gradient_factor)
            for inner in self.inner:
                step_without_compiler(inner)
        if not self._is_state_checked:
            self._check_state()
        self._update_averages(1 - self._ema_decay)

    def can_step_unless(self, device: torch.device) -> bool:
        """Return whether `step_unless` is supported with tensors on `device`."""
        # A skipped first step of SGD would leave its momentum uninitialized.
        is_adam = all(isinstance(inner, torch.optim.Adam) for inner in self.inner)
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
        self._update_averages((1 - self._ema_decay) * (1 - skip))

    def _begin_step(self, lr: float) -> list[torch.Tensor]:
        """Set the rates and the gradients of the inner optimizers. Returns the gradients."""
        for group in self._inner_groups():
            group["lr"] = lr * group.get(_LR_RATIO, 1.0)
        for parameter, part in self._parts.items():
            if part is not parameter:
                # FSDP may have moved the part since the last step.
                part.data = local_tensor(parameter)
                part.grad = None if parameter.grad is None else local_tensor(parameter.grad)
            if self._ema_decay and part not in self._averages:
                # At least float32: in bfloat16, small changes would round to nothing.
                dtype = torch.promote_types(part.dtype, torch.float32)
                self._averages[part] = part.detach().to(dtype, copy=True)
        return [part.grad for part in self._parts.values() if part.grad is not None]

    def _check_state(self) -> None:
        """Raise ConfigError for state of a registered optimizer that cannot be saved on one mesh
        and loaded on another."""
        self._is_state_checked = True
        for part, inner in self._inner_of.items():
            for slot, value in inner.state.get(part, {}).items():
                is_count = slot == _COUNT and isinstance(value, torch.Tensor) and not value.ndim
                is_like_part = isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (
                    part.shape,
                    part.dtype,
                )
                if not is_count and not is_like_part:
                    described = (
                        f"{value.dtype} {list(value.shape)}"
                        if isinstance(value, torch.Tensor)
                        else type(value).__name__
                    )
                    raise ConfigError(
                        f"The optimizer {type(inner).__name__} keeps {slot!r} ({described}) for a "
                        f"parameter of {part.dtype} {list(part.shape)}. Checkpoints hold tensors "
                        f'of the parameter\'s shape and data type, and "{_COUNT}", a tensor '
                        "without dimensions."
                    )

    def _update_averages(self, weight: float | torch.Tensor) -> None:
        """Move the averages towards the parameters by `weight`."""
        for part, average in self._averages.items():
            average.lerp_(part.to(average.dtype), weight)

    def _step(self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Step with what `torch.amp.GradScaler` hands to fused kernels: they divide the gradients
        as they read them, which saves a pass over them, and do nothing if `found_inf` is 1."""
        for inner in self.inner:
            inner.grad_scale = grad_scale  # type: ignore[attr-defined]
            inner.found_inf = found_inf  # type: ignore[attr-defined]
            step_without_compiler(inner)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter, part in self._parts.items():
            parameter.grad = part.grad = None

    def slots(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the optimizer state of a parameter by name, with the parameter's placements if it
        has its shape. Empty before the first step, except Adagrad's."""
        part = self._parts[parameter]
        slots = dict(self._inner_of[part].state.get(part, {}))
        if part in self._averages:
            slots[EMA] = self._averages[part]
        return {
            name: value if name == _COUNT else placed_like(value, parameter)
            for name, value in slots.items()
            if isinstance(value, torch.Tensor)
        }

    def allocate(self, parameter: nn.Parameter, slot: str, shape: tuple[int, ...]) -> None:
        """Create a slot of global `shape`, which most optimizers create in their first step, filled
        with zeros; keep an existing one."""
        part = self._parts[parameter]
        if slot == EMA:
            if self._ema_decay:
                dtype = torch.promote_types(part.dtype, torch.float32)
                zeros = torch.zeros_like(part, dtype=dtype, requires_grad=False)
                self._averages.setdefault(part, zeros)
            return
        state = self._inner_of[part].state[part]
        if slot in state:
            return
        if slot != _COUNT:
            value = torch.zeros_like(part, requires_grad=False)
        else:
            # A count of steps lies beside its parameter only for the fused kernels.
            device = part.device if self._counts_beside[part] else torch.device("cpu")
            value = torch.zeros(shape, dtype=torch.float32, device=device)
        state[slot] = value

    def _inner_groups(self) -> list[dict[str, Any]]:
        return [group for inner in self.inner for group in inner.param_groups]


def _device(parameter: nn.Parameter) -> torch.device:
    return local_tensor(parameter).device


def placed_like(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return a tensor like this rank's shard of a parameter, with the same placements. It shares
    memory: with CPU offload both are on the host, though the mesh is of devices."""
    if not isinstance(parameter, DTensor):
        return value
    return as_dtensor(value, parameter.device_mesh, parameter.placements, parameter.shape)
