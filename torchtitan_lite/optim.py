"""The optimizer, its learning rate schedule, and the gradient's norm.

Invariant: the learning rate is a pure function of the number of committed steps, so a skipped
step leaves no trace in it. Layer: above mesh and spec.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.device import Device
from torchtitan_lite.log import logger
from torchtitan_lite.section import Section, at_least, below, between, only
from torchtitan_lite.torch_compat import foreach_mul_, foreach_norm


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["AdamW", "Adam", "SGD"] = "AdamW"
    """AdamW (arXiv:1711.05101), Adam (arXiv:1412.6980), or SGD with momentum `beta1`."""
    lr: Annotated[float, at_least(0)] = 8e-4
    """Highest learning rate, between warmup and decay."""
    beta1: Annotated[float, at_least(0), below(1)] = 0.9
    """Decay of the average of gradients."""
    beta2: Annotated[float, at_least(0), below(1)] = 0.95
    """Decay of the average of squared gradients."""
    eps: Annotated[float, at_least(0)] = 1e-8
    """Added to the root of the average of squared gradients."""
    weight_decay: Annotated[float, at_least(0)] = 0.1
    """Decay of the weights per step, times the learning rate."""
    decay_norms_biases_embeddings: bool = False
    """Let weight decay act on norms, biases and embeddings too (torchtitan: true)."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How the step is computed: one parameter after the other, several at once, or in one kernel.
    The result is the same up to rounding."""
    early_step_in_backward: Annotated[
        bool, only(False, "stepping in backward (it excludes clipping)")
    ] = False
    """Step each parameter as soon as its gradient is there."""


class LRSchedulerConfig(Section):
    """Warmup, stable phase and decay of the learning rate (WSD, arXiv:2404.06395)."""

    warmup_steps: Annotated[int, at_least(0)] = 200
    """Steps over which the learning rate rises linearly from 0."""
    total_steps: Annotated[int, at_least(1)] | None = None
    """Length of the schedule. Unset: `training.steps`."""
    decay_ratio: Annotated[float, between(0, 1)] | None = None
    """Share of the steps at the end over which the learning rate decays. Unset: it decays right
    after warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay, over its progress p: 1 - p, 1 - sqrt(p), or (1 + cos(pi p)) / 2."""
    min_lr_factor: Annotated[float, between(0, 1)] = 0.0
    """The learning rate ends at this share of `optimizer.lr`."""


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay:
    """The learning rate of each step, as plain data."""

    peak_lr: float
    warmup_steps: int
    decay_steps: int
    total_steps: int
    decay_type: str
    min_factor: float

    def lr(self, committed_steps: int) -> float:
        """Learning rate of the step that follows `committed_steps` committed ones. The decay would
        reach its end one step after the last, so no step is wasted at a rate of 0."""
        if committed_steps < self.warmup_steps:
            return self.peak_lr * (committed_steps + 1) / self.warmup_steps
        steps_into_decay = committed_steps - (self.total_steps - self.decay_steps)
        if steps_into_decay <= 0:
            return self.peak_lr
        progress = min(1.0, steps_into_decay / self.decay_steps) if self.decay_steps else 1.0
        shape = {
            "linear": 1 - progress,
            "sqrt": 1 - math.sqrt(progress),
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
        }[self.decay_type]
        return self.peak_lr * (self.min_factor + (1 - self.min_factor) * shape)


def build_schedule(
    config: LRSchedulerConfig, optimizer: OptimizerConfig, steps: int
) -> WarmupStableDecay:
    """The schedule of a run of `steps` steps. Phases longer than the run are cut, and a log line
    says to what."""
    total = config.total_steps or steps
    warmup = min(config.warmup_steps, total)
    if warmup < config.warmup_steps:
        logger.info(
            "lr_scheduler.warmup_steps = %d exceeds the schedule's %d steps; using %d.",
            config.warmup_steps,
            total,
            warmup,
        )
    decay = total - warmup
    if config.decay_ratio is not None:
        wanted = round(total * config.decay_ratio)
        if wanted > decay:
            logger.info(
                "warmup (%d) and decay (%d) exceed the schedule's %d steps; decay takes %d.",
                warmup,
                wanted,
                total,
                decay,
            )
        decay = min(wanted, decay)
    return WarmupStableDecay(
        peak_lr=optimizer.lr,
        warmup_steps=warmup,
        decay_steps=decay,
        total_steps=total,
        decay_type=config.decay_type,
        min_factor=config.min_lr_factor,
    )


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, no_decay: Iterable[str], device: Device
) -> torch.optim.Optimizer:
    """The optimizer over the parameters of `model`, in two groups: with and without decay.

    `no_decay` are the model's patterns of parameters that weight decay leaves alone.
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
    implementation = config.implementation
    if config.name == "SGD" and implementation == "fused":
        # DTensor has no sharding rule for the fused SGD kernel (torch 2.13).
        implementation = "foreach"
        logger.info('optimizer.implementation = "fused" does not exist for SGD; using "foreach".')
    how = {
        "for-loop": {"foreach": False, "fused": False},
        "foreach": {"foreach": True, "fused": False},
        "fused": {"foreach": False, "fused": device.fused_optimizer},
    }[implementation]
    if config.name == "SGD":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.beta1, **how)
    betas = (config.beta1, config.beta2)
    kind = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[config.name]
    return kind(groups, lr=config.lr, betas=betas, eps=config.eps, **how)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[tuple[torch.Tensor, int]]:
    """The part of each gradient that this rank holds, and how many ranks hold that same part."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
                # Without FSDP, the gradient of a weight that every tp rank holds whole is still
                # each rank's part of a sum.
                gradient = gradient.redistribute(placements=parameter.placements)
                parameter.grad = gradient
            holders = 1
            for axis, placement in enumerate(gradient.placements):
                if placement.is_replicate():
                    holders *= gradient.device_mesh.size(axis)
            found.append((gradient.to_local(), holders))
        else:
            found.append((gradient, 1))
    return found


def square_norm(gradients: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """This rank's share of the squared norm of the gradient: a 0-d float64 tensor whose sum over
    all ranks is the squared norm on any mesh, since a part that n ranks hold counts 1/n on each.

    `gradients` come from `local_gradients`.
    """
    by_holders: dict[int, list[torch.Tensor]] = {}
    for gradient, holders in gradients:
        by_holders.setdefault(holders, []).append(gradient)
    total = torch.zeros((), dtype=torch.float64)
    for holders, tensors in by_holders.items():
        total = total.to(tensors[0].device) + square_sum(tensors) / holders
    return total


def square_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of all elements, float64; each tensor's own sum is float32 at least,
    since in bfloat16 it would depend on how the tensors are cut."""
    return torch.stack([norm.double() for norm in foreach_norm(tensors)]).square().sum()


def scale_(gradients: list[tuple[torch.Tensor, int]], factor: float) -> None:
    """Multiply the gradients by `factor` in place."""
    foreach_mul_([gradient for gradient, _ in gradients if gradient.numel()], factor)
