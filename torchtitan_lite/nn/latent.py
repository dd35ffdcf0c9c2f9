"""Multi-head latent attention (MLA, arXiv:2405.04434, section 2.1): keys and values of all heads
are projections of one latent per position, beside a rotated key that all heads share.

Training projects latents to keys and values. The KV cache holds latents; a single new token attends
to them in the absorbed form, in which the projections are applied to queries and results, once per
query instead of once per key (section 2.1.2 there).

Beside the legend in `spec.py`: R width of a latent N width of a head without rotation P cached
positions L width of the cached state, the latent and the rotated key
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.nn.attention import (
    AcrossHeads,
    Attention,
    AttentionDims,
    Backend,
    BlockContext,
    States,
    causal_flops,
)
from torchtitan_lite.nn.rope import Rope, YarnScaling, rotate
from torchtitan_lite.nn.spec import AttentionSharding, ShardRule, TorchtitanKey


@dataclass(frozen=True, kw_only=True)
class Latent(AttentionDims):
    """Dimensions of multi-head latent attention."""

    q_lora_rank: int | None
    """Width of the queries' latent. None: queries are projections of the input."""
    kv_lora_rank: int
    """Width of the latent of keys and values."""
    nope_head_dim: int
    """Width of the part of a query or key that is not rotated."""
    v_head_dim: int
    """Width of a value."""
    rotation: Rope
    """Rotary embedding of the rest of a query and of the shared key, in adjacent pairs."""
    norm_eps: float = 1e-6
    """Of the norms of latents."""

    def __post_init__(self) -> None:
        sizes = {
            "num_heads": self.num_heads,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.nope_head_dim,
            "v_head_dim": self.v_head_dim,
            "q_lora_rank": 1 if self.q_lora_rank is None else self.q_lora_rank,
        }
        wrong = [f"{name} ({value})" for name, value in sizes.items() if value < 1]
        if wrong:
            raise ConfigError(f"Latent attention needs sizes above 0: {', '.join(wrong)}.")
        if self.v_head_dim > self.head_dim:
            raise ConfigError(
                f"Latent attention needs values (v_head_dim = {self.v_head_dim}) that are at most "
                f"as wide as keys (qk_nope_head_dim + qk_rope_head_dim = {self.head_dim})."
            )

    @property
    def head_dim(self) -> int:
        """Width of a query."""
        return self.nope_head_dim + self.rotation.head_dim

    @property
    def scale(self) -> float:
        """Factor of scores."""
        scaling = self.rotation.scaling
        magnitude = scaling.score_magnitude if isinstance(scaling, YarnScaling) else 1.0
        return self.head_dim**-0.5 * magnitude * magnitude

    @property
    def rope(self) -> Rope:
        return self.rotation

    @property
    def sharding(self) -> AttentionSharding:
        return AttentionSharding(
            name="latent attention",
            num_heads=self.num_heads,
            state_width=self.kv_lora_rank + self.rotation.head_dim,
        )

    @property
    def sharded_sizes(self) -> tuple[tuple[str, int], ...]:
        return (("heads", self.num_heads),)

    @property
    def shard_rules(self) -> tuple[ShardRule, ...]:
        # Latents are computed on shards of the sequence and gathered: they are narrower than the
        # hidden states.
        query = (
            (ShardRule(pattern="wq.weight", style="local_columns"),)
            if self.q_lora_rank is None
            else (
                ShardRule(pattern="wq_a.weight", style="sequence"),
                ShardRule(pattern="wq_b.weight", style="local_columns"),
            )
        )
        return (
            *query,
            ShardRule(pattern="wkv_a.weight", style="sequence"),
            ShardRule(pattern="wkv_b.weight", style="local_columns"),
            ShardRule(pattern="wo.weight", style="rows"),
        )

    @property
    def hugging_face(self) -> Mapping[str, str]:
        query = (
            {"wq": "q_proj"}
            if self.q_lora_rank is None
            else {"wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj"}
        )
        others = {
            "wkv_a": "kv_a_proj_with_mqa",
            "kv_norm": "kv_a_layernorm",
            "wkv_b": "kv_b_proj",
            "wo": "o_proj",
        }
        return {
            f"{ours}.weight": f"self_attn.{their}.weight"
            for ours, their in (query | others).items()
        }

    def torchtitan_keys(self) -> tuple[TorchtitanKey, ...]:
        """Return torchtitan's names in a layer: the same."""
        return tuple(TorchtitanKey(name=name, theirs=(name,)) for name in self.hugging_face)

    def num_matrix_elements(self, dim: int) -> int:
        query_width = self.num_heads * self.head_dim
        query = (
            dim * query_width
            if self.q_lora_rank is None
            else self.q_lora_rank * (dim + query_width)
        )
        latent = dim * (self.kv_lora_rank + self.rotation.head_dim)
        heads = self.num_heads * (self.nope_head_dim + self.v_head_dim)
        return query + latent + self.kv_lora_rank * heads + self.num_heads * self.v_head_dim * dim

    def num_other_params(self) -> int:
        return self.kv_lora_rank + (self.q_lora_rank or 0)

    def flops_per_token(self, seq_len: int) -> int:
        return causal_flops(self.num_heads, self.head_dim + self.v_head_dim, seq_len)

    def build(self, dim: int, backend: Backend) -> "LatentAttention":
        return LatentAttention(dim, self, backend)


class LatentAttention(Attention):
    """Attention whose states are [B, S, L]: normalized latents, then the shared rotated keys."""

    def __init__(self, dim: int, dims: Latent, backend: Backend) -> None:
        super().__init__(backend, dims.head_dim, dims.scale)
        self.dims = dims
        query_width = dims.num_heads * dims.head_dim
        if dims.q_lora_rank is None:
            self.wq = nn.Linear(dim, query_width, bias=False)
        else:
            self.wq_a = nn.Linear(dim, dims.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(dims.q_lora_rank, eps=dims.norm_eps)
            self.wq_b = nn.Linear(dims.q_lora_rank, query_width, bias=False)
        self.wkv_a = nn.Linear(dim, dims.kv_lora_rank + dims.rotation.head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(dims.kv_lora_rank, eps=dims.norm_eps)
        self.wkv_b = nn.Linear(
            dims.kv_lora_rank, dims.num_heads * (dims.nope_head_dim + dims.v_head_dim), bias=False
        )
        self.wo = nn.Linear(dims.num_heads * dims.v_head_dim, dim, bias=False)
        self.across_heads = AcrossHeads()

    def project(self, x_BSD: torch.Tensor, context: BlockContext) -> tuple[torch.Tensor, States]:
        dims, angles = self.dims, (context.cos_BS1E, context.sin_BS1E)
        if dims.q_lora_rank is None:
            q_BSF = self.wq(self.across_heads(x_BSD))
        else:
            q_BSF = self.wq_b(self.across_heads(self.q_norm(self.wq_a(x_BSD))))
        q_BSHE = q_BSF.unflatten(-1, (-1, dims.head_dim))
        plain_BSHN, turning = q_BSHE.split([dims.nope_head_dim, dims.rotation.head_dim], dim=-1)
        q_BSHE = torch.cat([plain_BSHN, rotate(turning, *angles, adjacent=True)], dim=-1)
        latent_BSR, key = self.wkv_a(x_BSD).split(self._widths, dim=-1)
        # One gather for both.
        state_BSL = self.across_heads(torch.cat([self.kv_norm(latent_BSR), key], dim=-1))
        latent_BSR, key = state_BSL.split(self._widths, dim=-1)
        key = rotate(key[:, :, None], *angles, adjacent=True)[:, :, 0]
        return q_BSHE.transpose(1, 2), (torch.cat([latent_BSR, key], dim=-1),)

    def attend(self, queries: torch.Tensor, states: States, mask: object) -> torch.Tensor:
        latent_BSR, key = states[0].split(self._widths, dim=-1)
        both = self.wkv_b(latent_BSR).unflatten(-1, (-1, self._head_width))
        plain_BSHN, v_BSHG = both.split([self.dims.nope_head_dim, self.dims.v_head_dim], dim=-1)
        shared = key[:, :, None].expand(-1, -1, both.shape[2], -1)
        k_BSHE = torch.cat([plain_BSHN, shared], dim=-1)
        out_BHSG = self.kernel(queries, k_BSHE.transpose(1, 2), v_BSHG.transpose(1, 2), mask)
        return self.wo(out_BHSG.transpose(1, 2).flatten(-2))

    def attend_cached(
        self, queries: torch.Tensor, states: States, mask: torch.Tensor
    ) -> torch.Tensor:
        """The absorbed form for one query per sequence: it meets latents, in their width. For more,
        as in a prompt, projecting each latent once costs less than wider scores."""
        if queries.shape[2] > 1:
            return self.attend(queries, states, mask)
        state_BPL = states[0]
        weight_HFR = local_tensor(self.wkv_b.weight).unflatten(0, (-1, self._head_width))
        key_weight_HNR, value_weight_HGR = weight_HFR.split(
            [self.dims.nope_head_dim, self.dims.v_head_dim], dim=1
        )
        plain_BHSN, turned = queries.split(
            [self.dims.nope_head_dim, self.dims.rotation.head_dim], dim=-1
        )
        q_BHSL = torch.cat([plain_BHSN @ key_weight_HNR, turned], dim=-1)
        # All heads share the state, so they are queries of one head: no copy of it per head.
        num_heads = q_BHSL.shape[1]
        out_BSR = F.scaled_dot_product_attention(
            q_BHSL.flatten(1, 2),
            state_BPL,
            state_BPL[..., : self.dims.kv_lora_rank],
            attn_mask=mask.expand(-1, num_heads, -1, -1).flatten(1, 2),
            scale=self.scale,
        )
        out_BHSG = out_BSR.unflatten(1, (num_heads, -1)) @ value_weight_HGR.mT
        return self.wo(out_BHSG.transpose(1, 2).flatten(-2))

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((sum(self._widths),),)

    @property
    def _widths(self) -> tuple[int, int]:
        """The parts of a state."""
        return self.dims.kv_lora_rank, self.dims.rotation.head_dim

    @property
    def _head_width(self) -> int:
        """Rows of `wkv_b` per head: those of its keys, then those of its values."""
        return self.dims.nope_head_dim + self.dims.v_head_dim
