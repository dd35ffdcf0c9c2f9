"""Decoders of transformers that differ in facts only. `config.json` decides: each `model_type` is a
row of `_ARCHITECTURES`."""

from dataclasses import dataclass, replace
from typing import Any

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.registry import unknown_name
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.nn.decoder import Multipliers
from torchtitan_lite.nn.feed_forward import Activation, Dense
from torchtitan_lite.nn.grouped_decoder import GroupedDecoderDims, GroupedDecoderFamily
from torchtitan_lite.nn.grouped_query import GroupedQuery
from torchtitan_lite.nn.hugging_face_config import HuggingFaceConfig
from torchtitan_lite.nn.hugging_face_facts import (
    Architecture,
    Biases,
    Fact,
    Fixed,
    Given,
    HeadWidth,
    LayersWithoutRope,
    LayerWindows,
    Rotation,
    Value,
    Window,
    decoder_facts,
)
from torchtitan_lite.nn.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class AutoDims(GroupedDecoderDims):
    """The dimensions of one flavor."""

    model_type: str
    """The architecture in transformers, a row of `_ARCHITECTURES`."""
    bias: bool = False
    """Whether the projections of queries, keys and values have biases."""
    out_bias: bool = False
    """Whether the output projections of attention have biases."""
    window: int | None = None
    """Positions that a windowed layer attends to. Unset: all."""
    windowed_layers: tuple[int, ...] | None = None
    """Layers with a window. Unset: all layers, if there is a window."""
    layers_without_rope: tuple[int, ...] = ()
    """Layers without rotary embedding."""
    activation: Activation = "silu"
    """Of the gate of the feed-forward block."""
    zero_centered_norms: bool = False
    """Whether norms multiply by 1 + weight."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    """Factor of the scores. Unset: 1 / sqrt(head_dim)."""
    logits_divisor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_type not in _MODEL_TYPES:
            raise ConfigError(unknown_name("model_type", self.model_type, _MODEL_TYPES))

    @property
    def multipliers(self) -> Multipliers:
        """Constant factors."""
        return Multipliers(
            embedding=self.embedding_multiplier,
            residual=self.residual_multiplier,
            logits=1 / self.logits_divisor,
        )

    def dense(self, hidden_dim: int) -> Dense:
        """Return the feed-forward of dense layers."""
        return Dense(hidden_dim=hidden_dim, activation=self.activation)

    def stored_as(self) -> str:
        return self.model_type

    def attention(self, layer: int) -> GroupedQuery:
        """Return the attention of a layer."""
        whole = super().attention(layer)
        is_windowed = self.windowed_layers is None or layer in self.windowed_layers
        return replace(
            whole,
            bias=self.bias,
            out_bias=self.out_bias,
            window=self.window if is_windowed else None,
            scale=self.attention_multiplier,
            rotation=None if layer in self.layers_without_rope else whole.rotation,
        )


def _is_late(config: HuggingFaceConfig, dims: dict[str, Any], layer: int) -> bool:
    return layer >= config.integer("max_window_layers", 28, least=0)


def _is_without_rope(config: HuggingFaceConfig, dims: dict[str, Any], layer: int) -> bool:
    return layer in dims["layers_without_rope"]


def _row(name: str, model_type: str, *facts: Fact) -> Architecture:
    return Architecture(
        name=name, model_type=model_type, facts=(Given("model_type", model_type), *facts)
    )


_ROTATION = Rotation()
_BIASES = Biases()
_WIDTH = Value("hidden_dim", "intermediate_size")
_ARCHITECTURES = (
    _row(
        "GemmaForCausalLM",
        "gemma",
        *decoder_facts(
            activation=None,
            attention_bias=None,
            tied_embeddings=True,
            pad_token_id=0,
        ),
        _BIASES,
        HeadWidth(256),
        _WIDTH,
        _ROTATION,
        Given("activation", "gelu_tanh"),
        Given("zero_centered_norms", True),
        Given("embedding_multiplier", lambda dims: dims["dim"] ** 0.5),
        Fixed("use_bidirectional_attention", None, False, is_written=False),
        # Early releases name another activation, and mean this one.
        Fixed("hidden_act", "gelu_pytorch_tanh", "gelu"),
        Fixed("hidden_activation", "gelu_pytorch_tanh", None, is_written=False),
    ),
    _row(
        "GraniteForCausalLM",
        "granite",
        *decoder_facts(attention_bias=None),
        _BIASES,
        HeadWidth(),
        _WIDTH,
        _ROTATION,
        Value("embedding_multiplier", "embedding_multiplier", "number", 1.0),
        Value("residual_multiplier", "residual_multiplier", "number", 1.0),
        Value("attention_multiplier", "attention_multiplier", "number", 1.0),
        Value("logits_divisor", "logits_scaling", "number", 1.0),
    ),
    _row(
        "MistralForCausalLM",
        "mistral",
        *decoder_facts(attention_bias=None, num_kv_heads=8),
        HeadWidth(),
        _WIDTH,
        Window(4096),
        _ROTATION,
    ),
    _row(
        "Qwen2ForCausalLM",
        "qwen2",
        *decoder_facts(attention_bias=None),
        Given("bias", True),
        HeadWidth(),
        _WIDTH,
        LayerWindows(4096, _is_late),
        _ROTATION,
    ),
    _row(
        "SeedOssForCausalLM",
        "seed_oss",
        *decoder_facts(attention_bias=None, num_kv_heads=8, pad_token_id=1),
        Value("bias", "attention_bias", "flag", default=True),
        Value("out_bias", "attention_out_bias", "flag", default=False),
        HeadWidth(128),
        _WIDTH,
        _ROTATION,
    ),
    _row(
        "SmolLM3ForCausalLM",
        "smollm3",
        *decoder_facts(
            attention_bias=None, num_kv_heads=4, tied_embeddings=True, pad_token_id=128004
        ),
        _BIASES,
        HeadWidth(),
        _WIDTH,
        LayersWithoutRope(),
        LayerWindows(None, _is_without_rope),
        Rotation(2000000.0),
    ),
)
_MODEL_TYPES = tuple(architecture.model_type for architecture in _ARCHITECTURES)

FLAVORS = {
    # 1.3 M parameters with everything that the architectures have.
    "tiny": AutoDims(
        model_type="qwen2",
        dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=384,
        vocab_size=2048,
        bias=True,
        window=32,
        windowed_layers=(1, 3),
        document_mask=True,
    ),
}
_FAMILY = GroupedDecoderFamily(
    name="auto", dims=AutoDims, architectures=_ARCHITECTURES, is_in_torchtitan=False
)
ARCHITECTURES = _FAMILY.architecture_names
spec_of = _FAMILY.spec_of
dims_of_hugging_face = _FAMILY.dims_of_hugging_face


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec of `config.flavor` with the configured attention."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)
