"""Architectures of transformers with experts: one row of facts each."""

from typing import Any

from torchtitan_lite.models.auto.rows import (
    ADJACENT_PAIRS,
    BIASES,
    GRANITE_MULTIPLIERS,
    ROTATION,
    SILU,
    WIDTH,
    base_facts,
    row,
)
from torchtitan_lite.nn.hugging_face.config import HuggingFaceConfig
from torchtitan_lite.nn.hugging_face.expert_facts import (
    LayerBlocks,
    NumDenseLayers,
    SharedExperts,
    SparseLayers,
    SparseRange,
)
from torchtitan_lite.nn.hugging_face.facts import (
    Fixed,
    Given,
    HeadWidth,
    Ignored,
    Switch,
    Value,
    decoder_facts,
)
from torchtitan_lite.nn.hugging_face.names import (
    FEED_FORWARD,
    QK_LAYERNORM,
    HuggingFaceNames,
    expert_keys,
    stacked_expert_keys,
)
from torchtitan_lite.nn.hugging_face.position_facts import (
    LayerRotations,
    LayerWindows,
    RopeInWindows,
    RotatedShare,
    RotatedWidth,
    Rotation,
    SameLayers,
    all_but_last_of_each,
    from_layer,
)
from torchtitan_lite.nn.spec import HuggingFaceForm, HuggingFaceKey

_SIGMOIDS = (
    # As DeepSeek-V3, with the bias that balances the experts.
    Given("moe.score", "sigmoid"),
    Value("moe.hidden_dim", "moe_intermediate_size"),
    Value("moe.num_groups", "n_group", default=1),
    Value("moe.top_groups", "topk_group", default=1),
    Value("moe.route_scale", "routed_scaling_factor", "number", 1.0),
)
_BALANCED = expert_keys(
    "mlp", FEED_FORWARD, shared="shared_experts", bias="gate.e_score_correction_bias"
)


def _is_flint_window(config: HuggingFaceConfig, dims: dict[str, Any], layer: int) -> bool:
    return layer > 1 and layer % 4 != 1 and layer != dims["num_layers"] - 1


def _is_early_and_even(config: HuggingFaceConfig, dims: dict[str, Any], layer: int) -> bool:
    return layer % 2 == 0 and layer < config.integer("max_window_layers", 28, least=0)


def _in_no_layer(config: HuggingFaceConfig, dims: dict[str, Any], layer: int) -> bool:
    return False


_GRANITE_EXPERTS = stacked_expert_keys(
    "block_sparse_moe",
    ("input_linear.weight", "output_linear.weight"),
    router="router.layer",
    shared=None,
    transposed=False,
)


def _shared_granite_experts() -> tuple[HuggingFaceKey, ...]:
    there = "model.layers.*.shared_mlp"
    forms = {
        "w1": HuggingFaceForm(key=f"{there}.input_linear.weight", part=(0, 2)),
        "w2": HuggingFaceForm(key=f"{there}.output_linear.weight"),
        "w3": HuggingFaceForm(key=f"{there}.input_linear.weight", part=(1, 2)),
    }
    return tuple(
        HuggingFaceKey(name=f"layers.*.feed_forward.shared.{name}.weight", forms=(form,))
        for name, form in forms.items()
    )


_GRANITE = (
    *base_facts(),
    BIASES,
    HeadWidth(),
    SILU,
    ROTATION,
    *GRANITE_MULTIPLIERS,
    Value("moe.hidden_dim", "intermediate_size"),
    Value("moe.num_experts", "num_local_experts", default=8),
    Value("moe.top_k", "num_experts_per_tok", default=2),
)
_GRANITE_NAMES = HuggingFaceNames(
    in_memory={
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        "router.layer.weight": "router.weight",
    }
)
EXPERT_ROWS = (
    row(
        "AriaTextForCausalLM",
        "aria_text",
        *decoder_facts(attention_bias=None, pad_token_id=2),
        BIASES,
        HeadWidth(),
        ROTATION,
        Value("moe.hidden_dim", "intermediate_size"),
        Value("moe.num_experts", "moe_num_experts", default=8),
        Value("moe.top_k", "moe_topk", default=2),
        SharedExperts("moe_num_shared_experts", 2),
        names=HuggingFaceNames(
            in_memory={
                "experts.fc1.weight": "experts.gate_up_proj",
                "experts.fc2.weight": "experts.down_proj",
            }
        ),
        experts=stacked_expert_keys(
            "mlp",
            ("experts.fc1.weight", "experts.fc2.weight"),
            router="router",
            shared="shared_experts",
            transposed=True,
        ),
    ),
    row(
        "Dots1ForCausalLM",
        "dots1",
        *base_facts(num_kv_heads=32),
        BIASES,
        HeadWidth(),
        WIDTH,
        SILU,
        Given("qk_norm", "each_head"),
        LayerWindows(4096, from_layer(62), switch=None),
        *_SIGMOIDS,
        Value("moe.num_experts", "n_routed_experts"),
        Value("moe.top_k", "num_experts_per_tok"),
        Value("moe.normalize_weights", "norm_topk_prob", "flag", default=False),
        SharedExperts("n_shared_experts", None),
        NumDenseLayers("first_k_dense_replace", 0),
        Fixed("scoring_func", "sigmoid", "noaux_tc", is_written=False),
        Fixed("topk_method", "noaux_tc", is_written=False),
        Fixed("moe_layer_freq", 1, is_written=False),
        ROTATION,
        experts=_BALANCED,
    ),
    row(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        *base_facts(norm_eps=1e-5, num_kv_heads=4, tied_embeddings=True, pad_token_id=0),
        # Those of experts, too.
        Fixed("use_bias", False),
        HeadWidth(),
        WIDTH,
        SILU,
        Rotation(500000.0),
        ADJACENT_PAIRS,
        Value("moe.hidden_dim", "moe_intermediate_size", default=1536),
        Value("moe.num_experts", "moe_num_experts", default=64, former="num_experts"),
        Value("moe.top_k", "moe_k", default=6, former="num_experts_per_tok"),
        SharedExperts("moe_num_shared_experts", 2, least=0),
        SparseRange(),
        # The least sum of a token's weights: any smaller value is without effect.
        Fixed("moe_norm_min", 1e-12, is_written=False),
        Fixed("moe_gate", "topk", is_written=False),
        # transformers drops no token, always adds the bias, and does not load the layers of
        # multi-token prediction.
        Ignored("moe_capacity", "moe_use_aux_free", "num_nextn_predict_layers"),
        names=HuggingFaceNames(
            in_memory={
                "mlp.moe_statics.e_score_correction_bias": (
                    "mlp.gate.moe_statics.e_score_correction_bias"
                )
            },
            unused=("model.mtp_*",),
        ),
        experts=expert_keys(
            "mlp",
            FEED_FORWARD,
            shared="shared_experts",
            bias="moe_statics.e_score_correction_bias",
            has_bias_row=True,
        ),
    ),
    row(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        *base_facts(norm_eps=1e-5, num_kv_heads=32, pad_token_id=0),
        HeadWidth(),
        WIDTH,
        SILU,
        Given("qk_norm", "each_head"),
        LayerWindows(4096, all_but_last_of_each(4), switch=None),
        RopeInWindows(is_everywhere_without=True),
        Given("moe.score", "sigmoid"),
        Value("moe.hidden_dim", "moe_intermediate_size", default=1024),
        Value("moe.num_groups", "n_group", default=1),
        Value("moe.top_groups", "topk_group", default=1),
        Value("moe.route_scale", "routed_scaling_factor", "number", 2.5),
        Value("moe.num_experts", "num_experts", default=64, former="num_local_experts"),
        Value("moe.top_k", "num_experts_per_tok", default=8),
        Value("moe.normalize_weights", "norm_topk_prob", "flag", default=True),
        SharedExperts("num_shared_experts", 1),
        LayerBlocks("first_k_dense_replace", 1),
        ROTATION,
        Fixed("scoring_func", "sigmoid", is_written=False),
        Fixed("topk_method", "noaux_tc", is_written=False),
        Ignored("num_nextn_predict_layers", "num_mtp_layers"),
        names=HuggingFaceNames(
            in_memory={"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
            unused=("mtp.*",),
        ),
        experts=expert_keys(
            "mlp", FEED_FORWARD, shared="shared_experts", bias="e_score_correction_bias"
        ),
    ),
    row(
        "FlexOlmoForCausalLM",
        "flex_olmo",
        *base_facts(pad_token_id=100277),
        BIASES,
        HeadWidth(),
        SILU,
        Given("norms", "after"),
        Given("qk_norm", "all_heads"),
        Rotation(500000.0),
        Value("moe.hidden_dim", "intermediate_size"),
        Value("moe.num_experts", "num_experts", default=7, former="num_local_experts"),
        Value("moe.top_k", "num_experts_per_tok", default=5),
        Value("moe.normalize_weights", "norm_topk_prob", "flag", default=False),
        experts=expert_keys("mlp", FEED_FORWARD),
    ),
    row(
        "FlintForCausalLM",
        "flint",
        *base_facts(num_kv_heads=4),
        BIASES,
        HeadWidth(128),
        WIDTH,
        SILU,
        Given("qk_norm", "each_head"),
        Given("has_sinks", True),
        LayerWindows(513, _is_flint_window, switch=None),
        RopeInWindows(),
        ROTATION,
        Given("moe.score", "sigmoid"),
        Value("moe.hidden_dim", "moe_intermediate_size", default=512),
        Value("moe.shared_hidden_dim", "shared_expert_intermediate_size", default=1024),
        Value("moe.num_experts", "num_experts", default=256, former="num_local_experts"),
        Value("moe.top_k", "num_experts_per_tok", default=6),
        Value("moe.normalize_weights", "norm_topk_prob", "flag", default=True),
        SparseLayers((0, 1)),
        names=HuggingFaceNames(
            renamed={"attention.sinks.weight": "self_attn.softmax_offset"},
            in_memory={"softmax_offset": "sinks"},
        ),
        experts=expert_keys("mlp", FEED_FORWARD, shared="shared_expert"),
    ),
    row(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        *base_facts(norm_eps=1e-5, num_kv_heads=8),
        Value("bias", "attention_bias", "flag", default=False),
        HeadWidth(),
        WIDTH,
        SILU,
        Switch("qk_norm", "use_qk_norm", on="each_head", off=None, default=False),
        *_SIGMOIDS,
        Value("moe.num_experts", "n_routed_experts", default=128),
        Value("moe.top_k", "num_experts_per_tok", default=8),
        Value("moe.normalize_weights", "norm_topk_prob", "flag", default=True),
        SharedExperts("n_shared_experts", 1),
        NumDenseLayers("first_k_dense_replace", 1),
        RotatedShare(0.5),
        ROTATION,
        # Its layers are not loaded, as in transformers.
        Ignored("num_nextn_predict_layers", "num_mtp_layers"),
        names=HuggingFaceNames(num_unused_layers=1),
        experts=_BALANCED,
    ),
    row(
        "GraniteMoeForCausalLM",
        "granitemoe",
        *_GRANITE,
        names=_GRANITE_NAMES,
        experts=_GRANITE_EXPERTS,
    ),
    row(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        *_GRANITE,
        Value("moe.shared_hidden_dim", "shared_intermediate_size", default=0, least=0),
        names=_GRANITE_NAMES,
        experts=(*_GRANITE_EXPERTS, *_shared_granite_experts()),
    ),
    row(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        *base_facts(norm_eps=1e-5, pad_token_id=0),
        BIASES,
        HeadWidth(),
        SILU,
        Given("qk_norm", "each_head"),
        Given("norms_rotated", True),
        Rotation(has_alpha=True),
        Value("moe.hidden_dim", "intermediate_size"),
        Given("moe.shared_hidden_dim", lambda dims: dims["moe.hidden_dim"]),
        Value("moe.num_experts", "num_experts", former="num_local_experts"),
        Value("moe.top_k", "moe_topk", former="num_experts_per_tok"),
        names=HuggingFaceNames(renamed=QK_LAYERNORM),
        experts=expert_keys("mlp", FEED_FORWARD, shared="shared_mlp", router="gate.wg"),
    ),
    row(
        "MellumForCausalLM",
        "mellum",
        *base_facts(num_kv_heads=4),
        BIASES,
        HeadWidth(128),
        WIDTH,
        SILU,
        Given("qk_norm", "each_head"),
        LayerWindows(1024, _in_no_layer, switch=None),
        LayerRotations(500000.0, 10000.0, has_former_keys=False),
        Value("moe.hidden_dim", "moe_intermediate_size", default=896),
        Value("moe.num_experts", "num_experts", default=64, former="num_local_experts"),
        Value("moe.top_k", "num_experts_per_tok", default=8),
        Value("moe.normalize_weights", "norm_topk_prob", "flag", default=True),
        LayerBlocks("first_k_dense_replace", 0),
        # Its layers are not loaded, as in transformers.
        Ignored("num_nextn_predict_layers", "num_mtp_layers"),
        Ignored("mtp_layer_types", "mtp_mlp_layer_types"),
        names=HuggingFaceNames(unused=("mtp.*",)),
        experts=expert_keys("mlp", FEED_FORWARD),
    ),
    row(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        *base_facts(num_kv_heads=8),
        HeadWidth(128),
        SILU,
        Given("qk_norm", "all_heads"),
        RotatedWidth(),
        Rotation(5000000.0),
        Given("moe.score", "sigmoid"),
        Value("moe.hidden_dim", "intermediate_size"),
        Value("moe.num_experts", "num_local_experts", default=256),
        Value("moe.top_k", "num_experts_per_tok", default=8),
        Fixed("qk_norm_type", "per_layer", is_written=False),
        Fixed("use_qk_norm", True, is_written=False),
        Fixed("use_routing_bias", True, is_written=False),
        Fixed("scoring_func", "sigmoid", is_written=False),
        Fixed("shared_intermediate_size", 0, is_written=False),
        SameLayers("attn_type_list", 1),
        # Layers of multi-token prediction are not loaded, as in transformers.
        Ignored("num_mtp_modules", "mtp_transformer_layers"),
        # Of the linear attention and the shared experts that it does not have.
        Ignored("layernorm_full_attention_beta", "layernorm_linear_attention_beta"),
        Ignored("layernorm_mlp_beta", "shared_moe_mode", "mlp_intermediate_size"),
        names=HuggingFaceNames(
            in_memory={"block_sparse_moe.e_score_correction_bias": "mlp.e_score_correction_bias"}
        ),
        experts=expert_keys(
            "block_sparse_moe",
            {"w1": "w1", "w2": "w2", "w3": "w3"},
            bias="e_score_correction_bias",
        ),
    ),
    row(
        "OlmoeForCausalLM",
        "olmoe",
        *base_facts(norm_eps=1e-5, pad_token_id=1),
        BIASES,
        HeadWidth(),
        SILU,
        Given("qk_norm", "all_heads"),
        Fixed("clip_qkv", None),
        ROTATION,
        Value("moe.hidden_dim", "intermediate_size"),
        Value("moe.num_experts", "num_experts", default=64, former="num_local_experts"),
        Value("moe.top_k", "num_experts_per_tok", default=8),
        Value("moe.normalize_weights", "norm_topk_prob", "flag", default=False),
        experts=expert_keys("mlp", FEED_FORWARD),
    ),
    row(
        "SolarOpenForCausalLM",
        "solar_open",
        *base_facts(norm_eps=1e-5, num_kv_heads=8),
        Value("bias", "attention_bias", "flag", default=False),
        HeadWidth(128),
        SILU,
        *_SIGMOIDS,
        Value("moe.num_experts", "n_routed_experts", default=128),
        Value("moe.top_k", "num_experts_per_tok", default=8),
        Value("moe.normalize_weights", "norm_topk_prob", "flag", default=True),
        SharedExperts("n_shared_experts", 1),
        # No layer is dense.
        Ignored("intermediate_size", "first_k_dense_replace"),
        Rotation(1000000.0),
        experts=_BALANCED,
    ),
    row(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        *base_facts(num_kv_heads=16),
        Value("bias", "qkv_bias", "flag", default=True),
        HeadWidth(),
        WIDTH,
        SILU,
        LayerWindows(4096, _is_early_and_even),
        ROTATION,
        Value("moe.hidden_dim", "moe_intermediate_size", default=1408),
        Value("moe.shared_hidden_dim", "shared_expert_intermediate_size", default=5632),
        Given("moe.shared_gate", True),
        Value("moe.num_experts", "num_experts", default=60, former="num_local_experts"),
        Value("moe.top_k", "num_experts_per_tok", default=4),
        Value("moe.normalize_weights", "norm_topk_prob", "flag", default=False),
        SparseLayers(),
        experts=expert_keys(
            "mlp", FEED_FORWARD, shared="shared_expert", shared_gate="shared_expert_gate"
        ),
    ),
)
