"""Mixtral (arXiv:2401.04088): dimensions, flavors, module and initial weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.nn.attention import Backend
from torchtitan_lite.nn.decoder import DecoderLayer
from torchtitan_lite.nn.decoder_family import decoder_model_spec
from torchtitan_lite.nn.decoder_hugging_face import (
    MoEKeys,
    decoder_hugging_face_keys,
    decoder_values,
    ignored_keys,
    is_known_routing,
    read_decoder,
)
from torchtitan_lite.nn.grouped_query import GroupedQuery
from torchtitan_lite.nn.hugging_face_config import HuggingFaceConfig, differences, rope_values
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.rope import Rope
from torchtitan_lite.nn.spec import HuggingFaceModel, ModelSpec

ARCHITECTURES = ("MixtralForCausalLM",)
"""Architectures in transformers that `dims_of_hugging_face` supports."""
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
    pad_token_id: int | None = None
    """Token whose embedding gets no gradient as an input."""
    head_dim: int = 128
    norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    max_seq_len: int = 32768
    tied_embeddings: bool = False
    attention_backend: Backend = "sdpa"
    document_mask: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        # Raises ConfigError for sizes that do not fit.
        _ = self.layers

    @property
    def layers(self) -> list[DecoderLayer]:
        """All layers."""
        attention = GroupedQuery(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotation=Rope(head_dim=self.head_dim, theta=self.rope_theta),
        )
        return [DecoderLayer(attention=attention, feed_forward=self.moe)] * self.num_layers


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
    """Return the spec of `config.flavor` with the configured attention."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)


def spec_of(dims: MixtralDims, flavor: str) -> ModelSpec:
    """Return the spec of any dimensions."""
    return decoder_model_spec(
        dims,
        name="mixtral",
        flavor=flavor,
        hugging_face=_hugging_face(dims),
    )


def dims_of_hugging_face(values: Mapping[str, Any]) -> MixtralDims:
    """Read the dimensions from a config.json. Raises ConfigError with everything unsupported."""
    config = HuggingFaceConfig(values)
    config.architecture(ARCHITECTURES)
    sizes = read_decoder(config)
    theta, _ = config.rope(None)
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
        keys=decoder_hugging_face_keys(
            dims.layers, tied_embeddings=dims.tied_embeddings, moe=_EXPERTS
        ),
        ignored=ignored_keys(tied_embeddings=dims.tied_embeddings),
        differences=lambda config: differences(dims, dims_of_hugging_face(config)),
    )
