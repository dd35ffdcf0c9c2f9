"""gpt-oss (arXiv:2508.10925): dimensions, flavors, module and initial weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.config.tables.model import ModelConfig
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
from torchtitan_lite.nn.grouped_query import GroupedQuery
from torchtitan_lite.nn.hugging_face_config import HuggingFaceConfig, differences, rope_values
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.rope import Rope, YarnScaling
from torchtitan_lite.nn.spec import HuggingFaceForm, HuggingFaceKey, HuggingFaceModel, ModelSpec

ARCHITECTURES = ("GptOssForCausalLM",)
"""Architectures in transformers that `dims_of_hugging_face` supports."""
_LAYER_TYPES = ("sliding_attention", "full_attention")
"""Of layers in turn."""
_STEEPNESS = 1.702
"""Of the experts' gate; see `nn.moe.ClampedExperts`."""
_ROPE = YarnScaling(factor=32.0, original_max_position=4096, truncate=False)


@dataclass(frozen=True, kw_only=True)
class GptOssDims:
    """The dimensions of one flavor."""

    dim: int = 2880
    num_layers: int = 24
    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 64
    moe: MoEDims
    window: int = 128
    """Positions that every second layer, from the first on, attends to."""
    vocab_size: int = 201088
    pad_token_id: int | None = None
    """Token whose embedding gets no gradient as an input."""
    norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling: YarnScaling | None = None
    max_seq_len: int = 131072
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
        return [
            DecoderLayer(attention=self.attention(number), feed_forward=self.moe)
            for number in range(self.num_layers)
        ]

    def attention(self, layer: int) -> GroupedQuery:
        """Return the attention of a layer."""
        return GroupedQuery(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotation=Rope(head_dim=self.head_dim, theta=self.rope_theta, scaling=self.rope_scaling),
            bias=True,
            window=self.window if layer % 2 == 0 else None,
            has_sinks=True,
        )


def _moe(num_experts: int, hidden_dim: int = 2880) -> MoEDims:
    # Softmax of all experts, normalized over the chosen ones, is the softmax of the chosen ones.
    return MoEDims(
        num_experts=num_experts,
        top_k=4,
        hidden_dim=hidden_dim,
        swiglu_limit=7.0,
        bias_update_rate=0.001,
    )


FLAVORS = {
    # 1 M parameters with everything that the large ones have.
    "tiny": GptOssDims(
        dim=96,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        moe=MoEDims(
            num_experts=8, top_k=2, hidden_dim=64, swiglu_limit=7.0, bias_update_rate=0.001
        ),
        window=32,
        vocab_size=2048,
        rope_scaling=_ROPE,
        document_mask=True,
    ),
    "debugmodel": GptOssDims(dim=256, num_layers=4, moe=_moe(8), rope_scaling=_ROPE),
    "20b": GptOssDims(moe=_moe(32), rope_scaling=_ROPE),
    "120b": GptOssDims(num_layers=36, moe=_moe(128), rope_scaling=_ROPE),
}


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec of `config.flavor` with the configured attention."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)


def spec_of(dims: GptOssDims, flavor: str) -> ModelSpec:
    """Return the spec of any dimensions."""
    attention = dims.attention(0).torchtitan_keys(pairs=False)
    return decoder_model_spec(
        dims,
        name="gpt_oss",
        flavor=flavor,
        torchtitan_keys=decoder_torchtitan_keys(dims.layers, attention),
        hugging_face=_hugging_face(dims),
    )


def build(dims: GptOssDims) -> Decoder:
    """Build the module, with parameters as the current default device creates them."""
    return build_decoder(dims)


def dims_of_hugging_face(values: Mapping[str, Any]) -> GptOssDims:
    """Read the dimensions from a config.json. Raises ConfigError with everything unsupported."""
    config = HuggingFaceConfig(values)
    config.architecture(ARCHITECTURES)
    sizes = read_decoder(config, attention_bias=True, norm_eps=1e-5, num_kv_heads=8)
    num_layers = sizes["num_layers"]
    turns = [_LAYER_TYPES[number % 2] for number in range(num_layers)]
    config.only("layer_types", turns, None)
    config.only("swiglu_alpha", _STEEPNESS)
    config.accept_quantization("mxfp4")
    theta, scaling = config.rope(150000.0, scaled=("yarn",))
    if not (config.given("rope_parameters") or config.given("rope_scaling")):
        # The default of the architecture.
        scaling = _ROPE
    moe: dict[str, Any] = {
        "num_experts": config.integer("num_local_experts"),
        "top_k": config.integer("num_experts_per_tok", 4),
        "hidden_dim": config.integer("intermediate_size"),
        "swiglu_limit": config.number("swiglu_limit", 7.0),
    }
    given: dict[str, Any] = {
        "head_dim": config.integer("head_dim", 64),
        "window": config.integer("sliding_window", 128),
    }
    config.check()
    assert scaling is None or isinstance(scaling, YarnScaling)
    return GptOssDims(**sizes, **given, moe=MoEDims(**moe), rope_theta=theta, rope_scaling=scaling)


def _hugging_face(dims: GptOssDims) -> HuggingFaceModel | None:
    moe = dims.moe
    is_plain = moe.score == "softmax" and moe.normalize_weights and not moe.shared_hidden_dim
    is_plain = is_plain and moe.num_groups == 1 and not moe.weights_inputs
    if not is_plain or moe.route_scale != 1.0 or moe.swiglu_limit is None:
        return None
    return HuggingFaceModel(
        config=_hugging_face_config(dims),
        keys=(
            *decoder_hugging_face_keys(dims.layers, tied_embeddings=dims.tied_embeddings),
            *_moe_keys(),
        ),
        ignored=ignored_keys(tied_embeddings=dims.tied_embeddings),
        differences=lambda config: differences(dims, dims_of_hugging_face(config)),
    )


def _moe_keys() -> tuple[HuggingFaceKey, ...]:
    here, there = "layers.*.feed_forward", "model.layers.*.mlp"

    def key(name: str, *forms: HuggingFaceForm) -> HuggingFaceKey:
        return HuggingFaceKey(name=f"{here}.{name}", forms=forms)

    def stack(name: str, theirs: str) -> HuggingFaceKey:
        # Releases are in MXFP4; transformers saves transposed matrices.
        stored = f"{there}.experts.{theirs}"
        return key(
            f"experts.{name}",
            HuggingFaceForm(key=stored, transposed=True),
            HuggingFaceForm(key=f"{stored}_blocks", scales=f"{stored}_scales"),
        )

    def plain(name: str, theirs: str) -> HuggingFaceKey:
        return key(name, HuggingFaceForm(key=f"{there}.{theirs}"))

    return (
        plain("router.gate.weight", "router.weight"),
        plain("router.gate.bias", "router.bias"),
        key("router.expert_bias_X"),
        stack("gate_up", "gate_up_proj"),
        plain("experts.gate_up_bias", "experts.gate_up_proj_bias"),
        stack("down", "down_proj"),
        plain("experts.down_bias", "experts.down_proj_bias"),
    )


def _hugging_face_config(dims: GptOssDims) -> dict[str, Any]:
    moe = dims.moe
    return {
        "architectures": list(ARCHITECTURES),
        "model_type": "gpt_oss",
        **decoder_values(dims, attention_bias=True),
        "head_dim": dims.head_dim,
        "sliding_window": dims.window,
        "layer_types": [_LAYER_TYPES[number % 2] for number in range(dims.num_layers)],
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.hidden_dim,
        "swiglu_limit": moe.swiglu_limit,
        "swiglu_alpha": _STEEPNESS,
        **rope_values(dims.rope_theta, dims.rope_scaling),
        # Without a scaling, transformers takes the architecture's.
        **({"rope_scaling": {"rope_type": "default"}} if dims.rope_scaling is None else {}),
    }
