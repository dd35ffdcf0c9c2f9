"""Llama 3 (arXiv:2407.21783): dimensions, flavors, module and initial weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.nn.attention import Backend
from torchtitan_lite.nn.decoder import Decoder, DecoderLayer
from torchtitan_lite.nn.decoder_family import build_decoder, decoder_model_spec
from torchtitan_lite.nn.decoder_hugging_face import (
    decoder_hugging_face_keys,
    decoder_values,
    ignored_keys,
    read_decoder,
)
from torchtitan_lite.nn.decoder_spec import decoder_torchtitan_keys
from torchtitan_lite.nn.feed_forward import Dense
from torchtitan_lite.nn.grouped_query import GroupedQuery
from torchtitan_lite.nn.hugging_face_config import HuggingFaceConfig, differences, rope_values
from torchtitan_lite.nn.rope import Rope, RopeScaling
from torchtitan_lite.nn.spec import HuggingFaceModel, ModelSpec

ARCHITECTURES = ("LlamaForCausalLM",)
"""Architectures in transformers that `dims_of_hugging_face` supports."""


@dataclass(frozen=True, kw_only=True)
class Llama3Dims:
    """The dimensions of one flavor."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    """Width of the feed-forward block."""
    vocab_size: int = 128256
    pad_token_id: int | None = None
    """Token whose embedding gets no gradient as an input."""
    head_dim: int | None = None
    """Unset: dim / num_heads."""
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    max_seq_len: int = 131072
    tied_embeddings: bool = False
    attention_backend: Backend = "sdpa"
    document_mask: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.head_dim is None and self.dim % self.num_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must divide dim ({self.dim}), or set head_dim."
            )
        # Raises ConfigError for sizes that do not fit.
        _ = self.attention

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def attention(self) -> GroupedQuery:
        """The attention of every layer."""
        return GroupedQuery(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            rotation=Rope(
                head_dim=self.head_size, theta=self.rope_theta, scaling=self.rope_scaling
            ),
        )

    @property
    def layers(self) -> list[DecoderLayer]:
        """All layers."""
        layer = DecoderLayer(
            attention=self.attention, feed_forward=Dense(hidden_dim=self.hidden_dim)
        )
        return [layer] * self.num_layers


# The released sizes stretch their rotations from a context of 8,192 (Llama 3.1 and 3.2).
_SCALED = RopeScaling(factor=8.0)
_DEBUG = Llama3Dims(
    dim=256,
    num_layers=6,
    num_heads=16,
    num_kv_heads=16,
    hidden_dim=768,
    vocab_size=2048,
    rope_scaling=_SCALED,
)
_8B = Llama3Dims(
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    hidden_dim=14336,
    rope_scaling=_SCALED,
)

FLAVORS = {
    # 1.3 M parameters: reaches a loss below 4 within two minutes on two CPU cores.
    "tiny": Llama3Dims(
        dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=384,
        vocab_size=2048,
        document_mask=True,
    ),
    "debugmodel": _DEBUG,
    "debugmodel_flex_attn": replace(_DEBUG, attention_backend="flex", document_mask=True),
    # torchtitan's varlen attention sees only the tokens of the same document.
    "debugmodel_varlen_attn": replace(_DEBUG, document_mask=True),
    "1B": Llama3Dims(
        dim=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=8192,
        rope_scaling=RopeScaling(factor=32.0),
        tied_embeddings=True,
    ),
    "3B": Llama3Dims(
        dim=3072,
        num_layers=28,
        num_heads=24,
        num_kv_heads=8,
        hidden_dim=8192,
        rope_scaling=RopeScaling(factor=32.0),
        tied_embeddings=True,
    ),
    "8B": _8B,
    "8B_flex": replace(_8B, attention_backend="flex", document_mask=True),
    "8B_varlen": replace(_8B, document_mask=True),
    "70B": Llama3Dims(
        dim=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        hidden_dim=28672,
        rope_scaling=_SCALED,
    ),
    "405B": Llama3Dims(
        dim=16384,
        num_layers=126,
        num_heads=128,
        num_kv_heads=8,
        hidden_dim=53248,
        rope_scaling=_SCALED,
    ),
}


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec of `config.flavor` with the configured attention."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)


def spec_of(dims: Llama3Dims, flavor: str) -> ModelSpec:
    """Return the spec of any dimensions."""
    return decoder_model_spec(
        dims,
        name="llama3",
        flavor=flavor,
        # It turns pairs of neighbours, as Meta's release does (docs/adr/0003).
        torchtitan_keys=decoder_torchtitan_keys(
            dims.layers, dims.attention.torchtitan_keys(pairs=True)
        ),
        hugging_face=HuggingFaceModel(
            config=_hugging_face_config(dims),
            keys=decoder_hugging_face_keys(dims.layers, tied_embeddings=dims.tied_embeddings),
            ignored=ignored_keys(tied_embeddings=dims.tied_embeddings),
            differences=lambda config: differences(dims, dims_of_hugging_face(config)),
        ),
    )


def dims_of_hugging_face(values: Mapping[str, Any]) -> Llama3Dims:
    """Read the dimensions from a config.json. Raises ConfigError with everything unsupported."""
    config = HuggingFaceConfig(values)
    config.architecture(ARCHITECTURES)
    sizes = read_decoder(config)
    theta, scaling = config.rope(10000.0, scaled=("llama3",))
    usual = sizes["dim"] // sizes["num_heads"]
    head_dim = config.integer("head_dim", usual)
    hidden_dim = config.integer("intermediate_size")
    config.check()
    assert scaling is None or isinstance(scaling, RopeScaling)
    return Llama3Dims(
        **sizes,
        hidden_dim=hidden_dim,
        head_dim=None if head_dim == usual else head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
    )


def _hugging_face_config(dims: Llama3Dims) -> dict[str, Any]:
    return {
        "architectures": list(ARCHITECTURES),
        "model_type": "llama",
        **decoder_values(dims),
        "head_dim": dims.head_size,
        "intermediate_size": dims.hidden_dim,
        "mlp_bias": False,
        **rope_values(dims.rope_theta, dims.rope_scaling),
    }


def build(dims: Llama3Dims) -> Decoder:
    """Build the module, with parameters as the current default device creates them."""
    return build_decoder(dims)
