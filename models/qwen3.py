"""Qwen3 (arXiv:2505.09388), dense and mixture of experts: dimensions, flavors, module and initial
weights.

Layer: above nn and spec.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models import ModelConfig, flavor_dims
from torchtitan_lite.nn.attention import Attention, Backend
from torchtitan_lite.nn.decoder import Decoder, DecoderBlock
from torchtitan_lite.nn.decoder_hugging_face import (
    MoEKeys,
    decoder_hugging_face_keys,
    decoder_values,
    ignored_keys,
    is_known_routing,
    read_decoder,
)
from torchtitan_lite.nn.decoder_spec import (
    decoder_cost,
    decoder_init,
    decoder_shard_plan,
    decoder_stage_units,
    decoder_torchtitan_keys,
)
from torchtitan_lite.nn.feed_forward import FeedForward
from torchtitan_lite.nn.hugging_face_config import HuggingFaceConfig, differences, rope_values
from torchtitan_lite.nn.moe import MoE, MoEDims
from torchtitan_lite.nn.rope import RotaryEmbedding
from torchtitan_lite.spec import HuggingFaceModel, ModelCost, ModelSpec

_DENSE, _MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
ARCHITECTURES = (_DENSE, _MOE)
"""The models of transformers that `dims_of_hugging_face` builds."""
_EXPERTS = MoEKeys("mlp", {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})


@dataclass(frozen=True, kw_only=True)
class Qwen3Dims:
    """The dimensions of one flavor. Its blocks have either a feed-forward of width `hidden_dim`
    or the experts of `moe`."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int | None = None
    moe: MoEDims | None = None
    vocab_size: int = 151936
    head_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    max_seq_len: int = 40960
    tied_embeddings: bool = False
    attention_backend: Backend = "sdpa"
    document_mask: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})."
            )
        if self.head_dim % 2:
            raise ConfigError(f"The width of a head ({self.head_dim}) must be even for RoPE.")
        if (self.hidden_dim is None) == (self.moe is None):
            raise ConfigError(
                f"Give either hidden_dim ({self.hidden_dim}), for dense blocks, or moe "
                f"({self.moe}), for experts."
            )


_DEBUG = Qwen3Dims(
    dim=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    hidden_dim=384,
    vocab_size=2048,
    head_dim=32,
    document_mask=True,
)

FLAVORS = {
    "debugmodel": _DEBUG,
    # A token passes through as many parameters as in debugmodel, of 3.1 M.
    "debugmodel_moe": replace(
        _DEBUG, hidden_dim=None, moe=MoEDims(num_experts=8, top_k=2, hidden_dim=192)
    ),
    "0.6B": Qwen3Dims(
        dim=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        hidden_dim=3072,
        tied_embeddings=True,
    ),
    "1.7B": Qwen3Dims(
        dim=2048,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        hidden_dim=6144,
        tied_embeddings=True,
    ),
    "4B": Qwen3Dims(
        dim=2560,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=9728,
        tied_embeddings=True,
    ),
    "8B": Qwen3Dims(dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, hidden_dim=12288),
    "14B": Qwen3Dims(dim=5120, num_layers=40, num_heads=40, num_kv_heads=8, hidden_dim=17408),
    "32B": Qwen3Dims(dim=5120, num_layers=64, num_heads=64, num_kv_heads=8, hidden_dim=25600),
    "30B-A3B": Qwen3Dims(
        dim=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        moe=MoEDims(num_experts=128, top_k=8, hidden_dim=768),
    ),
    "235B-A22B": Qwen3Dims(
        dim=4096,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        moe=MoEDims(num_experts=128, top_k=8, hidden_dim=1536),
    ),
}


def model_spec(config: ModelConfig) -> ModelSpec:
    """The spec of `config.flavor`, with the attention that `config` asks for."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)


def spec_of(dims: Qwen3Dims, flavor: str) -> ModelSpec:
    """The spec of any dimensions."""
    inside = "feed_forward" if dims.moe is None else "feed_forward.experts"
    suffix = ".weight" if dims.moe is None else ""
    return ModelSpec(
        name="qwen3",
        flavor=flavor,
        dims=dims,
        vocab_size=dims.vocab_size,
        num_layers=dims.num_layers,
        max_seq_len=dims.max_seq_len,
        document_mask=dims.document_mask,
        build=lambda: build(dims),
        init=decoder_init(
            dim=dims.dim,
            num_layers=dims.num_layers,
            residual_matrices=(
                "attention.wo.weight",
                f"{inside}.w2{suffix}",
                f"{inside}.w3{suffix}",
            ),
            tied_embeddings=dims.tied_embeddings,
        ),
        shard_plan=decoder_shard_plan(qk_norm=True, moe=dims.moe),
        num_heads=dims.num_heads,
        num_experts=0 if dims.moe is None else dims.moe.num_experts,
        expert_width=0 if dims.moe is None else dims.moe.hidden_dim,
        expert_capacity_factor=None if dims.moe is None else dims.moe.capacity_factor,
        stage_units=decoder_stage_units(dims.num_layers),
        tied_units=("tok_embeddings", "output") if dims.tied_embeddings else None,
        width=dims.dim,
        cut_sizes=_cut_sizes(dims),
        # Tied weights are one parameter of two modules, which only their parent can gather once.
        extra_fsdp_units=() if dims.tied_embeddings else ("tok_embeddings", "output"),
        torchtitan_keys=decoder_torchtitan_keys(qk_norm=True, moe=dims.moe is not None),
        hugging_face=_hugging_face(dims),
        cost=lambda seq_len: _cost(dims, seq_len),
    )


def dims_of_hugging_face(values: Mapping[str, Any]) -> Qwen3Dims:
    """The dimensions that a config.json names. Raises ConfigError that lists what cannot be built
    here."""
    config = HuggingFaceConfig(values)
    architecture = config.architecture(ARCHITECTURES)
    sizes = read_decoder(config)
    theta, _ = config.rope(None, stretched=False)
    head_dim = config.integer("head_dim", 128)
    config.only("use_sliding_window", False)
    hidden_dim: int | None = None
    moe: dict[str, Any] | None = None
    if architecture == _MOE:
        # Every block has experts.
        config.only("decoder_sparse_step", 1)
        config.only("mlp_only_layers", [], None)
        moe = {
            # transformers 5 writes the second name.
            "num_experts": config.integer("num_experts", config.given("num_local_experts")),
            "top_k": config.integer("num_experts_per_tok"),
            "hidden_dim": config.integer("moe_intermediate_size"),
            "normalize_weights": config.flag("norm_topk_prob", default=False),
        }
    else:
        hidden_dim = config.integer("intermediate_size")
    config.check()
    return Qwen3Dims(
        **sizes,
        hidden_dim=hidden_dim,
        moe=None if moe is None else MoEDims(**moe),
        head_dim=head_dim,
        rope_theta=theta,
    )


def _hugging_face(dims: Qwen3Dims) -> HuggingFaceModel | None:
    if dims.moe is not None and not is_known_routing(dims.moe):
        return None
    return HuggingFaceModel(
        config={
            "architectures": [_DENSE if dims.moe is None else _MOE],
            "model_type": "qwen3" if dims.moe is None else "qwen3_moe",
            **decoder_values(dims),
            "head_dim": dims.head_dim,
            **rope_values(dims.rope_theta, None),
            "use_sliding_window": False,
            **_feed_forward_values(dims),
        },
        keys=decoder_hugging_face_keys(
            qk_norm=True,
            tied_embeddings=dims.tied_embeddings,
            moe=None if dims.moe is None else _EXPERTS,
        ),
        ignored=ignored_keys(tied_embeddings=dims.tied_embeddings),
        differences=lambda config: differences(dims, dims_of_hugging_face(config)),
    )


def _feed_forward_values(dims: Qwen3Dims) -> dict[str, Any]:
    if dims.moe is None:
        return {"intermediate_size": dims.hidden_dim}
    return {
        "num_experts": dims.moe.num_experts,
        "num_experts_per_tok": dims.moe.top_k,
        "moe_intermediate_size": dims.moe.hidden_dim,
        "norm_topk_prob": dims.moe.normalize_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def build(dims: Qwen3Dims) -> Decoder:
    """The module, with parameters as the current default device makes them."""
    return Decoder(
        dim=dims.dim,
        vocab_size=dims.vocab_size,
        norm_eps=dims.norm_eps,
        rotary=RotaryEmbedding(dims.head_dim, dims.rope_theta, scaling=None),
        blocks=[_block(dims) for _ in range(dims.num_layers)],
        attention_backend=dims.attention_backend,
        tied_embeddings=dims.tied_embeddings,
        dropout=dims.dropout,
    )


def _block(dims: Qwen3Dims) -> DecoderBlock:
    return DecoderBlock(
        dim=dims.dim,
        norm_eps=dims.norm_eps,
        attention=Attention(
            dims.dim,
            dims.num_heads,
            dims.num_kv_heads,
            dims.head_dim,
            dims.attention_backend,
            qk_norm_eps=dims.norm_eps,
        ),
        feed_forward=_feed_forward(dims),
        dropout=dims.dropout,
    )


def _feed_forward(dims: Qwen3Dims) -> nn.Module:
    if dims.moe is not None:
        return MoE(dims.dim, dims.moe)
    assert dims.hidden_dim is not None
    return FeedForward(dims.dim, dims.hidden_dim)


def _cut_sizes(dims: Qwen3Dims) -> tuple[tuple[str, int], ...]:
    heads = ("key/value heads", dims.num_kv_heads)
    if dims.hidden_dim is None:
        return (heads,)
    return heads, ("features of the feed-forward block", dims.hidden_dim)


def _cost(dims: Qwen3Dims, seq_len: int) -> ModelCost:
    if dims.moe is not None:
        params, active = dims.moe.num_params(dims.dim), dims.moe.num_active_params(dims.dim)
    else:
        assert dims.hidden_dim is not None
        params = active = 3 * dims.dim * dims.hidden_dim
    return decoder_cost(
        dim=dims.dim,
        num_layers=dims.num_layers,
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        qk_norm=True,
        feed_forward_params=params,
        active_feed_forward_params=active,
        vocab_size=dims.vocab_size,
        tied_embeddings=dims.tied_embeddings,
        seq_len=seq_len,
    )
