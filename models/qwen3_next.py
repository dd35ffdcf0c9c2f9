"""Qwen3-Next: dimensions, flavors, module and initial weights. Most layers are Gated DeltaNet
(arXiv:2412.06464), and the others gated attention (arXiv:2505.06708); all have experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.nn.attention import AttentionDims, Backend
from torchtitan_lite.nn.decoder import DecoderLayer
from torchtitan_lite.nn.decoder_family import decoder_model_spec
from torchtitan_lite.nn.gated_delta import GatedDelta
from torchtitan_lite.nn.grouped_query import GroupedQuery
from torchtitan_lite.nn.hugging_face.config import (
    HuggingFaceConfig,
    differences,
    export_problem,
    named_architecture,
)
from torchtitan_lite.nn.hugging_face.facts import decoder_facts, read_facts, write_facts
from torchtitan_lite.nn.hugging_face.names import (
    FEED_FORWARD,
    decoder_hugging_face_keys,
    expert_keys,
    ignored_keys,
)
from torchtitan_lite.nn.hugging_face.rope import read_rope, rope_values, rotated_share
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.norm import NormKind
from torchtitan_lite.nn.rope import Rope
from torchtitan_lite.nn.spec import HuggingFaceModel, ModelSpec

_NORM = NormKind(zero_centered=True)
ARCHITECTURES = {"Qwen3NextForCausalLM": "qwen3_next"}
"""Architectures in transformers that `dims_of_hugging_face` supports, with their model types."""
_LINEAR = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Sizes of Gated DeltaNet, here and in transformers, with its defaults."""
_FACTS = decoder_facts(num_kv_heads=2)
_EXPERTS = expert_keys(
    "mlp",
    FEED_FORWARD,
    shared="shared_expert",
    shared_gate="shared_expert_gate",
)


def _is_full(num_layers: int, interval: int) -> list[bool]:
    """Return which layers have attention."""
    return [(layer + 1) % interval == 0 for layer in range(num_layers)]


@dataclass(frozen=True, kw_only=True)
class Qwen3NextDims:
    """The dimensions of one flavor."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    moe: MoEDims
    full_attention_interval: int = 4
    """Every this many layers, the last one of them has attention, and the others Gated DeltaNet."""
    head_dim: int = 256
    rotated_share: float = 0.25
    """Share of a head of attention that is rotated."""
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_kernel_size: int = 4
    """Positions that the convolution of Gated DeltaNet reads."""
    chunk_size: int = 64
    """Positions that Gated DeltaNet computes at once."""
    vocab_size: int = 151936
    pad_token_id: int | None = None
    """Token whose embedding gets no gradient as an input."""
    norm_eps: float = 1e-6
    rope_theta: float = 10000000.0
    max_seq_len: int = 262144
    tied_embeddings: bool = False
    attention_backend: Backend = "sdpa"
    document_mask: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.full_attention_interval <= self.num_layers:
            raise ConfigError(
                f"full_attention_interval ({self.full_attention_interval}) must be between 1 and "
                f"num_layers ({self.num_layers})."
            )
        if not 0 < self.rotated_share <= 1:
            raise ConfigError(
                f"rotated_share ({self.rotated_share}) must be above 0 and at most 1."
            )
        # Raises ConfigError for sizes that do not fit.
        _ = self.layers

    @property
    def attention(self) -> GroupedQuery:
        """The attention of the last layer of each interval."""
        rotated = int(self.head_dim * self.rotated_share)
        return GroupedQuery(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotation=Rope(head_dim=rotated, theta=self.rope_theta),
            qk_norm_eps=self.norm_eps,
            qk_norm=_NORM,
            gated=True,
        )

    @property
    def linear_attention(self) -> GatedDelta:
        """The recurrence of the other layers."""
        return GatedDelta(
            num_heads=self.linear_num_key_heads,
            num_value_heads=self.linear_num_value_heads,
            key_head_dim=self.linear_key_head_dim,
            value_head_dim=self.linear_value_head_dim,
            kernel_size=self.linear_kernel_size,
            norm_eps=self.norm_eps,
            chunk_size=self.chunk_size,
        )

    @property
    def layers(self) -> list[DecoderLayer]:
        """All layers."""
        kinds: tuple[AttentionDims, AttentionDims] = self.linear_attention, self.attention
        return [
            DecoderLayer(attention=kinds[is_full], feed_forward=self.moe)
            for is_full in _is_full(self.num_layers, self.full_attention_interval)
        ]


FLAVORS = {
    # 2 M parameters with everything that the large one has.
    "tiny": Qwen3NextDims(
        dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        moe=MoEDims(num_experts=8, top_k=2, hidden_dim=96, shared_hidden_dim=96, shared_gate=True),
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        vocab_size=2048,
        document_mask=True,
    ),
    "80B-A3B": Qwen3NextDims(
        dim=2048,
        num_layers=48,
        num_heads=16,
        num_kv_heads=2,
        moe=MoEDims(
            num_experts=512,
            top_k=10,
            hidden_dim=512,
            shared_hidden_dim=512,
            shared_gate=True,
            # As router_aux_loss_coef in its config.json.
            balance_loss_weight=0.001,
        ),
    ),
}


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec of `config.flavor` with the configured attention."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)


def spec_of(dims: Qwen3NextDims, flavor: str) -> ModelSpec:
    """Return the spec of any dimensions."""
    spec = decoder_model_spec(
        dims,
        name="qwen3_next",
        flavor=flavor,
        norm=_NORM,
        hugging_face=_hugging_face(dims),
    )
    # Weights of zero-centered norms are decayed, as in the release, so that they do not grow.
    return replace(spec, no_decay=("*embeddings*", "*A_log*", "*dt_bias*", "*head_norm*"))


def dims_of_hugging_face(values: Mapping[str, Any]) -> Qwen3NextDims:
    """Read the dimensions from a config.json. Raises ConfigError with everything unsupported."""
    config = HuggingFaceConfig(values)
    named_architecture(values, ARCHITECTURES)
    sizes = read_facts(_FACTS, config)
    theta, _ = read_rope(config, 10000.0, scaled=(), is_partial=True)
    # Every block has experts.
    config.only("decoder_sparse_step", 1)
    config.only("mlp_only_layers", [], None)
    config.only("use_sliding_window", False)
    config.ignore("intermediate_size", "sliding_window", "max_window_layers")
    config.ignore("full_attention_interval", "num_local_experts")
    moe: dict[str, Any] = {
        # transformers 5 writes the second name.
        "num_experts": config.size("num_experts", config.given("num_local_experts") or 512),
        "top_k": config.size("num_experts_per_tok", 10),
        "hidden_dim": config.size("moe_intermediate_size", 512),
        "shared_hidden_dim": config.size("shared_expert_intermediate_size", 512),
        "normalize_weights": config.flag("norm_topk_prob", default=True),
        "shared_gate": True,
    }
    rest: dict[str, Any] = {
        **{name: config.size(name, default) for name, default in _LINEAR.items()},
        "linear_kernel_size": config.size("linear_conv_kernel_dim", 4, least=2),
        "head_dim": config.size("head_dim", 256),
        "rotated_share": rotated_share(config, 0.25),
        "full_attention_interval": _interval(config, sizes["num_layers"]),
    }
    config.check()
    return Qwen3NextDims(**sizes, **rest, moe=MoEDims(**moe), rope_theta=theta)


def _interval(config: HuggingFaceConfig, num_layers: int) -> int:
    """Read the interval of layers with attention."""
    kinds = config.given("layer_types")
    if kinds is None:
        return config.integer("full_attention_interval", 4)
    if isinstance(kinds, Sequence):
        for interval in range(1, num_layers + 1):
            if list(kinds) == _layer_types(num_layers, interval):
                return interval
    config.problems.append(
        f"layer_types is {kinds!r:.100}, and only full_attention in the last layer of each of a "
        "fixed number, and linear_attention in the others, is supported"
    )
    return 1


def _layer_types(num_layers: int, interval: int) -> list[str]:
    return [
        "full_attention" if is_full else "linear_attention"
        for is_full in _is_full(num_layers, interval)
    ]


def _hugging_face(dims: Qwen3NextDims) -> HuggingFaceModel | str:
    values = _hugging_face_config(dims)
    if problem := export_problem(values, dims, dims_of_hugging_face):
        return problem
    return HuggingFaceModel(
        config=values,
        keys=decoder_hugging_face_keys(
            dims.layers, tied_embeddings=dims.tied_embeddings, experts=_EXPERTS
        ),
        # As in transformers, weights of multi-token prediction are not loaded.
        ignored=(*ignored_keys(tied_embeddings=dims.tied_embeddings), "mtp.*"),
        differences=lambda config: differences(dims, dims_of_hugging_face(config)),
    )


def _hugging_face_config(dims: Qwen3NextDims) -> dict[str, Any]:
    moe = dims.moe
    return {
        "architectures": list(ARCHITECTURES),
        "model_type": "qwen3_next",
        **write_facts(_FACTS, dims),
        "head_dim": dims.head_dim,
        "partial_rotary_factor": dims.rotated_share,
        **rope_values(dims.rope_theta, None),
        "full_attention_interval": dims.full_attention_interval,
        "layer_types": _layer_types(dims.num_layers, dims.full_attention_interval),
        **{name: getattr(dims, name) for name in _LINEAR},
        "linear_conv_kernel_dim": dims.linear_kernel_size,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.hidden_dim,
        "shared_expert_intermediate_size": moe.shared_hidden_dim,
        "norm_topk_prob": moe.normalize_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
