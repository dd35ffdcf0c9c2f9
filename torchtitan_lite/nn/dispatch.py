"""Dispatch of tokens to their experts, and the weighted sum of the results."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Routing:
    """The router's choices."""

    experts_BSC: torch.Tensor
    """int64."""
    weights_BSC: torch.Tensor
    """float32 or wider."""
    counts_X: torch.Tensor
    """int64; tokens per expert."""


@dataclass(frozen=True)
class Dispatched:
    """Copies of tokens, sorted by expert and then by token."""

    tokens_ND: torch.Tensor
    counts_X: torch.Tensor
    """int64; copies per expert. Their sum is N."""
    places_TC: torch.Tensor
    """Position of each copy; N or more if dropped."""
    order_N: torch.Tensor
    """Copies (token * C + choice) in sorted order, dropped ones last."""


def dispatch(x_TD: torch.Tensor, routing: Routing, capacity_factor: float | None) -> Dispatched:
    """Copy each token once per chosen expert, sorted by expert."""
    num_choices, num_experts = routing.experts_BSC.shape[-1], len(routing.counts_X)
    experts_N, counts_X = routing.experts_BSC.flatten(), routing.counts_X
    if capacity_factor is not None:
        queue_BSC = _places_in_queue(routing.experts_BSC, num_experts)
        capacity = math.ceil(capacity_factor * queue_BSC[0].numel() / num_experts)
        # Dropped copies go behind the last expert's.
        experts_N = experts_N.masked_fill(queue_BSC.flatten() >= capacity, num_experts)
        counts_X = count_experts(experts_N[None], num_experts + 1)[0, :num_experts]
    order_N = experts_N.argsort(stable=True)
    places_TC = order_N.argsort().unflatten(0, (-1, num_choices))
    tokens_ND = take_rows(x_TD, order_N // num_choices, places_TC)
    if capacity_factor is not None:
        # The host waits here for the device: the number of remaining copies depends on the counts.
        tokens_ND = tokens_ND[: int(counts_X.sum())]
    return Dispatched(tokens_ND, counts_X, places_TC, order_N)


def weighted(tokens_ND: torch.Tensor, dispatched: Dispatched, routing: Routing) -> torch.Tensor:
    """Multiply each copy by its weight."""
    places_N = dispatched.places_TC.flatten()
    weights_N1 = take_rows(
        routing.weights_BSC.flatten()[:, None], dispatched.order_N, places_N[:, None]
    )
    return (tokens_ND * weights_N1[: len(tokens_ND)]).to(tokens_ND.dtype)


def _places_in_queue(experts_BSC: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count, for each copy, the earlier copies of the same sequence that chose the same expert."""
    queues_BN = experts_BSC.flatten(1)
    first_B1 = torch.arange(len(queues_BN), device=queues_BN.device)[:, None] * num_experts
    queues_N = (queues_BN + first_B1).flatten()
    order_N = queues_N.argsort(stable=True)
    sizes = count_experts(queues_N[None], len(queues_BN) * num_experts)[0]
    starts_N = (sizes.cumsum(0) - sizes)[queues_N]
    return (order_N.argsort() - starts_N).view_as(experts_BSC)


def combine(out_ND: torch.Tensor, dispatched: Dispatched, routing: Routing) -> torch.Tensor:
    """Return the weighted sum [T, D] of each token's results; dropped copies add nothing."""
    places_TC, order_N = dispatched.places_TC, dispatched.order_N
    num_dropped = len(order_N) - len(out_ND)
    if num_dropped:
        out_ND = F.pad(out_ND, (0, 0, 0, num_dropped))
    out_TCD = take_rows(out_ND, places_TC.flatten(), order_N[:, None]).unflatten(0, places_TC.shape)
    weights_T1C = routing.weights_BSC.flatten(0, 1)[:, None].to(out_TCD.dtype)
    # A matrix product, since it adds in float32 without float32 copies of its factors.
    return (weights_T1C @ out_TCD)[:, 0]


def count_experts(experts_BN: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count how often each expert occurs in each row, [B, X] int64."""
    zeros_BX = experts_BN.new_zeros(experts_BN.shape[0], num_experts)
    return zeros_BX.scatter_add(1, experts_BN, torch.ones_like(experts_BN))


def take_rows(x_RD: torch.Tensor, index_N: torch.Tensor, inverse_RC: torch.Tensor) -> torch.Tensor:
    """Return [N, D] whose row n is `x_RD[index_N[n]]`; `inverse_RC` holds the C places of each row.
    The gradient gathers by the inverse index: plain indexing would add gradients atomically, in an
    order that differs from run to run."""
    return _Taken.apply(x_RD, index_N, inverse_RC)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: torch.Tensor, index_N: torch.Tensor, inverse_RC: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse_RC)
        return x_RD.index_select(0, index_N)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse_RC,) = ctx.saved_tensors
        grad_RCD = grads[0].index_select(0, inverse_RC.flatten()).unflatten(0, inverse_RC.shape)
        return grad_RCD.sum(1), None, None
