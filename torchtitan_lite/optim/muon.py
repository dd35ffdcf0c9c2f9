"""Muon (https://kellerjordan.github.io/posts/muon/, arXiv:2502.16982) over shards of matrices.

The momentum lies as the parameter, so it is checkpointed, resharded and healed like any slot. Only
the update moves: it is rounded to the dtype of the iteration before, which is what the iteration
does first.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.distributed.redistribute import Layout, TensorSpec
from torchtitan_lite.distributed.redistribute.planning.cost import DEFAULT_OPTIONS
from torchtitan_lite.optim.newton_schulz import NewtonSchulz
from torchtitan_lite.optim.orthogonalization import ShardedOrthogonalization, assign_matrices

AdjustLR = Literal["original", "match_rms_adamw"]

MOMENTUM = "momentum_buffer"
"""The slot of a parameter, as `torch.optim.Muon` names it."""


class Orthogonalization(Protocol):
    """Replaces matrices by orthogonal ones."""

    def run(self, shards: Sequence[torch.Tensor]) -> None:
        """Replace this rank's shards of all matrices, in place."""
        ...


class Muon(torch.optim.Optimizer):
    """The optimizer of `torch.optim.Muon`, for this rank's shards of matrices and of stacks of
    matrices, which are treated matrix by matrix."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        shapes: Sequence[torch.Size],
        orthogonalization: Orthogonalization,
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        adjust_lr: AdjustLR,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`shapes` are those of the entire parameters, in the order of the groups, which
        `orthogonalization` knows by number. It takes shards in `dtype`, on `device`."""
        super().__init__(groups, {"lr": lr, "momentum": momentum, "nesterov": nesterov})
        self._orthogonalization = orthogonalization
        self._dtype, self._device = dtype, device
        self._lr_factors = [_lr_factor(adjust_lr, shape[-2], shape[-1]) for shape in shapes]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters that have a gradient; the gradients are invalid afterwards. All
        ranks must call it, also one without gradients."""
        parameters = [(group, p) for group in self.param_groups for p in group["params"]]
        updates = [
            torch.empty(p.shape, dtype=self._dtype, device=self._device) for _, p in parameters
        ]
        for (group, parameter), update in zip(parameters, updates, strict=True):
            if parameter.grad is None:
                update.zero_()
            else:
                direction = self._direction(group, parameter, parameter.grad)
                update.copy_(direction, non_blocking=True)
        self._orthogonalization.run(updates)
        arrived = [
            update.to(parameter.device, non_blocking=True)
            for (_, parameter), update in zip(parameters, updates, strict=True)
        ]
        if any(update.device != self._device for update in arrived):
            # Offloaded parameters are on the host, which waits once.
            torch.cuda.current_stream(self._device).synchronize()
        for (group, parameter), update, factor in zip(
            parameters, arrived, self._lr_factors, strict=True
        ):
            if parameter.grad is not None:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * factor)

    def _direction(
        self, group: dict[str, Any], parameter: nn.Parameter, gradient: torch.Tensor
    ) -> torch.Tensor:
        """Update the momentum. Returns what is orthogonalized, in place of the gradient."""
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(gradient)
        average, momentum = state[MOMENTUM], group["momentum"]
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp_(average, momentum) if group["nesterov"] else average


def _lr_factor(adjust_lr: AdjustLR, rows: int, columns: int) -> float:
    """Return the factor of the learning rate of a matrix, whose updates have singular values of
    about 1: "original" is for tall matrices, and "match_rms_adamw" gives the elements of an update
    a root mean square of 0.2, as AdamW's have (arXiv:2502.16982, section 2.2)."""
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def sharded_orthogonalization(
    parameters: Sequence[nn.Parameter], iteration: NewtonSchulz, device: torch.device
) -> ShardedOrthogonalization:
    """Return the orthogonalization of parameters by the ranks that hold their shards. `parameters`
    are the same on all of these ranks, and of two dims or, as stacks, of three."""
    assignment = assign_matrices(
        specs_of(parameters), iteration, costs=DEFAULT_OPTIONS.costs_on(device)
    )
    return ShardedOrthogonalization(assignment, iteration, rank=_rank(), device=device)


def specs_of(parameters: Sequence[nn.Parameter]) -> list[TensorSpec]:
    """Return how parameters are sharded."""
    return [
        TensorSpec.from_dtensor(parameter, "order")
        if isinstance(parameter, DTensor)
        # This rank is alone: on several, every parameter is a DTensor.
        else TensorSpec(Layout.on_holder(_rank()), tuple(parameter.shape), parameter.dtype)
        for parameter in parameters
    ]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
