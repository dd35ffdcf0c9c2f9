"""Llama 4, the text model: dimensions, flavors, module and initial weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.nn.attention import Backend
from torchtitan_lite.nn.decoder import DecoderLayer
from torchtitan_lite.nn.decoder_family import decoder_model_spec
from torchtitan_lite.nn.decoder_spec import decoder_torchtitan_keys
from torchtitan_lite.nn.feed_forward import Dense
from torchtitan_lite.nn.grouped_query import GroupedQuery, Temperature
from torchtitan_lite.nn.hugging_face.config import (
    HuggingFaceConfig,
    differences,
    export_problem,
    named_architecture,
)
from torchtitan_lite.nn.hugging_face.facts import decoder_facts, read_facts, write_facts
from torchtitan_lite.nn.hugging_face.names import (
    decoder_hugging_face_keys,
    ignored_keys,
    stacked_expert_keys,
)
from torchtitan_lite.nn.hugging_face.rope import read_rope, rope_values
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.rope import Rope, RopeScaling
from torchtitan_lite.nn.spec import HuggingFaceKey, HuggingFaceModel, ModelSpec

_TEXT, _VISION = "Llama4ForCausalLM", "Llama4ForConditionalGeneration"
_OF_IMAGES = tuple(
    f"{token}_token_{kind}" for token in ("image", "boi", "eoi") for kind in ("id", "index")
)
ARCHITECTURES = {_TEXT: "llama4_text", _VISION: "llama4"}
"""Architectures in transformers that `dims_of_hugging_face` supports: the text model alone, and
releases, of which it is a part."""
_FIRST_NOPE_LAYER = 3
_FACTS = decoder_facts(norm_eps=1e-5, num_kv_heads=8)
_RELEASED = "language_model."
"""Beginning of the names of the text model's weights in releases."""


@dataclass(frozen=True, kw_only=True)
class Llama4Dims:
    """The dimensions of one flavor."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    """Width of the feed-forward of layers without experts."""
    moe: MoEDims
    moe_interval: int = 1
    """Every this many layers, the last one of them has experts."""
    nope_interval: int | None = None
    """Every this many layers, one has no rotary embedding and attends to all positions, and the
    others attend to chunks. Unset: all layers have rotary embeddings and attend to all positions.
    """
    first_nope_layer: int = _FIRST_NOPE_LAYER
    chunk: int = 8192
    """Positions of a chunk."""
    qk_norm: bool = False
    """Whether rotated queries and keys are normalized."""
    temperature: Temperature | None = None
    """Growth of the queries of layers without rotary embedding."""
    vocab_size: int = 202048
    pad_token_id: int | None = None
    """Token whose embedding gets no gradient as an input."""
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    max_seq_len: int = 1048576
    tied_embeddings: bool = False
    attention_backend: Backend = "sdpa"
    document_mask: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.moe_interval < 1:
            raise ConfigError(f"moe_interval ({self.moe_interval}) must be at least 1.")
        interval = self.nope_interval
        if interval is not None and not 0 <= self.first_nope_layer < interval:
            raise ConfigError(
                f"first_nope_layer ({self.first_nope_layer}) must be at least 0 and below "
                f"nope_interval ({interval})."
            )
        # Raises ConfigError for sizes that do not fit.
        _ = self.layers

    @property
    def layers(self) -> list[DecoderLayer]:
        """All layers."""
        dense = Dense(hidden_dim=self.hidden_dim)
        return [
            DecoderLayer(
                attention=self.attention(number),
                feed_forward=self.moe if self.has_experts(number) else dense,
            )
            for number in range(self.num_layers)
        ]

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return (layer + 1) % self.moe_interval == 0

    def is_nope(self, layer: int) -> bool:
        """Return whether a layer has no rotary embedding."""
        interval = self.nope_interval
        return interval is not None and layer % interval == self.first_nope_layer

    def attention(self, layer: int) -> GroupedQuery:
        """Return the attention of a layer."""
        whole = GroupedQuery(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotation=None,
        )
        if self.is_nope(layer):
            return replace(whole, temperature=self.temperature)
        return replace(
            whole,
            rotation=Rope(head_dim=self.head_dim, theta=self.rope_theta, scaling=self.rope_scaling),
            rotates_adjacent=True,
            rotated_norm_eps=self.norm_eps if self.qk_norm else None,
            chunk=None if self.nope_interval is None else self.chunk,
        )


def _moe(num_experts: int, hidden_dim: int) -> MoEDims:
    return MoEDims(
        num_experts=num_experts,
        top_k=1,
        hidden_dim=hidden_dim,
        shared_hidden_dim=hidden_dim,
        score="sigmoid",
        normalize_weights=False,
        weights_inputs=True,
        bias_update_rate=0.001,
    )


_ROPE = RopeScaling(
    factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position=8192
)
_DEBUG = Llama4Dims(
    dim=256,
    num_layers=6,
    num_heads=16,
    num_kv_heads=16,
    head_dim=16,
    hidden_dim=768,
    moe=_moe(8, 512),
    moe_interval=2,
    nope_interval=None,
    vocab_size=2048,
    rope_scaling=_ROPE,
)
_SCOUT = Llama4Dims(
    dim=5120,
    num_layers=48,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    hidden_dim=16384,
    moe=_moe(16, 8192),
    nope_interval=4,
    qk_norm=True,
    temperature=Temperature(weight=0.1, interval=8192),
    rope_scaling=_ROPE,
    max_seq_len=10485760,
)
_MAVERICK = replace(
    _SCOUT,
    moe=_moe(128, 8192),
    moe_interval=2,
    qk_norm=False,
    rope_scaling=None,
    max_seq_len=1048576,
)

FLAVORS = {
    # 1 M parameters with everything that the large ones have.
    "tiny": Llama4Dims(
        dim=96,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        hidden_dim=256,
        moe=_moe(8, 128),
        moe_interval=2,
        nope_interval=4,
        chunk=64,
        qk_norm=True,
        temperature=Temperature(weight=0.1, interval=64),
        vocab_size=2048,
        document_mask=True,
    ),
    "debugmodel": _DEBUG,
    # The first layer of four is the one without rotary embedding, as in torchtitan.
    "debugmodel_irope": replace(
        _DEBUG,
        nope_interval=4,
        first_nope_layer=0,
        chunk=256,
        attention_backend="flex",
        document_mask=True,
    ),
    # Scout and Maverick as they were released, which torchtitan's `_irope` flavors are nearest to.
    "17bx16e": _SCOUT,
    "17bx128e": _MAVERICK,
    "17bx16e_irope": replace(_SCOUT, attention_backend="flex", document_mask=True),
    "17bx128e_irope": replace(_MAVERICK, attention_backend="flex", document_mask=True),
}


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec of `config.flavor` with the configured attention."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)


def spec_of(dims: Llama4Dims, flavor: str) -> ModelSpec:
    """Return the spec of any dimensions."""
    # torchtitan rotates adjacent numbers, too.
    attention = dims.attention(0).torchtitan_keys(pairs=False)
    return decoder_model_spec(
        dims,
        name="llama4",
        flavor=flavor,
        torchtitan_keys=decoder_torchtitan_keys(dims.layers, attention),
        hugging_face=_hugging_face(dims),
    )


def dims_of_hugging_face(values: Mapping[str, Any]) -> Llama4Dims:
    """Read the dimensions from a config.json, of a release those of its text model. Raises
    ConfigError with everything unsupported."""
    config = HuggingFaceConfig(values)
    if named_architecture(values, ARCHITECTURES) == _VISION:
        text = config.given("text_config")
        if not isinstance(text, dict):
            raise ConfigError("text_config, which describes the text model, is absent.")
        config.only("tie_word_embeddings", False)
        config.ignore("text_config", "vision_config", *_OF_IMAGES)
        config.check()
        config = HuggingFaceConfig(text)
    sizes = read_facts(_FACTS, config)
    num_layers = sizes["num_layers"]
    theta, scaling = read_rope(config, 500000.0, scaled=("llama3",))
    width = config.size("intermediate_size")
    interval, first = _nope_layers(config, num_layers)
    moe_interval = _moe_interval(config, num_layers)
    is_tuned = config.flag("attn_temperature_tuning", default=True)
    tuning = {
        "weight": config.number("attn_scale", 0.1),
        "interval": config.integer("floor_scale", 8192),
    }
    rest: dict[str, Any] = {
        "head_dim": config.size("head_dim", 128),
        "hidden_dim": config.size("intermediate_size_mlp", 16384),
        "chunk": config.integer("attention_chunk_size", 8192),
        "qk_norm": config.flag("use_qk_norm", default=True),
        "nope_interval": interval,
        "first_nope_layer": first,
        "moe_interval": moe_interval,
        # Without layers that it applies to, it has no effect.
        "temperature": Temperature(**tuning) if is_tuned and interval is not None else None,
    }
    num_experts = config.size("num_local_experts", 16)
    config.only("num_experts_per_tok", 1)
    config.ignore("no_rope_layer_interval")
    config.check()
    assert scaling is None or isinstance(scaling, RopeScaling)
    return Llama4Dims(
        **sizes,
        **rest,
        moe=replace(_moe(num_experts, width), bias_update_rate=0.0),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def _nope_layers(config: HuggingFaceConfig, num_layers: int) -> tuple[int | None, int]:
    """Read the interval and the first of the layers without rotary embedding. If there are none,
    and no chunks, the interval is None and the other the default."""
    has_rope = config.given("no_rope_layers")
    if has_rope:
        flags = [not flag for flag in has_rope] if isinstance(has_rope, Sequence) else []
    else:
        step = config.integer("no_rope_layer_interval", 4)
        flags = [layer % step == step - 1 for layer in range(num_layers)]
    kinds = config.given("layer_types")
    if kinds == ["full_attention"] * num_layers and flags == [False] * num_layers:
        return None, _FIRST_NOPE_LAYER
    interval = _every(flags) if len(flags) == num_layers else None
    if interval is None:
        config.problems.append(
            f"no_rope_layers is {has_rope!r:.100}, and only layers at a fixed interval are "
            "supported"
        )
        return None, _FIRST_NOPE_LAYER
    wanted = ["full_attention" if flag else "chunked_attention" for flag in flags]
    if kinds is not None and kinds != wanted:
        config.problems.append(
            f"layer_types is {kinds!r:.100}, and only chunks in the layers with rotary embedding "
            "are supported"
        )
    return interval


def _moe_interval(config: HuggingFaceConfig, num_layers: int) -> int:
    """Read the interval of layers with experts."""
    layers = config.given("moe_layers")
    step = config.integer("interleave_moe_layer_step", 1)
    if layers is None:
        return step
    interval = None
    if isinstance(layers, Sequence):
        interval = _every([layer in layers for layer in range(num_layers)])
    if interval is None or interval[1] != interval[0] - 1:
        config.problems.append(
            f"moe_layers is {layers!r:.100}, and only the last layers of a fixed interval are "
            "supported"
        )
        return step
    return interval[0]


def _every(flags: Sequence[bool]) -> tuple[int, int] | None:
    """Return the smallest interval, and the first of the layers at this interval that have a flag;
    None if they are not at a fixed interval. Without flags, the first is behind the last layer."""
    for interval in range(1, len(flags) + 2):
        for first in reversed(range(interval)):
            if [layer % interval == first for layer in range(len(flags))] == list(flags):
                return interval, first
    return None


def _as_read(dims: Llama4Dims) -> Llama4Dims:
    """Return dimensions of the same function, as they are read from a config.json."""
    layers = range(dims.num_layers)
    moe = _every([dims.has_experts(layer) for layer in layers])
    assert moe is not None
    changes: dict[str, Any] = {"moe_interval": moe[0]}
    if dims.nope_interval is not None:
        nope = _every([dims.is_nope(layer) for layer in layers])
        assert nope is not None
        changes |= {"nope_interval": nope[0], "first_nope_layer": nope[1]}
    else:
        changes |= {"first_nope_layer": _FIRST_NOPE_LAYER, "temperature": None}
    return replace(dims, **changes)


def _hugging_face(dims: Llama4Dims) -> HuggingFaceModel | str:
    values = _hugging_face_config(dims)

    def as_read(values: Mapping[str, Any]) -> Llama4Dims:
        return _as_read(dims_of_hugging_face(values))

    if problem := export_problem(values, _as_read(dims), as_read):
        return problem
    keys = (
        *decoder_hugging_face_keys(
            dims.layers, tied_embeddings=dims.tied_embeddings, dense="feed_forward"
        ),
        *stacked_expert_keys(
            "feed_forward",
            ("experts.gate_up_proj", "experts.down_proj"),
            router="router",
            shared="shared_expert",
            transposed=True,
        ),
    )
    return HuggingFaceModel(
        config=values,
        keys=tuple(map(_as_released_too, keys)),
        ignored=(
            *ignored_keys(tied_embeddings=dims.tied_embeddings),
            "vision_model.*",
            "multi_modal_projector.*",
        ),
        differences=lambda config: differences(_as_read(dims), as_read(config)),
    )


def _as_released_too(key: HuggingFaceKey) -> HuggingFaceKey:
    """Add the forms of a release, in which the text model is a part."""
    released = (replace(form, key=f"{_RELEASED}{form.key}") for form in key.forms)
    return replace(key, forms=(*key.forms, *released))


def _hugging_face_config(dims: Llama4Dims) -> dict[str, Any]:
    layers = range(dims.num_layers)
    is_nope = [dims.is_nope(layer) for layer in layers]
    is_chunked = dims.nope_interval is not None
    tuned = dims.temperature or Temperature(weight=0.1, interval=8192)
    return {
        "architectures": [_TEXT],
        "model_type": "llama4_text",
        **write_facts(_FACTS, dims),
        "head_dim": dims.head_dim,
        "intermediate_size": dims.moe.hidden_dim,
        "intermediate_size_mlp": dims.hidden_dim,
        "num_local_experts": dims.moe.num_experts,
        "num_experts_per_tok": 1,
        "moe_layers": [layer for layer in layers if dims.has_experts(layer)],
        "interleave_moe_layer_step": dims.moe_interval,
        "no_rope_layers": [int(not flag) for flag in is_nope],
        "layer_types": [
            "chunked_attention" if is_chunked and not flag else "full_attention" for flag in is_nope
        ],
        "attention_chunk_size": dims.chunk,
        "use_qk_norm": dims.qk_norm,
        "attn_temperature_tuning": dims.temperature is not None,
        "attn_scale": tuned.weight,
        "floor_scale": tuned.interval,
        **rope_values(dims.rope_theta, dims.rope_scaling),
    }
