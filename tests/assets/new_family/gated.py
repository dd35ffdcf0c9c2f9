"""A family with an attention of its own, in one file: values are wider than keys, a gate multiplies
the result, and queries see a window of positions without rotary embedding. Its layers alternate
with those of grouped-query attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.nn.attention import (
    Attention,
    AttentionDims,
    Backend,
    BlockContext,
    States,
    causal_flops,
)
from torchtitan_lite.nn.decoder import DecoderLayer
from torchtitan_lite.nn.decoder_family import decoder_model_spec
from torchtitan_lite.nn.feed_forward import Dense
from torchtitan_lite.nn.grouped_query import GroupedQuery
from torchtitan_lite.nn.rope import Rope
from torchtitan_lite.nn.spec import AttentionSharding, InitRule, ModelSpec, ShardRule


@dataclass(frozen=True)
class Window:
    size: int

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (queries >= keys) & (queries - keys < self.size)


@dataclass(frozen=True, kw_only=True)
class Gated(AttentionDims):
    key_dim: int
    value_dim: int
    window: int

    @property
    def rope(self) -> None:
        return None

    @property
    def mask(self) -> Window:
        return Window(self.window)

    @property
    def sharding(self) -> AttentionSharding:
        return AttentionSharding(
            name="gated attention",
            num_heads=self.num_heads,
            state_width=self.num_heads * (self.key_dim + self.value_dim),
            rotations=("allgather", "ulysses"),
        )

    @property
    def sharded_sizes(self) -> tuple[tuple[str, int], ...]:
        return (("heads of gated attention", self.num_heads),)

    @property
    def shard_rules(self) -> tuple[ShardRule, ...]:
        return (
            ShardRule(pattern="w[qkvg].*", style="columns"),
            ShardRule(pattern="wo.weight", style="rows"),
        )

    @property
    def init_rules(self) -> tuple[InitRule, ...]:
        return (InitRule(pattern="wg.bias", kind="ones"),)

    @property
    def hugging_face(self) -> Mapping[str, str]:
        return {}

    def num_matrix_elements(self, dim: int) -> int:
        return dim * self.num_heads * (2 * self.key_dim + 3 * self.value_dim)

    def num_other_params(self) -> int:
        return self.num_heads * self.value_dim

    def flops_per_token(self, seq_len: int) -> int:
        return causal_flops(self.num_heads, self.key_dim + self.value_dim, seq_len)

    def build(self, dim: int, backend: Backend) -> "GatedAttention":
        return GatedAttention(dim, self, backend)


class GatedAttention(Attention):
    def __init__(self, dim: int, dims: Gated, backend: Backend) -> None:
        super().__init__(backend, dims.key_dim, scale=0.3)
        self.dims = dims
        keys, values = dims.num_heads * dims.key_dim, dims.num_heads * dims.value_dim
        self.wq = nn.Linear(dim, keys, bias=False)
        self.wk = nn.Linear(dim, keys, bias=False)
        self.wv = nn.Linear(dim, values, bias=False)
        self.wg = nn.Linear(dim, values)
        self.wo = nn.Linear(values, dim, bias=False)

    def project(self, x_BSD: torch.Tensor, context: BlockContext) -> tuple[Any, States]:
        def heads(projected: torch.Tensor, width: int) -> torch.Tensor:
            return projected.unflatten(-1, (-1, width)).transpose(1, 2)

        gate_BSF = self.wg(x_BSD).sigmoid()
        q_BHSE = heads(self.wq(x_BSD), self.dims.key_dim)
        k_BHSE = heads(self.wk(x_BSD), self.dims.key_dim)
        v_BHSG = heads(self.wv(x_BSD), self.dims.value_dim)
        return (q_BHSE, gate_BSF), (k_BHSE, v_BHSG)

    def attend(self, queries: Any, states: States, mask: Any) -> torch.Tensor:
        q_BHSE, gate_BSF = queries
        out_BHSG = self.kernel(q_BHSE, *states, mask)
        return self.wo(out_BHSG.transpose(1, 2).flatten(-2) * gate_BSF)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        heads = local_tensor(self.wk.weight).shape[0] // self.dims.key_dim
        return ((heads, self.dims.key_dim), (heads, self.dims.value_dim))


@dataclass(frozen=True, kw_only=True)
class GatedDims:
    dim: int = 30
    num_layers: int = 4
    vocab_size: int = 517
    norm_eps: float = 1e-6
    max_seq_len: int = 1024
    tied_embeddings: bool = False
    attention_backend: Backend = "sdpa"
    document_mask: bool = True
    dropout: float = 0.0

    @property
    def layers(self) -> list[DecoderLayer]:
        usual = GroupedQuery(
            num_heads=4, num_kv_heads=2, head_dim=6, rotation=Rope(head_dim=6, theta=10000.0)
        )
        own = Gated(num_heads=4, key_dim=5, value_dim=9, window=7)
        return [
            DecoderLayer(
                attention=own if number % 2 else usual,
                feed_forward=Dense(hidden_dim=44 + 4 * number),
            )
            for number in range(self.num_layers)
        ]


FLAVORS = {"small": GatedDims(), "without_documents": GatedDims(document_mask=False)}


def model_spec(config: ModelConfig) -> ModelSpec:
    return decoder_model_spec(flavor_dims(FLAVORS, config), name="gated", flavor=config.flavor)
