"""Mixture of experts (MoE) in place of a feed-forward block: route, dispatch, experts, combine.

No token is dropped unless a capacity is set, and then deterministically. The routing of a token
depends on that token and the balancing bias alone. `experts` gets copies of tokens sorted by expert
and their counts, and returns results in the same order, so that expert parallelism wraps it alone.

Beside the legend in `spec.py`: X experts C choices of a token N = T*C copies of tokens, sorted by
expert (fewer where a capacity drops some)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.nn.dispatch import Routing, combine, count_experts, dispatch, weighted
from torchtitan_lite.nn.feed_forward import Dense
from torchtitan_lite.nn.grouped_linear import grouped_linear
from torchtitan_lite.nn.spec import InitRule, ShardRule


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
    shared_gate: bool = False
    """Whether the sigmoid of a projection of the token multiplies the shared experts' output."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_weights: bool = True
    """Whether the weights of a token's experts are normalized to sum to 1."""
    route_scale: float = 1.0
    """Factor of the weights, after normalization."""
    weights_inputs: bool = False
    """Whether the weights multiply the experts' inputs, and not their outputs."""
    num_groups: int = 1
    """Groups of consecutive experts, of which a token may choose from `top_groups`."""
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    """Score of a group: the sum of its two best experts' scores, biased as for the choice of
    experts (arXiv:2412.19437, section 2.1.2), or the best one (arXiv:2405.04434, section 2.2.2).
    """
    swiglu_limit: float | None = None
    """Set: the router and the experts have biases, and the experts' SwiGLU is clamped to this limit
    (gpt-oss)."""
    balance_loss_weight: float = 0.0
    """Factor of the sequence-level balance loss."""
    z_loss_weight: float = 0.0
    """Factor of the router's z-loss."""
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
        self._check_groups()
        if self.hidden_dim < 1 or self.shared_hidden_dim < 0:
            raise ConfigError(
                f"hidden_dim ({self.hidden_dim}) must be positive, and shared_hidden_dim "
                f"({self.shared_hidden_dim}) positive or 0."
            )
        if self.shared_gate and not self.shared_hidden_dim:
            raise ConfigError(
                "shared_gate = true needs shared experts, and shared_hidden_dim is 0. Set it to "
                "their width, or leave shared_gate out."
            )
        if self.swiglu_limit is not None and self.swiglu_limit <= 0:
            raise ConfigError(f"swiglu_limit ({self.swiglu_limit}) must be above 0.")
        for name in ("balance_loss_weight", "z_loss_weight", "bias_update_rate"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"{name} ({value}) must not be below 0.")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ConfigError(
                f"capacity_factor ({self.capacity_factor}) must be above 0; leave it out to drop "
                "no token."
            )

    def _check_groups(self) -> None:
        size, rest = divmod(self.num_experts, max(1, self.num_groups))
        if self.num_groups < 1 or rest:
            raise ConfigError(
                f"num_groups ({self.num_groups}) must be positive and divide num_experts "
                f"({self.num_experts})."
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(
                f"top_groups ({self.top_groups}) must be between 1 and num_groups "
                f"({self.num_groups})."
            )
        if self.top_groups * size < self.top_k:
            raise ConfigError(
                f"top_groups ({self.top_groups}) groups of {size} experts have fewer than top_k "
                f"({self.top_k}). Raise top_groups, or lower top_k or num_groups."
            )
        if self.num_groups > 1 and self.group_score == "top2" and size < 2:
            raise ConfigError(
                f"num_groups ({self.num_groups}) leaves one expert per group, and group_score = "
                '"top2" needs two. Lower num_groups, or set group_score = "max".'
            )

    @property
    def shard_rules(self) -> tuple[ShardRule, ...]:
        """Styles of tensor parallelism; expert parallelism shards the experts."""
        # The router works on the tokens that its rank has, and the choice is the same anywhere.
        kinds = ("weight",) if self.swiglu_limit is None else ("weight", "bias")
        router = (ShardRule(pattern=f"router.gate.{kind}", style="sequence") for kind in kinds)
        shared = Dense(hidden_dim=self.shared_hidden_dim).shard_rules
        gate = (ShardRule(pattern="shared_gate.weight", style="sequence"),)
        return (
            *router,
            *(gate if self.shared_gate else ()),
            *(
                replace(rule, pattern=f"shared.{rule.pattern}")
                for rule in shared
                if self.shared_hidden_dim
            ),
        )

    @property
    def sharded_sizes(self) -> tuple[tuple[str, int], ...]:
        """Sizes that the degree of tensor parallelism must divide."""
        shared = ("features of the shared experts", self.shared_hidden_dim)
        return (shared,) if self.shared_hidden_dim else ()

    @property
    def init_rules(self) -> tuple[InitRule, ...]:
        """Biases begin with zero."""
        if self.swiglu_limit is None:
            return ()
        names = ("router.gate.bias", "experts.gate_up_bias", "experts.down_bias")
        return tuple(InitRule(pattern=name, kind="zeros") for name in names)

    @property
    def residual_matrices(self) -> tuple[str, ...]:
        """Parameters whose initial values shrink with depth."""
        routed = ("experts.w2", "experts.w3") if self.swiglu_limit is None else ("experts.down",)
        shared = Dense(hidden_dim=self.shared_hidden_dim).residual_matrices
        return (*routed, *(f"shared.{name}" for name in shared if self.shared_hidden_dim))

    def build(self, dim: int) -> "MoE":
        """Build the module."""
        return MoE(dim, self)

    def num_params(self, dim: int) -> int:
        """Return the parameters of one block of model width `dim`."""
        return self._matrices(dim, self.num_experts)

    def num_active_params(self, dim: int) -> int:
        """Return the parameters of one block that a token passes through."""
        return self._matrices(dim, self.top_k)

    def _matrices(self, dim: int, num_experts: int) -> int:
        widths = num_experts * self.hidden_dim + self.shared_hidden_dim
        biases = 0
        if self.swiglu_limit is not None:
            biases = self.num_experts + num_experts * (2 * self.hidden_dim + dim)
        gates = self.num_experts + self.shared_gate
        return dim * gates + 3 * dim * widths + biases


class MoE(nn.Module):
    """The weighted sum of a token's experts, plus the shared experts, if any."""

    def __init__(self, dim: int, dims: MoEDims) -> None:
        super().__init__()
        self.capacity_factor = dims.capacity_factor
        self.weights_inputs = dims.weights_inputs
        self.router = Router(dim, dims)
        self.experts = (
            SwiGLUExperts(dim, dims.hidden_dim, dims.num_experts)
            if dims.swiglu_limit is None
            else ClampedExperts(dim, dims.hidden_dim, dims.num_experts, dims.swiglu_limit)
        )
        shared = Dense(hidden_dim=dims.shared_hidden_dim)
        self.shared = shared.build(dim) if dims.shared_hidden_dim else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if dims.shared_gate else None

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        routing = self.router(x_BSD)
        dispatched = dispatch(x_BSD.flatten(0, 1), routing, self.capacity_factor)
        tokens_ND = dispatched.tokens_ND
        if self.weights_inputs:
            tokens_ND = weighted(tokens_ND, dispatched, routing)
            routing = replace(routing, weights_BSC=torch.ones_like(routing.weights_BSC))
        out_ND = self.experts(tokens_ND, dispatched.counts_X)
        out_BSD = combine(out_ND, dispatched, routing).view_as(x_BSD)
        if self.shared is None:
            return out_BSD
        shared_BSD = self.shared(x_BSD)
        if self.shared_gate is not None:
            shared_BSD = shared_BSD * self.shared_gate(x_BSD).sigmoid()
        return out_BSD + shared_BSD


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
        self.gate = nn.Linear(dim, dims.num_experts, bias=dims.swiglu_limit is not None)
        # On the CPU even while the model is built on the meta device: they have no other source.
        bias_X = torch.zeros(dims.num_experts, dtype=torch.float32, device="cpu")
        load_X = torch.zeros(dims.num_experts, dtype=torch.int64, device="cpu")
        self.register_buffer("expert_bias_X", bias_X)
        self.register_buffer("load_X", load_X, persistent=False)

    def forward(self, x_BSD: torch.Tensor) -> Routing:
        """Route every token."""
        logits_BSX = self.gate(x_BSD)
        # At least float32: in bfloat16 good experts would often tie.
        logits_BSX = logits_BSX.to(torch.promote_types(logits_BSX.dtype, torch.float32))
        is_softmax = self.dims.score == "softmax"
        scores_BSX = logits_BSX.softmax(-1) if is_softmax else logits_BSX.sigmoid()
        biased_BSX = scores_BSX.detach() + self.expert_bias_X
        biased_BSX = self._in_best_groups(biased_BSX)
        experts_BSC = biased_BSX.topk(self.dims.top_k, dim=-1).indices
        weights_BSC = scores_BSX.gather(-1, experts_BSC)
        if self.dims.normalize_weights:
            # Sigmoids of very negative logits may all be zero.
            tiny = torch.finfo(weights_BSC.dtype).tiny
            weights_BSC = weights_BSC / weights_BSC.sum(-1, keepdim=True).clamp_min(tiny)
        weights_BSC = weights_BSC * self.dims.route_scale
        counts_BX = count_experts(experts_BSC.flatten(1), self.dims.num_experts)
        counts_X = counts_BX.sum(0)
        if self.training:
            weights_BSC = _Counted.apply(weights_BSC, counts_X, self.load_X)
            if self.dims.balance_loss_weight:
                counts_BX = self.sum_over_sequence(counts_BX)
                loss = self.dims.balance_loss_weight * balance_loss(scores_BSX, counts_BX)
                weights_BSC = _WithLoss.apply(weights_BSC, loss)
            if self.dims.z_loss_weight:
                loss = self.dims.z_loss_weight * router_z_loss(logits_BSX)
                weights_BSC = _WithLoss.apply(weights_BSC, loss)
        return Routing(experts_BSC, weights_BSC, counts_X)

    def _in_best_groups(self, scores_BSX: torch.Tensor) -> torch.Tensor:
        """Replace the scores of experts outside of each token's best groups by -inf."""
        if self.dims.num_groups == 1:
            return scores_BSX
        # Y: the experts of a group.
        scores_BSGY = scores_BSX.unflatten(-1, (self.dims.num_groups, -1))
        best = 2 if self.dims.group_score == "top2" else 1
        groups_BSG = scores_BSGY.topk(best, dim=-1).values.sum(-1)
        chosen = groups_BSG.topk(self.dims.top_groups, dim=-1).indices
        is_out_BSG = torch.ones_like(groups_BSG, dtype=torch.bool).scatter(-1, chosen, False)
        return scores_BSGY.masked_fill(is_out_BSG[..., None], -torch.inf).flatten(-2)

    @torch.no_grad()
    def update_expert_bias(self, counts_X: torch.Tensor) -> None:
        """Update the bias of each expert by `dims.bias_update_rate` towards its fair share of
        `counts_X`, the tokens of a step per expert (auxiliary-loss-free balancing,
        arXiv:2408.15664)."""
        # Whole numbers throughout, so that every rank finds the same signs.
        shortage_X = counts_X.sum() - counts_X * len(counts_X)
        self.expert_bias_X.add_(shortage_X.sign(), alpha=self.dims.bias_update_rate)


class Experts(nn.Module, ABC):
    """A kind of experts, with stacked parameters."""

    WIDTH_DIMS: ClassVar[Mapping[str, int]]
    """Name -> the dim of each parameter that expert tensor parallelism shards; dim 0 is over
    experts."""

    def forward(self, tokens_ND: torch.Tensor, counts_X: torch.Tensor) -> torch.Tensor:
        """Run the experts on tokens sorted by expert, with their counts. Returns [N, D] in the same
        order."""
        return self.compute(
            tokens_ND, [getattr(self, name) for name in self.WIDTH_DIMS], counts_X, (0, 1)
        )

    @abstractmethod
    def compute(
        self,
        tokens_ND: torch.Tensor,
        stacks: Sequence[torch.Tensor],
        counts_X: torch.Tensor,
        shard: tuple[int, int],
    ) -> torch.Tensor:
        """`forward` with the parameters `stacks`, in the order of `WIDTH_DIMS`, of which `shard`
        (k, n) is part k of n. With n above 1 the result is a partial sum."""


class SwiGLUExperts(Experts):
    """The SwiGLU of every expert, w2(silu(w1 x) * w3 x)."""

    WIDTH_DIMS = {"w1": 1, "w2": 2, "w3": 1}

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))

    def compute(
        self,
        tokens_ND: torch.Tensor,
        stacks: Sequence[torch.Tensor],
        counts_X: torch.Tensor,
        shard: tuple[int, int],
    ) -> torch.Tensor:
        w1_XFD, w2_XDF, w3_XFD = stacks
        hidden_NF = F.silu(grouped_linear(tokens_ND, w1_XFD, counts_X))
        hidden_NF = hidden_NF * grouped_linear(tokens_ND, w3_XFD, counts_X)
        return grouped_linear(hidden_NF, w2_XDF, counts_X)


class ClampedExperts(Experts):
    """The experts of gpt-oss: with biases, and a SwiGLU whose gate and values are clamped, whose
    gate is steeper, and whose values are raised by 1. Gate and values alternate, as in its
    releases, so that a shard of the features has both."""

    WIDTH_DIMS = {"gate_up": 1, "gate_up_bias": 1, "down": 2, "down_bias": 1}
    _STEEPNESS = 1.702

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim, dim))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.down_bias = nn.Parameter(torch.empty(num_experts, dim))

    def compute(
        self,
        tokens_ND: torch.Tensor,
        stacks: Sequence[torch.Tensor],
        counts_X: torch.Tensor,
        shard: tuple[int, int],
    ) -> torch.Tensor:
        gate_up_XGD, gate_up_bias_XG, down_XDF, down_bias_XE = stacks
        both_NG = grouped_linear(tokens_ND, gate_up_XGD, counts_X)
        both_NG = both_NG + _of_rows(gate_up_bias_XG, counts_X, len(tokens_ND))
        gate_NF = both_NG[:, 0::2].clamp(max=self.limit)
        values_NF = both_NG[:, 1::2].clamp(-self.limit, self.limit)
        hidden_NF = gate_NF * torch.sigmoid(gate_NF * self._STEEPNESS) * (values_NF + 1)
        out_ND = grouped_linear(hidden_NF, down_XDF, counts_X)
        # A shard adds the bias of some output features, so that the sum has each once.
        number, count = shard
        dim, width = tokens_ND.shape[1], down_bias_XE.shape[1]
        first = min(number * -(-dim // count), dim)
        bias_XD = F.pad(down_bias_XE, (first, dim - first - width))
        return out_ND + _of_rows(bias_XD, counts_X, len(tokens_ND))


def _of_rows(bias_XO: torch.Tensor, counts_X: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the bias of each row's expert, [N, O]."""
    return bias_XO.repeat_interleave(counts_X, dim=0, output_size=num_rows)


def balance_loss(scores_BSX: torch.Tensor, counts_BX: torch.Tensor) -> torch.Tensor:
    """Return the sequence-level balance loss, summed over tokens (arXiv:2412.19437, equations 17 to
    20): 1 per token under even load, more where loaded experts also have high scores. `counts_BX`
    are of entire sequences; the scores may be a shard of them, whose losses sum to the entire loss.
    """
    loads_BX = counts_BX.to(scores_BSX.dtype) * scores_BSX.shape[-1]
    loads_BX = loads_BX / counts_BX.sum(-1, keepdim=True)
    shares_BSX = scores_BSX / scores_BSX.sum(-1, keepdim=True)
    return (loads_BX * shares_BSX.sum(1)).sum()


def router_z_loss(logits_BSX: torch.Tensor) -> torch.Tensor:
    """Return the router's z-loss, summed over tokens (arXiv:2202.08906, equation 5): the squared
    log-sum-exp of a token's logits, which keeps them small."""
    return logits_BSX.logsumexp(-1).square().sum()


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
