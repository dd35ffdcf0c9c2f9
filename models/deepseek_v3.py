"""DeepSeek-V3 (arXiv:2412.19437), DeepSeek-V2 (arXiv:2405.04434) and Kimi K2 (arXiv:2507.20534):
dimensions, flavors, module and initial weights."""

from collections.abc import Mapping
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
from torchtitan_lite.nn.hugging_face.rope import read_rope, rope_values
from torchtitan_lite.nn.latent import Latent
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.rope import Rope, YarnScaling
from torchtitan_lite.nn.spec import HuggingFaceModel, ModelSpec

_V2, _V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
ARCHITECTURES = {_V3: "deepseek_v3", _V2: "deepseek_v2"}
"""Architectures in transformers that `dims_of_hugging_face` supports."""
_FACTS = decoder_facts()
_MAX_DEPTH = 4
"""Layers for multi-token prediction that a folder may have."""
_NORM_EPS = 1e-6
"""Of the norms of latents in transformers, whatever that of the other norms is."""
_ATTENTION = {
    name: name for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
}


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Dims:
    """The dimensions of one flavor."""

    dim: int
    num_layers: int
    num_dense_layers: int
    """First layers, which have a feed-forward of width `hidden_dim` in place of experts."""
    num_heads: int
    hidden_dim: int
    moe: MoEDims
    q_lora_rank: int | None = None
    """Width of the queries' latent. Unset: queries are projections of the input."""
    kv_lora_rank: int = 512
    """Width of the latent of keys and values."""
    qk_nope_head_dim: int = 128
    """Width of a query or key without rotation."""
    qk_rope_head_dim: int = 64
    """Width of a query or key with rotation."""
    v_head_dim: int = 128
    """Width of a value."""
    vocab_size: int = 129280
    pad_token_id: int | None = None
    """Token whose embedding gets no gradient as an input."""
    norm_eps: float = 1e-6
    latent_norm_eps: float = _NORM_EPS
    """Of the norms of latents."""
    rope_theta: float = 10000.0
    rope_scaling: YarnScaling | None = None
    max_seq_len: int = 163840
    mtp_depth: int = 0
    """Tokens beyond the next that training predicts (multi-token prediction)."""
    mtp_loss_weight: float = 0.3
    """Weight of the mean loss of these predictions; 0.3, later 0.1, in the report (section 4.2)."""
    attention_backend: Backend = "sdpa"
    document_mask: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ConfigError(
                f"num_dense_layers ({self.num_dense_layers}) must be between 0 and num_layers "
                f"({self.num_layers})."
            )
        if self.num_layers < 1 or self.mtp_depth < 0 or self.mtp_loss_weight < 0:
            raise ConfigError(
                f"num_layers ({self.num_layers}) must be positive, and mtp_depth "
                f"({self.mtp_depth}) and mtp_loss_weight ({self.mtp_loss_weight}) at least 0."
            )
        # Raises ConfigError for sizes that do not fit.
        _ = self.attention

    @property
    def attention(self) -> Latent:
        """The attention of every layer."""
        return Latent(
            num_heads=self.num_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            nope_head_dim=self.qk_nope_head_dim,
            v_head_dim=self.v_head_dim,
            rotation=Rope(
                head_dim=self.qk_rope_head_dim, theta=self.rope_theta, scaling=self.rope_scaling
            ),
            norm_eps=self.latent_norm_eps,
        )

    @property
    def layers(self) -> list[DecoderLayer]:
        """All layers."""
        dense = DecoderLayer(
            attention=self.attention, feed_forward=Dense(hidden_dim=self.hidden_dim)
        )
        sparse = replace(dense, feed_forward=self.moe)
        num_sparse = self.num_layers - self.num_dense_layers
        return [dense] * self.num_dense_layers + [sparse] * num_sparse

    @property
    def prediction_layers(self) -> list[DecoderLayer]:
        """The blocks of multi-token prediction, which are like the last layer."""
        return self.layers[-1:] * self.mtp_depth

    @property
    def num_kv_heads(self) -> int:
        """Each query head has keys and values of its own."""
        return self.num_heads

    @property
    def tied_embeddings(self) -> bool:
        """Embedding and output have weights of their own."""
        return False


_DEBUG = DeepseekV3Dims(
    dim=256,
    num_layers=6,
    num_dense_layers=1,
    num_heads=16,
    hidden_dim=1024,
    moe=MoEDims(
        num_experts=8, top_k=3, hidden_dim=256, shared_hidden_dim=512, normalize_weights=False
    ),
    vocab_size=2048,
    norm_eps=1e-5,
    max_seq_len=16384,
)
_V2_ROPE = YarnScaling(factor=40.0, original_max_position=4096, mscale=0.707, mscale_all_dim=0.707)
_V3_ROPE = YarnScaling(factor=40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0)
_671B = DeepseekV3Dims(
    dim=7168,
    num_layers=61,
    num_dense_layers=3,
    num_heads=128,
    hidden_dim=18432,
    moe=MoEDims(
        num_experts=256,
        top_k=8,
        hidden_dim=2048,
        shared_hidden_dim=2048,
        score="sigmoid",
        num_groups=8,
        top_groups=4,
        route_scale=2.5,
        # Section 4.2 of the report.
        balance_loss_weight=0.0001,
        bias_update_rate=0.001,
    ),
    q_lora_rank=1536,
    rope_scaling=_V3_ROPE,
)

FLAVORS = {
    # 2 M parameters with everything that the large ones have.
    "tiny": DeepseekV3Dims(
        dim=128,
        num_layers=4,
        num_dense_layers=1,
        num_heads=4,
        hidden_dim=384,
        moe=MoEDims(
            num_experts=8,
            top_k=2,
            hidden_dim=96,
            shared_hidden_dim=96,
            score="sigmoid",
            num_groups=4,
            top_groups=2,
            route_scale=2.5,
            balance_loss_weight=0.0001,
            bias_update_rate=0.001,
        ),
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        vocab_size=2048,
        document_mask=True,
    ),
    # Without YaRN, as torchtitan trains it on sequences of up to 4,096 tokens.
    "debugmodel": _DEBUG,
    "debugmodel_flex_attn": replace(_DEBUG, attention_backend="flex", document_mask=True),
    # DeepSeek-V2-Lite.
    "16B": DeepseekV3Dims(
        dim=2048,
        num_layers=27,
        num_dense_layers=1,
        num_heads=16,
        hidden_dim=10944,
        moe=MoEDims(
            num_experts=64,
            top_k=6,
            hidden_dim=1408,
            shared_hidden_dim=2816,
            normalize_weights=False,
            balance_loss_weight=0.001,
        ),
        vocab_size=102400,
        rope_scaling=_V2_ROPE,
    ),
    # DeepSeek-V2.
    "236B": DeepseekV3Dims(
        dim=5120,
        num_layers=60,
        num_dense_layers=1,
        num_heads=128,
        hidden_dim=12288,
        moe=MoEDims(
            num_experts=160,
            top_k=6,
            hidden_dim=1536,
            shared_hidden_dim=3072,
            normalize_weights=False,
            num_groups=8,
            top_groups=3,
            group_score="max",
            route_scale=16.0,
            balance_loss_weight=0.003,
        ),
        q_lora_rank=1536,
        vocab_size=102400,
        rope_scaling=_V2_ROPE,
    ),
    "671B": _671B,
    # Kimi K2.
    "kimi_k2": replace(
        _671B,
        num_dense_layers=1,
        num_heads=64,
        moe=replace(_671B.moe, num_experts=384, num_groups=1, top_groups=1, route_scale=2.827),
        vocab_size=163840,
        rope_theta=50000.0,
        rope_scaling=replace(_V3_ROPE, factor=32.0, beta_fast=1.0),
        max_seq_len=131072,
    ),
}


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec of `config.flavor` with the configured attention."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)


def spec_of(dims: DeepseekV3Dims, flavor: str) -> ModelSpec:
    """Return the spec of any dimensions."""
    return decoder_model_spec(
        dims,
        name="deepseek_v3",
        flavor=flavor,
        prediction_layers=dims.prediction_layers,
        prediction_loss_weight=dims.mtp_loss_weight,
        torchtitan_keys=decoder_torchtitan_keys(dims.layers, dims.attention.torchtitan_keys()),
        hugging_face=_hugging_face(dims),
    )


def dims_of_hugging_face(values: Mapping[str, Any]) -> DeepseekV3Dims:
    """Read the dimensions from a config.json. Raises ConfigError with everything unsupported."""
    config = HuggingFaceConfig(values)
    is_v3 = named_architecture(values, ARCHITECTURES) == _V3
    sizes = read_facts(_FACTS, config)
    config.only("num_key_value_heads", sizes["num_heads"], None)
    config.only("tie_word_embeddings", False)
    config.only("rope_interleave", True)
    config.only("moe_layer_freq", 1)
    # Whether a run has multi-token prediction is a setting of its own; the others follow from the
    # latent attention.
    config.ignore("num_nextn_predict_layers", "num_mtp_layers", "head_dim", "qk_head_dim")
    config.only("scoring_func", "sigmoid" if is_v3 else "softmax")
    del sizes["num_kv_heads"], sizes["tied_embeddings"]
    theta, scaling = read_rope(config, 10000.0, scaled=("yarn",))
    num_shared = config.size("n_shared_experts", 1 if is_v3 else 2)
    width = config.size("moe_intermediate_size")
    moe: dict[str, Any] = {
        "num_experts": config.size("n_routed_experts"),
        "top_k": config.size("num_experts_per_tok"),
        "hidden_dim": width,
        "shared_hidden_dim": num_shared * width,
        "route_scale": config.number("routed_scaling_factor", 2.5 if is_v3 else 1.0),
    }
    if is_v3:
        config.only("topk_method", "noaux_tc")
        moe |= {
            "score": "sigmoid",
            "normalize_weights": config.flag("norm_topk_prob", default=True),
            "num_groups": config.integer("n_group", 8),
            "top_groups": config.integer("topk_group", 4),
        }
    else:
        config.only("norm_topk_prob", False)
        config.only("topk_method", "greedy", "group_limited_greedy")
        config.ignore("n_group", "topk_group")
        is_limited = config.given("topk_method") == "group_limited_greedy"
        moe |= {
            "normalize_weights": False,
            "num_groups": config.integer("n_group", 1) if is_limited else 1,
            "top_groups": config.integer("topk_group", 1) if is_limited else 1,
            "group_score": "max" if is_limited else "top2",
        }
    is_plain = config.has("q_lora_rank") and config.given("q_lora_rank") is None
    rest: dict[str, Any] = {
        "q_lora_rank": None if is_plain else config.size("q_lora_rank", 1536),
        **{ours: config.size(theirs) for ours, theirs in _ATTENTION.items()},
        "num_dense_layers": config.integer("first_k_dense_replace", 3 if is_v3 else 0, least=0),
        "hidden_dim": config.size("intermediate_size"),
    }
    config.check()
    assert scaling is None or isinstance(scaling, YarnScaling)
    return DeepseekV3Dims(
        **sizes, **rest, moe=MoEDims(**moe), rope_theta=theta, rope_scaling=scaling
    )


def _hugging_face(dims: DeepseekV3Dims) -> HuggingFaceModel | str:
    values = _hugging_face_config(dims)
    if problem := export_problem(values, dims, dims_of_hugging_face):
        return problem
    bias = "gate.e_score_correction_bias" if dims.moe.score == "sigmoid" else None
    return HuggingFaceModel(
        config=values,
        # The model may have been imported from a folder without them.
        always_written=("num_nextn_predict_layers",) if dims.mtp_depth else (),
        keys=decoder_hugging_face_keys(
            dims.layers,
            tied_embeddings=False,
            has_predictions=dims.mtp_depth > 0,
            experts=expert_keys(
                "mlp",
                FEED_FORWARD,
                shared="shared_experts",
                bias=bias,
            ),
        ),
        # Of multi-token prediction: layers that are not trained here, and copies of the embedding
        # and the output.
        ignored=(*ignored_keys(tied_embeddings=False), *_prediction_layers(dims)),
        differences=lambda config: differences(dims, dims_of_hugging_face(config)),
    )


def _prediction_layers(dims: DeepseekV3Dims) -> tuple[str, ...]:
    """Return patterns of the keys of multi-token prediction that are not loaded."""
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    return tuple(
        f"model.layers.{dims.num_layers + depth}.{name}"
        for depth in range(max(dims.mtp_depth, _MAX_DEPTH))
        for name in (copies if depth < dims.mtp_depth else ("*",))
    )


def _hugging_face_config(dims: DeepseekV3Dims) -> dict[str, Any]:
    moe = dims.moe
    is_v3 = moe.score == "sigmoid"
    routing: dict[str, Any] = (
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True}
        if is_v3
        else {
            "scoring_func": "softmax",
            "topk_method": "greedy" if moe.num_groups == 1 else "group_limited_greedy",
        }
    )
    return {
        "architectures": [_V3 if is_v3 else _V2],
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        **write_facts(_FACTS, dims),
        "q_lora_rank": dims.q_lora_rank,
        **{theirs: getattr(dims, ours) for ours, theirs in _ATTENTION.items()},
        "first_k_dense_replace": dims.num_dense_layers,
        "intermediate_size": dims.hidden_dim,
        "moe_layer_freq": 1,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_hidden_dim // moe.hidden_dim,
        "moe_intermediate_size": moe.hidden_dim,
        "num_experts_per_tok": moe.top_k,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "norm_topk_prob": moe.normalize_weights,
        "routed_scaling_factor": moe.route_scale,
        **routing,
        "num_nextn_predict_layers": dims.mtp_depth,
        **rope_values(dims.rope_theta, dims.rope_scaling),
    }
