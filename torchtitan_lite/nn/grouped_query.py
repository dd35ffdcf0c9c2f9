"""Grouped-query attention (arXiv:2305.13245), over all earlier positions, a window or a chunk of
them, with or without sinks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.nn.attention import (
    Attention,
    AttentionDims,
    Backend,
    BlockContext,
    Causal,
    ChunkWindow,
    HeadWeights,
    MaskKind,
    SlidingWindow,
    States,
    causal_flops,
)
from torchtitan_lite.nn.attention_scores import SoftCapKernel
from torchtitan_lite.nn.attention_sinks import SinkKernel
from torchtitan_lite.nn.norm import RMS_NORM, AllHeadsNorm, NormKind
from torchtitan_lite.nn.rope import Rope, rotate
from torchtitan_lite.nn.spec import (
    AttentionSharding,
    InitRule,
    ShardRule,
    TorchtitanKey,
    linear_parameters,
)

_Queries = tuple[torch.Tensor, torch.Tensor | None]
"""Queries [B, H, S, E] and their gates [B, S, H*E], if they have gates."""


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Growth of queries with their position, for attention without positions in long contexts
    (arXiv:2501.19399): 1 + weight * ln(1 + floor((position + 1) / interval))."""

    weight: float
    interval: int

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ConfigError(f"The interval of temperatures ({self.interval}) must be at least 1.")

    def of(self, positions_BS: torch.Tensor) -> torch.Tensor:
        """Return the factor of each position, [B, S], float32."""
        turns = torch.floor((positions_BS.float() + 1.0) / self.interval)
        return torch.log1p(turns) * self.weight + 1.0


@dataclass(frozen=True, kw_only=True)
class GroupedQuery(AttentionDims):
    """Dimensions of grouped-query attention."""

    num_kv_heads: int
    """Heads of keys and values, each shared by equally many query heads."""
    head_dim: int
    rotation: Rope | None
    """Rotary embedding of all of a head, or of its first numbers; None: positions matter only for
    the mask."""
    rotates_adjacent: bool = False
    """Whether the two numbers of a rotated pair are adjacent, and not half a head apart."""
    qk_norm_eps: float | None = None
    """Set: each head of queries and keys is normalized before its rotation (arXiv:2302.05442)."""
    qk_norm: NormKind = RMS_NORM
    """Of these norms."""
    norms_all_heads: bool = False
    """Whether all heads of queries, and all of keys, are normalized together by their root mean
    square."""
    norms_rotated: bool = False
    """Whether these norms follow the rotation."""
    gated: bool = False
    """Whether the query projection has a gate for each number of a head, behind its query, whose
    sigmoid multiplies the head's output (arXiv:2505.06708)."""
    bias: bool = False
    """Whether the projections of queries, keys and values have biases."""
    out_bias: bool = False
    """Whether the projection of the output has a bias."""
    window: int | None = None
    """Positions that a query attends to, up to its own. Unset: all earlier ones."""
    chunk: int | None = None
    """Set: a query attends to positions of its own chunk only, which are this many."""
    rotated_norm_eps: float | None = None
    """Set: each head of queries and keys is divided by its root mean square after its rotation."""
    temperature: Temperature | None = None
    """Set: queries grow with their position."""
    scale: float | None = None
    """Factor of the scores. Unset: 1 / sqrt(head_dim)."""
    projection_clip: float | None = None
    """Set: the bound of the projected queries, keys and values, beyond which they are clamped."""
    soft_cap: float | None = None
    """Set: the bound of the scores, to which tanh maps them."""
    fused: bool = False
    """Whether the projections of queries, keys and values are one, which has those of a head
    together."""
    has_sinks: bool = False
    """Whether each head has a sink (`nn.attention_sinks`)."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} ({getattr(self, name)}) must be at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})."
            )
        for name, size in (("window", self.window), ("chunk", self.chunk)):
            if size is not None and size < 1:
                raise ConfigError(f"The attention {name} ({size}) must be at least 1.")
        if self.soft_cap is not None and (self.soft_cap <= 0 or self.has_sinks):
            raise ConfigError(
                f"The soft cap of scores ({self.soft_cap}) must be above 0, in attention without "
                "sinks."
            )
        is_clipped = self.projection_clip is not None
        if self.fused and (self.num_heads != self.num_kv_heads or self.gated or is_clipped):
            raise ConfigError(
                f"A fused projection needs as many heads of keys and values ({self.num_kv_heads}) "
                f"as of queries ({self.num_heads}), and neither gates nor projection_clip."
            )
        if is_clipped and (self.gated or self.qk_norm_eps is not None):
            raise ConfigError(
                f"projection_clip ({self.projection_clip}) needs attention without gates and "
                "without norms of queries and keys."
            )
        if self.window is not None and self.chunk is not None:
            raise ConfigError(
                f"An attention has a window ({self.window}) or a chunk ({self.chunk}), not both."
            )

    @property
    def mask(self) -> MaskKind:
        if self.chunk is not None:
            return ChunkWindow(self.chunk)
        return Causal() if self.window is None else SlidingWindow(self.window)

    @property
    def rope(self) -> Rope | None:
        return self.rotation

    @property
    def sharding(self) -> AttentionSharding:
        name = "grouped-query attention"
        if self.window is not None:
            name = f"attention in a window of {self.window} positions"
        elif self.chunk is not None:
            name = f"attention in chunks of {self.chunk} positions"
        width = 2 * self.num_kv_heads * self.head_dim
        if self.has_sinks:
            # The kernels of the others do not return what sinks need.
            return AttentionSharding(
                name=f"{name} with sinks",
                num_heads=self.num_heads,
                state_width=width,
                rotations=("allgather",),
            )
        if self.soft_cap is not None:
            name = f"{name} with a soft cap of scores"
        if (self.window, self.chunk, self.soft_cap) != (None, None, None):
            return AttentionSharding(
                name=name,
                num_heads=self.num_heads,
                state_width=width,
                rotations=("allgather", "ulysses"),
            )
        return AttentionSharding(name=name, num_heads=self.num_heads, state_width=width)

    @property
    def sharded_sizes(self) -> tuple[tuple[str, int], ...]:
        return (("key/value heads", self.num_kv_heads),)

    @property
    def shard_rules(self) -> tuple[ShardRule, ...]:
        style = "all_heads" if self.norms_all_heads else "heads"
        norms = (
            ShardRule(pattern=f"[qk]_norm.{kind}", style=style) for kind in self._norm_parameters
        )
        sinks = (ShardRule(pattern="sinks.weight", style="head_weights"),)
        inward, outward = linear_parameters(self.bias), linear_parameters(self.out_bias)
        return (
            *(ShardRule(pattern=f"{self._inward}.{kind}", style="columns") for kind in inward),
            *(ShardRule(pattern=f"wo.{kind}", style="rows") for kind in outward),
            *(sinks if self.has_sinks else ()),
            *norms,
        )

    @property
    def init_rules(self) -> tuple[InitRule, ...]:
        has_bias = self.bias or self.out_bias
        return (InitRule(pattern="w*.bias", kind="zeros"),) if has_bias else ()

    @property
    def hugging_face(self) -> Mapping[str, str]:
        names = {
            f"{name}.{kind}": f"self_attn.{name.removeprefix('w')}_proj.{kind}"
            for name in (*self.projections, "wo")
            for kind in linear_parameters(self.out_bias if name == "wo" else self.bias)
        }
        if self.has_sinks:
            names["sinks.weight"] = "self_attn.sinks"
        for kind in self._norm_parameters:
            names |= {f"{x}_norm.{kind}": f"self_attn.{x}_norm.{kind}" for x in "qk"}
        return names

    @property
    def projections(self) -> Mapping[str, int]:
        """The linear layers that read the input, and the number of their output features."""
        queries = self.num_heads * (2 if self.gated else 1)
        heads = {"wq": queries, "wk": self.num_kv_heads, "wv": self.num_kv_heads}
        if self.fused:
            heads = {"wqkv": 3 * self.num_heads}
        return {name: count * self.head_dim for name, count in heads.items()}

    def torchtitan_keys(self, *, pairs: bool) -> tuple[TorchtitanKey, ...]:
        """Return torchtitan's names in a layer. `pairs`: it rotates adjacent numbers there."""
        heads = {"q": self.num_heads, "k": self.num_kv_heads, "v": 0} if pairs else {}
        norms = ("q_norm.weight", "k_norm.weight") if self.qk_norm_eps is not None else ()
        biases = tuple(f"w{x}.bias" for x in self._biased)
        sinks = (TorchtitanKey(name="sinks.weight", theirs=("sinks",)),) if self.has_sinks else ()
        return (
            *sinks,
            *(
                TorchtitanKey(
                    name=f"w{letter}.weight",
                    theirs=(f"w{letter}.weight", f"qkv_linear.w{letter}.weight"),
                    rope_heads=heads.get(letter, 0),
                )
                for letter in "qkv"
            ),
            *(TorchtitanKey(name=name, theirs=(name,)) for name in ("wo.weight", *biases, *norms)),
        )

    def num_matrix_elements(self, dim: int) -> int:
        return dim * (sum(self.projections.values()) + self.num_heads * self.head_dim)

    def num_other_params(self) -> int:
        heads = self.num_heads + self.num_kv_heads if self.norms_all_heads else 2
        norms = heads * self.head_dim * len(self._norm_parameters)
        sinks = self.num_heads if self.has_sinks else 0
        return norms + sinks

    def num_biases(self, dim: int) -> int:
        return self.bias * sum(self.projections.values()) + self.out_bias * dim

    @property
    def _inward(self) -> str:
        """Pattern of the projections of queries, keys and values."""
        return "wqkv" if self.fused else "w[qkv]"

    @property
    def _norm_parameters(self) -> tuple[str, ...]:
        """Names of the parameters of a norm of queries or keys."""
        if self.qk_norm_eps is None:
            return ()
        return ("weight",) if self.norms_all_heads else self.qk_norm.parameters

    @property
    def _biased(self) -> str:
        """Letters of the projections with biases."""
        return "qkv" * self.bias + "o" * self.out_bias

    def flops_per_token(self, seq_len: int) -> int:
        # On average, half of a causal sequence is visible, and a whole window.
        visible = min(seq_len, self.chunk or seq_len, 2 * (self.window or seq_len))
        return causal_flops(self.num_heads, 2 * self.head_dim, visible)

    def build(self, dim: int, backend: Backend) -> "GroupedQueryAttention":
        return GroupedQueryAttention(dim, self, backend)


class GroupedQueryAttention(Attention):
    """Attention whose states are keys and values [B, K, S, E]."""

    wq: nn.Linear
    wk: nn.Linear
    wv: nn.Linear
    wqkv: nn.Linear
    """In place of the others, if they are fused."""

    def __init__(self, dim: int, dims: GroupedQuery, backend: Backend) -> None:
        # Before `make_kernel`.
        self._has_sinks, self._soft_cap = dims.has_sinks, dims.soft_cap
        self._adjacent, self._temperature = dims.rotates_adjacent, dims.temperature
        self._norms_rotated = dims.norms_rotated
        self._rotated_norm_eps = dims.rotated_norm_eps
        self._gated, self._fused, self._clip = dims.gated, dims.fused, dims.projection_clip
        # Kernels divide by the root.
        self._query_factor = 1.0 if dims.scale is None else dims.scale * dims.head_dim**0.5
        super().__init__(backend, dims.head_dim)
        for name, width in dims.projections.items():
            self.add_module(name, nn.Linear(dim, width, bias=dims.bias))
        self.wo = nn.Linear(dims.num_heads * dims.head_dim, dim, bias=dims.out_bias)
        self.sinks = HeadWeights(dims.num_heads) if dims.has_sinks else None
        self.q_norm = _head_norm(dims, dims.num_heads)
        self.k_norm = _head_norm(dims, dims.num_kv_heads)

    def project(self, x_BSD: torch.Tensor, context: BlockContext) -> tuple[_Queries, States]:
        q_BSHE, k_BSKE, v_BSKE, gate_BSF = self._projected(x_BSD)
        q_BSHE = self._positioned(q_BSHE, self.q_norm, context)
        k_BSKE = self._positioned(k_BSKE, self.k_norm, context)
        if self._temperature is not None:
            factors_BS = self._temperature.of(context.positions_BS)
            q_BSHE = (q_BSHE * factors_BS[..., None, None]).to(q_BSHE.dtype)
        if self._query_factor != 1.0:
            q_BSHE = q_BSHE * self._query_factor
        queries = q_BSHE.transpose(1, 2), gate_BSF
        return queries, (k_BSKE.transpose(1, 2), v_BSKE.transpose(1, 2))

    def _projected(self, x_BSD: torch.Tensor) -> tuple[Any, ...]:
        """Return queries, keys and values, [B, S, heads, E], and gates if there are any."""
        if self._fused:
            return *self.wqkv(x_BSD).unflatten(-1, (-1, 3 * self.head_dim)).chunk(3, dim=-1), None
        q_BSHE, k_BSKE, v_BSKE = (
            linear(x_BSD).unflatten(-1, (-1, self.head_dim * copies))
            for linear, copies in ((self.wq, 1 + self._gated), (self.wk, 1), (self.wv, 1))
        )
        if (clip := self._clip) is not None:
            q_BSHE, k_BSKE, v_BSKE = (x.clamp(-clip, clip) for x in (q_BSHE, k_BSKE, v_BSKE))
        if not self._gated:
            return q_BSHE, k_BSKE, v_BSKE, None
        q_BSHE, gate_BSHE = q_BSHE.chunk(2, dim=-1)
        return q_BSHE, k_BSKE, v_BSKE, gate_BSHE.flatten(-2)

    def _positioned(
        self, x_BSHE: torch.Tensor, norm: nn.Module, context: BlockContext
    ) -> torch.Tensor:
        """Return heads normalized and rotated."""
        x_BSHE = x_BSHE if self._norms_rotated else norm(x_BSHE)
        x_BSHE = rotate(x_BSHE, context.cos_BS1E, context.sin_BS1E, adjacent=self._adjacent)
        x_BSHE = norm(x_BSHE) if self._norms_rotated else x_BSHE
        if self._rotated_norm_eps is None:
            return x_BSHE
        return F.rms_norm(x_BSHE, x_BSHE.shape[-1:], eps=self._rotated_norm_eps)

    def attend(self, queries: _Queries, states: States, mask: object) -> torch.Tensor:
        q_BHSE, gate_BSF = queries
        sinks = () if self.sinks is None else (self.sinks(),)
        out_BSF = self.kernel(q_BHSE, *states, mask, *sinks).transpose(1, 2).flatten(-2)
        return self.wo(out_BSF if gate_BSF is None else out_BSF * gate_BSF.sigmoid())

    def make_kernel(self, backend: Backend) -> nn.Module:
        if self._has_sinks:
            return SinkKernel(backend)
        if self._soft_cap is not None:
            return SoftCapKernel(backend, self._soft_cap)
        return super().make_kernel(backend)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        # This rank's heads under tensor parallelism.
        linear, copies = (self.wqkv, 3) if self._fused else (self.wk, 1)
        heads = local_tensor(linear.weight).shape[0] // (copies * self.head_dim)
        return ((heads, self.head_dim), (heads, self.head_dim))


def _head_norm(dims: GroupedQuery, num_heads: int) -> nn.Module:
    if dims.qk_norm_eps is None:
        return nn.Identity()
    if dims.norms_all_heads:
        return AllHeadsNorm(num_heads, dims.head_dim, dims.qk_norm_eps)
    return dims.qk_norm.build(dims.head_dim, dims.qk_norm_eps)
