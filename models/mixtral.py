"""Mixtral (arXiv:2401.04088): dimensions, flavors, module and initial weights.

Layer: above nn and spec.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
)
from torchtitan_lite.nn.hugging_face_config import HuggingFaceConfig, differences, rope_values
from torchtitan_lite.nn.moe import MoE, MoEDims
from torchtitan_lite.nn.rope import RotaryEmbedding
from torchtitan_lite.spec import HuggingFaceModel, ModelCost, ModelSpec

ARCHITECTURES = ("MixtralForCausalLM",)
"""The models of transformers that `dims_of_hugging_face` builds."""
_EXPERTS = MoEKeys("block_sparse_moe", {"w1": "w1", "w2": "w2", "w3": "w3"})


@dataclass(frozen=True, kw_only=True)
class MixtralDims:
    """The dimensions of one flavor."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    moe: MoEDims
    vocab_size: int = 32000
    head_dim: int = 128
    norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    max_seq_len: int = 32768
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


FLAVORS = {
    "debugmodel": MixtralDims(
        dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        moe=MoEDims(num_experts=4, top_k=2, hidden_dim=192),
        vocab_size=2048,
        head_dim=32,
        document_mask=True,
    ),
    "8x7B": MixtralDims(
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        moe=MoEDims(num_experts=8, top_k=2, hidden_dim=14336),
    ),
    "8x22B": MixtralDims(
        dim=6144,
        num_layers=56,
        num_heads=48,
        num_kv_heads=8,
        moe=MoEDims(num_experts=8, top_k=2, hidden_dim=16384),
        vocab_size=32768,
        max_seq_len=65536,
    ),
}


def model_spec(config: ModelConfig) -> ModelSpec:
    """The spec of `config.flavor`, with the attention that `config` asks for."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)


def spec_of(dims: MixtralDims, flavor: str) -> ModelSpec:
    """The spec of any dimensions."""
    experts = "feed_forward.experts"
    return ModelSpec(
        name="mixtral",
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
            residual_matrices=("attention.wo.weight", f"{experts}.w2", f"{experts}.w3"),
            tied_embeddings=dims.tied_embeddings,
        ),
        shard_plan=decoder_shard_plan(moe=dims.moe),
        num_heads=dims.num_heads,
        num_experts=dims.moe.num_experts,
        expert_width=dims.moe.hidden_dim,
        expert_capacity_factor=dims.moe.capacity_factor,
        stage_units=decoder_stage_units(dims.num_layers),
        tied_units=("tok_embeddings", "output") if dims.tied_embeddings else None,
        width=dims.dim,
        cut_sizes=(("key/value heads", dims.num_kv_heads),),
        # Tied weights are one parameter of two modules, which only their parent can gather once.
        extra_fsdp_units=() if dims.tied_embeddings else ("tok_embeddings", "output"),
        hugging_face=_hugging_face(dims),
        cost=lambda seq_len: _cost(dims, seq_len),
    )


def dims_of_hugging_face(values: Mapping[str, Any]) -> MixtralDims:
    """The dimensions that a config.json names. Raises ConfigError that lists what cannot be built
    here."""
    config = HuggingFaceConfig(values)
    config.architecture(ARCHITECTURES)
    sizes = read_decoder(config)
    theta, _ = config.rope(None, stretched=False)
    config.only("sliding_window", None)
    head_dim = config.integer("head_dim", sizes["dim"] // sizes["num_heads"])
    experts: dict[str, Any] = {
        "num_experts": config.integer("num_local_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "hidden_dim": config.integer("intermediate_size"),
    }
    config.check()
    return MixtralDims(**sizes, moe=MoEDims(**experts), head_dim=head_dim, rope_theta=theta)


def _hugging_face(dims: MixtralDims) -> HuggingFaceModel | None:
    if not is_known_routing(dims.moe) or not dims.moe.normalize_weights:
        return None
    return HuggingFaceModel(
        config={
            "architectures": list(ARCHITECTURES),
            "model_type": "mixtral",
            **decoder_values(dims),
            "head_dim": dims.head_dim,
            "intermediate_size": dims.moe.hidden_dim,
            "num_local_experts": dims.moe.num_experts,
            "num_experts_per_tok": dims.moe.top_k,
            "sliding_window": None,
            **rope_values(dims.rope_theta, None),
        },
        keys=decoder_hugging_face_keys(tied_embeddings=dims.tied_embeddings, moe=_EXPERTS),
        ignored=ignored_keys(tied_embeddings=dims.tied_embeddings),
        differences=lambda config: differences(dims, dims_of_hugging_face(config)),
    )


def build(dims: MixtralDims) -> Decoder:
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


def _block(dims: MixtralDims) -> DecoderBlock:
    return DecoderBlock(
        dim=dims.dim,
        norm_eps=dims.norm_eps,
        attention=Attention(
            dims.dim, dims.num_heads, dims.num_kv_heads, dims.head_dim, dims.attention_backend
        ),
        feed_forward=MoE(dims.dim, dims.moe),
        dropout=dims.dropout,
    )


def _cost(dims: MixtralDims, seq_len: int) -> ModelCost:
    return decoder_cost(
        dim=dims.dim,
        num_layers=dims.num_layers,
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        qk_norm=False,
        feed_forward_params=dims.moe.num_params(dims.dim),
        active_feed_forward_params=dims.moe.num_active_params(dims.dim),
        vocab_size=dims.vocab_size,
        tied_embeddings=dims.tied_embeddings,
        seq_len=seq_len,
    )
