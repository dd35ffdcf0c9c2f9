"""Mixture of experts (MoE) in place of a feed-forward block: route, dispatch, experts, combine.

No token is dropped unless a capacity is set, and then deterministically. The routing of a token
depends on that token and the balancing bias alone. `experts` gets copies of tokens sorted by expert
and their counts, and returns results in the same order, so that expert parallelism wraps it alone.
Layer: above errors; `nn.feed_forward`, `nn.grouped_linear`, `nn.rows`.

Beside the legend in `spec.py`:
    X experts   C choices of a token   N = T*C copies of tokens, sorted by expert (fewer where a
    capacity drops some)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.nn.feed_forward import FeedForward
from torchtitan_lite.nn.grouped_linear import grouped_linear
from torchtitan_lite.nn.rows import take_rows


@dataclass(frozen=True, kw_only=True)
class MoEDims:
    """Dimensions of one block, and its routing."""

    num_experts: int
    top_k: int
    """Experts per token."""
    hidden_dim: int
    """Width of one expert."""
    shared_hidden_dim: int = 0
    """Total width of the shared experts. 0: none."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_weights: bool = True
    """Whether the weights of a token's experts are normalized to sum to 1."""
    route_scale: float = 1.0
    """Factor of the weights, after normalization."""
    balance_loss_weight: float = 0.0
    """Factor of the sequence-level balance loss."""
    bias_update_rate: float = 0.0
    """Change of the balancing bias per step (auxiliary-loss-free balancing). 0: no update."""
    capacity_factor: float | None = None
    """Multiple of the fair share of a sequence's tokens that an expert takes; later ones are
    dropped. Unset: no token is dropped."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"top_k ({self.top_k}) must be between 1 and num_experts ({self.num_experts})."
            )
        if self.hidden_dim < 1 or self.shared_hidden_dim < 0:
            raise ConfigError(
                f"hidden_dim ({self.hidden_dim}) must be positive, and shared_hidden_dim "
                f"({self.shared_hidden_dim}) positive or 0."
            )
        if self.bias_update_rate < 0:
            raise ConfigError(f"bias_update_rate ({self.bias_update_rate}) must not be below 0.")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ConfigError(
                f"capacity_factor ({self.capacity_factor}) must be above 0; leave it out to drop "
                "no token."
            )

    def num_params(self, dim: int) -> int:
        """Return the parameters of one block of model width `dim`."""
        return self._matrices(dim, self.num_experts)

    def num_active_params(self, dim: int) -> int:
        """Return the parameters of one block that a token passes through."""
        return self._matrices(dim, self.top_k)

    def _matrices(self, dim: int, num_experts: int) -> int:
        widths = num_experts * self.hidden_dim + self.shared_hidden_dim
        return dim * self.num_experts + 3 * dim * widths


class MoE(nn.Module):
    """The weighted sum of a token's experts, plus the shared experts, if any."""

    def __init__(self, dim: int, dims: MoEDims) -> None:
        super().__init__()
        self.capacity_factor = dims.capacity_factor
        self.router = Router(dim, dims)
        self.experts = Experts(dim, dims.hidden_dim, dims.num_experts)
        self.shared = FeedForward(dim, dims.shared_hidden_dim) if dims.shared_hidden_dim else None

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        routing = self.router(x_BSD)
        dispatched = dispatch(x_BSD.flatten(0, 1), routing, self.capacity_factor)
        out_ND = self.experts(dispatched.tokens_ND, dispatched.counts_X)
        out_BSD = combine(out_ND, dispatched, routing).view_as(x_BSD)
        return out_BSD if self.shared is None else out_BSD + self.shared(x_BSD)


@dataclass(frozen=True)
class Routing:
    """The router's choices."""

    experts_BSC: torch.Tensor
    """int64."""
    weights_BSC: torch.Tensor
    """float32 or wider."""
    counts_X: torch.Tensor
    """int64; tokens per expert."""


class Router(nn.Module):
    """The router: chooses the experts of each token by its scores, and counts the choices."""

    expert_bias_X: torch.Tensor
    """Added to the scores for the choice only, not to the weights."""
    load_X: torch.Tensor
    """int64; tokens per expert in the backward passes since it was last zeroed."""
    sum_over_sequence: Callable[[torch.Tensor], torch.Tensor]
    """Sums counts over the ranks that share a sequence."""

    def __init__(self, dim: int, dims: MoEDims) -> None:
        super().__init__()
        self.dims = dims
        self.sum_over_sequence = lambda counts_BX: counts_BX
        self.gate = nn.Linear(dim, dims.num_experts, bias=False)
        # On the CPU even while the model is built on the meta device: they have no other source.
        bias_X = torch.zeros(dims.num_experts, dtype=torch.float32, device="cpu")
        load_X = torch.zeros(dims.num_experts, dtype=torch.int64, device="cpu")
        self.register_buffer("expert_bias_X", bias_X)
        self.register_buffer("load_X", load_X, persistent=False)

    def forward(self, x_BSD: torch.Tensor) -> Routing:
        """Route every token."""
        scores_BSX = self._scores(self.gate(x_BSD))
        biased_BSX = scores_BSX.detach() + self.expert_bias_X
        experts_BSC = biased_BSX.topk(self.dims.top_k, dim=-1).indices
        weights_BSC = scores_BSX.gather(-1, experts_BSC)
        if self.dims.normalize_weights:
            # Sigmoids of very negative logits may all be zero.
            tiny = torch.finfo(weights_BSC.dtype).tiny
            weights_BSC = weights_BSC / weights_BSC.sum(-1, keepdim=True).clamp_min(tiny)
        weights_BSC = weights_BSC * self.dims.route_scale
        counts_BX = _count(experts_BSC.flatten(1), self.dims.num_experts)
        counts_X = counts_BX.sum(0)
        if self.training:
            weights_BSC = _Counted.apply(weights_BSC, counts_X, self.load_X)
            if self.dims.balance_loss_weight:
                counts_BX = self.sum_over_sequence(counts_BX)
                loss = self.dims.balance_loss_weight * balance_loss(scores_BSX, counts_BX)
                weights_BSC = _WithLoss.apply(weights_BSC, loss)
        return Routing(experts_BSC, weights_BSC, counts_X)

    @torch.no_grad()
    def update_expert_bias(self, counts_X: torch.Tensor) -> None:
        """Update the bias of each expert by `dims.bias_update_rate` towards its fair share of
        `counts_X`, the tokens of a step per expert (auxiliary-loss-free balancing,
        arXiv:2408.15664)."""
        # Whole numbers throughout, so that every rank finds the same signs.
        shortage_X = counts_X.sum() - counts_X * len(counts_X)
        self.expert_bias_X.add_(shortage_X.sign(), alpha=self.dims.bias_update_rate)

    def _scores(self, logits_BSX: torch.Tensor) -> torch.Tensor:
        """Return scores, at least float32: in bfloat16 good experts would often tie."""
        logits_BSX = logits_BSX.to(torch.promote_types(logits_BSX.dtype, torch.float32))
        return logits_BSX.softmax(-1) if self.dims.score == "softmax" else logits_BSX.sigmoid()


class Experts(nn.Module):
    """The SwiGLU of every expert, w2(silu(w1 x) * w3 x), with stacked matrices."""

    WIDTH_DIMS = {"w1": 1, "w2": 2, "w3": 1}
    """The dim of each stack over the features of an expert; dim 0 is over experts."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))

    def forward(self, tokens_ND: torch.Tensor, counts_X: torch.Tensor) -> torch.Tensor:
        """Run the experts on tokens sorted by expert, with their counts. Returns [N, D] in the same
        order."""
        return grouped_swiglu(tokens_ND, self.w1, self.w2, self.w3, counts_X)


def grouped_swiglu(
    tokens_ND: torch.Tensor,
    w1_XFD: torch.Tensor,
    w2_XDF: torch.Tensor,
    w3_XFD: torch.Tensor,
    counts_X: torch.Tensor,
) -> torch.Tensor:
    """`Experts.forward` with given stacks. With a shard of the features F the result is a partial
    sum."""
    hidden_NF = F.silu(grouped_linear(tokens_ND, w1_XFD, counts_X))
    hidden_NF = hidden_NF * grouped_linear(tokens_ND, w3_XFD, counts_X)
    return grouped_linear(hidden_NF, w2_XDF, counts_X)


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
        counts_X = _count(experts_N[None], num_experts + 1)[0, :num_experts]
    order_N = experts_N.argsort(stable=True)
    places_TC = order_N.argsort().unflatten(0, (-1, num_choices))
    tokens_ND = take_rows(x_TD, order_N // num_choices, places_TC)
    if capacity_factor is not None:
        # The host waits here for the device: the number of remaining copies depends on the counts.
        tokens_ND = tokens_ND[: int(counts_X.sum())]
    return Dispatched(tokens_ND, counts_X, places_TC, order_N)


def _places_in_queue(experts_BSC: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count, for each copy, the earlier copies of the same sequence that chose the same expert."""
    queues_BN = experts_BSC.flatten(1)
    first_B1 = torch.arange(len(queues_BN), device=queues_BN.device)[:, None] * num_experts
    queues_N = (queues_BN + first_B1).flatten()
    order_N = queues_N.argsort(stable=True)
    sizes = _count(queues_N[None], len(queues_BN) * num_experts)[0]
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


def balance_loss(scores_BSX: torch.Tensor, counts_BX: torch.Tensor) -> torch.Tensor:
    """Return the sequence-level balance loss, summed over tokens (arXiv:2412.19437, equations 17 to
    20): 1 per token under even load, more where loaded experts also have high scores. `counts_BX`
    are of entire sequences; the scores may be a shard of them, whose losses sum to the entire loss.
    """
    loads_BX = counts_BX.to(scores_BSX.dtype) * scores_BSX.shape[-1]
    loads_BX = loads_BX / counts_BX.sum(-1, keepdim=True)
    shares_BSX = scores_BSX / scores_BSX.sum(-1, keepdim=True)
    return (loads_BX * shares_BSX.sum(1)).sum()


def _count(experts_BN: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count how often each expert occurs in each row, [B, X] int64."""
    zeros_BX = experts_BN.new_zeros(experts_BN.shape[0], num_experts)
    return zeros_BX.scatter_add(1, experts_BN, torch.ones_like(experts_BN))


class _Counted(torch.autograd.Function):
    """The identity, which counts tokens in backward: forward runs twice with activation
    checkpointing, and without backward in validation."""

    @staticmethod
    def forward(
        ctx: Any, weights_BSC: torch.Tensor, counts_X: torch.Tensor, load_X: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(counts_X)
        ctx.load_X = load_X
        return weights_BSC.view_as(weights_BSC)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _add_load(ctx.load_X, ctx.saved_tensors[0], grads[0])
        return grads[0], None, None


# An opaque operator that takes a gradient, so that the compiler leaves the sum in the backward: it
# moved a plain one into the forward, where of several microbatches the last one's would win.
@torch.library.custom_op("torchtitan_lite::add_load", mutates_args=("load_X",))
def _add_load(load_X: torch.Tensor, counts_X: torch.Tensor, grad_BSC: torch.Tensor) -> None:
    load_X.add_(counts_X)


class _WithLoss(torch.autograd.Function):
    """The identity, which adds the gradient of an auxiliary loss."""

    @staticmethod
    def forward(ctx: Any, weights_BSC: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return weights_BSC.view_as(weights_BSC)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], torch.ones_like(ctx.saved_tensors[0])
