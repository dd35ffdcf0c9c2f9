"""A model family in one file, as a user would add it to `models/`: blocks in which attention and a
plain GELU network read the same normalised input."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.nn.attention import AttentionMask, Backend, BlockContext
from torchtitan_lite.nn.decoder import OutputProjection
from torchtitan_lite.nn.draws import layer_keys
from torchtitan_lite.nn.grouped_query import GroupedQuery
from torchtitan_lite.nn.initialize import on_meta
from torchtitan_lite.nn.rope import Rope
from torchtitan_lite.nn.spec import InitRule, ModelCost, ModelSpec, ShardRule, TokenLoss


@dataclass(frozen=True, kw_only=True)
class ToyDims:
    dim: int = 30
    width: int = 44
    num_layers: int = 3
    num_heads: int = 4
    head_dim: int = 6
    vocab_size: int = 517
    attention_backend: Backend = "sdpa"
    document_mask: bool = True
    dropout: float = 0.0
    unused: bool = False
    """Blocks have a parameter that no gradient reaches."""

    @property
    def rope(self) -> Rope:
        return Rope(head_dim=self.head_dim, theta=10000.0)

    @property
    def attention(self) -> GroupedQuery:
        return GroupedQuery(
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            rotation=self.rope,
        )


FLAVORS = {"small": ToyDims(), "with_unused": ToyDims(unused=True)}


class Block(nn.Module):
    def __init__(self, dims: ToyDims) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dims.dim)
        self.attention = dims.attention.build(dims.dim, dims.attention_backend)
        self.mlp = nn.Sequential(
            nn.Linear(dims.dim, dims.width), nn.GELU(), nn.Linear(dims.width, dims.dim)
        )

        if dims.unused:
            self.unused = nn.Parameter(torch.empty(dims.width, dims.dim))

    def forward(self, x_BSD: torch.Tensor, context: BlockContext) -> torch.Tensor:
        normed_BSD = self.norm(x_BSD)
        return x_BSD + self.attention(normed_BSD, context) + self.mlp(normed_BSD)


class Toy(nn.Module):
    def __init__(self, dims: ToyDims) -> None:
        super().__init__()
        self.num_layers = dims.num_layers
        self.mask = AttentionMask(dims.attention_backend)
        self.rotary = dims.rope.build()
        self.embed = nn.Embedding(dims.vocab_size, dims.dim)
        self.blocks = nn.ModuleDict({str(i): Block(dims) for i in range(dims.num_layers)})
        self.head = OutputProjection(dims.dim, dims.vocab_size)

    def forward(
        self,
        tokens_BS: torch.Tensor,
        *,
        positions_BS: torch.Tensor,
        rng_keys_B: torch.Tensor,
        documents_BS: torch.Tensor | None = None,
        targets_BS: torch.Tensor | None = None,
        loss: TokenLoss | None = None,
    ) -> torch.Tensor:
        cos, sin = self.rotary(positions_BS)
        mask = self.mask(positions_BS, documents_BS)
        context = BlockContext(cos, sin, mask, positions_BS, rng_keys_B)
        x_BSD = tokens_BS if self.embed is None else F.silu(self.embed(tokens_BS))
        keys = layer_keys(rng_keys_B, self.num_layers)
        for layer, block in self.blocks.items():
            x_BSD = block(x_BSD, replace(context, rng_keys_B=keys[int(layer)]))
        return x_BSD if self.head is None else self.head(x_BSD, targets_BS, loss)


def cost(dims: ToyDims, seq_len: int) -> ModelCost:
    """Count the parameters, and 6 FLOPs per token for each but those of the embedding; attention
    adds its scores."""
    parameters = sum(one.numel() for one in on_meta(lambda: Toy(dims), torch.float32).parameters())
    embedding = dims.vocab_size * dims.dim
    scores = 6 * dims.num_layers * seq_len * dims.dim
    return ModelCost(
        num_params=parameters,
        num_active_params=parameters,
        flops_per_token=6 * (parameters - embedding) + scores,
    )


def model_spec(config: ModelConfig) -> ModelSpec:
    dims = flavor_dims(FLAVORS, config)
    return ModelSpec(
        name="toy",
        flavor=config.flavor,
        dims=dims,
        vocab_size=dims.vocab_size,
        num_layers=dims.num_layers,
        max_seq_len=1024,
        document_mask=dims.document_mask,
        build=lambda: Toy(dims),
        init=(
            InitRule(pattern="*norm.weight", kind="ones"),
            InitRule(pattern="*.bias", kind="zeros"),
            InitRule(pattern="*", kind="normal", std=0.05),
        ),
        shard_plan=(
            ShardRule(pattern="embed.weight", style="embedding"),
            ShardRule(pattern="blocks.*.attention.w[qkv].weight", style="columns"),
            ShardRule(pattern="blocks.*.attention.wo.weight", style="rows"),
            ShardRule(pattern="blocks.*.mlp.0.*", style="columns"),
            ShardRule(pattern="blocks.*.mlp.2.*", style="rows"),
            ShardRule(pattern="blocks.*.norm.*", style="sequence"),
            ShardRule(pattern="head.weight", style="output"),
        ),
        sharded_sizes=(("heads", dims.num_heads), ("features of the network", dims.width)),
        stage_units=("embed", *(f"blocks.{i}" for i in range(dims.num_layers)), "head"),
        width=dims.dim,
        attentions=(dims.attention.sharding,),
        blocks="blocks.*",
        extra_fsdp_units=("embed", "head"),
        cost=lambda seq_len: cost(dims, seq_len),
    )
