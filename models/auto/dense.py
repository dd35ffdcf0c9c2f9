"""Architectures of transformers with a dense feed-forward block in every layer: one row of facts
each."""

from collections.abc import Sequence
from typing import Any

from torchtitan_lite.nn.decoder_hugging_face import (
    GATE_UP,
    USUAL_NAMES,
    HuggingFaceNames,
)
from torchtitan_lite.nn.hugging_face_config import HuggingFaceConfig
from torchtitan_lite.nn.hugging_face_facts import (
    ActivationOf,
    Architecture,
    Biases,
    Fact,
    Fixed,
    Given,
    HeadWidth,
    Parallel,
    ScoreScale,
    Value,
    decoder_facts,
)
from torchtitan_lite.nn.hugging_face_position_facts import (
    LayerRotations,
    LayersWithoutRope,
    LayerWindows,
    RopeInWindows,
    RotatedShare,
    Rotation,
    Window,
    but_each,
    is_late,
)
from torchtitan_lite.nn.norm import NormKind


def _is_without_rope(config: HuggingFaceConfig, dims: dict[str, Any], layer: int) -> bool:
    return layer in dims["layers_without_rope"]


def _has_window(config: HuggingFaceConfig, dims: dict[str, Any], layer: int) -> bool:
    return True


def _row(
    name: str, model_type: str, *facts: Fact, names: HuggingFaceNames = USUAL_NAMES
) -> Architecture:
    return Architecture(
        name=name,
        model_type=model_type,
        facts=(Given("model_type", model_type), *facts),
        names=names,
    )


def _own(**defaults: Any) -> Sequence[Fact]:
    """Return the facts of all decoders, for an architecture with facts of its own about activation
    and biases."""
    return decoder_facts(activation=None, attention_bias=None, mlp_bias=None, **defaults)


_ACTIVATION = ActivationOf()
_BIASES = Biases()
_ALL_BIASES = ("bias", "out_bias", "feed_forward_bias")
_MLP_BIAS = Biases("mlp_bias", ours=("feed_forward_bias",))
_LAYER_NORM = Given("norm", NormKind(subtracts_mean=True, bias=True))
_PLAIN = Given("gated", False)
_ROTATION = Rotation()
_TURNED_PAIRS = Given("rotates_adjacent", True)
_WIDTH = Value("hidden_dim", "intermediate_size")
_GEMMA = (
    Given("norm", NormKind(zero_centered=True)),
    Given("embedding_multiplier", lambda dims: dims["dim"] ** 0.5),
    Fixed("use_bidirectional_attention", None, False, is_written=False),
)
_COHERE = (
    *_own(norm_key="layer_norm_eps", norm_eps=1e-5, tied_embeddings=True, pad_token_id=0),
    _BIASES,
    HeadWidth(),
    _WIDTH,
    _ACTIVATION,
    Given("norm", NormKind(subtracts_mean=True)),
    Given("parallel", "shared_norm"),
    Value("logits_multiplier", "logit_scale", "number", 0.0625),
    _TURNED_PAIRS,
)
_GLM = (
    *_own(norm_eps=1.5625e-7, num_kv_heads=2, pad_token_id=151329),
    Value("bias", "attention_bias", "flag", default=True),
    HeadWidth(128),
    _WIDTH,
    _ACTIVATION,
    RotatedShare(0.5),
    _ROTATION,
    _TURNED_PAIRS,
)
DENSE = (
    _row(
        "ArceeForCausalLM",
        "arcee",
        *_own(norm_eps=1e-5),
        _BIASES,
        _MLP_BIAS,
        HeadWidth(),
        _WIDTH,
        ActivationOf(default="relu2"),
        _PLAIN,
        _ROTATION,
        names=HuggingFaceNames(renamed={"feed_forward.w1": "mlp.up_proj"}),
    ),
    _row(
        "CohereForCausalLM",
        "cohere",
        *_COHERE,
        Fixed("use_qk_norm", False),
        Rotation(500000.0),
    ),
    _row(
        "Cohere2ForCausalLM",
        "cohere2",
        *_COHERE,
        LayerWindows(4096, but_each(4), switch=None),
        RopeInWindows(),
        Rotation(),
        # Releases have these, with the only values that transformers knows.
        Fixed("use_parallel_block", True, is_written=False),
        Fixed("use_parallel_embedding", False, True, is_written=False),
        Fixed("use_embedding_sharing", True, is_written=False),
        Fixed("use_gated_activation", True, is_written=False),
        Fixed("use_qk_norm", False, is_written=False),
        Fixed("rotary_pct", 1.0, is_written=False),
        Fixed("position_embedding_type", "rope_gptj", is_written=False),
        Fixed("order_of_interleaved_layers", "local_attn_first", is_written=False),
        Fixed("layer_switch", 4, is_written=False),
    ),
    _row(
        "Ernie4_5ForCausalLM",
        "ernie4_5",
        *_own(norm_eps=1e-5, num_kv_heads=2, tied_embeddings=True, pad_token_id=0),
        Biases("use_bias", ours=_ALL_BIASES),
        HeadWidth(128),
        _WIDTH,
        _ACTIVATION,
        Rotation(500000.0),
        _TURNED_PAIRS,
    ),
    _row(
        "Exaone4ForCausalLM",
        "exaone4",
        *_own(norm_eps=1e-5, num_kv_heads=32),
        HeadWidth(),
        _WIDTH,
        _ACTIVATION,
        Given("norms", "after"),
        Given("qk_norm", True),
        LayerWindows(4096, but_each(4), switch=None),
        RopeInWindows(is_everywhere_without=True),
        _ROTATION,
    ),
    _row(
        "GemmaForCausalLM",
        "gemma",
        *_own(tied_embeddings=True, pad_token_id=0),
        _BIASES,
        HeadWidth(256),
        _WIDTH,
        _ROTATION,
        *_GEMMA,
        Given("activation", "gelu_tanh"),
        # Early releases name another activation, and mean this one.
        Fixed("hidden_act", "gelu_pytorch_tanh", "gelu"),
        Fixed("hidden_activation", "gelu_pytorch_tanh", None, is_written=False),
    ),
    _row(
        "Gemma3ForCausalLM",
        "gemma3_text",
        *_own(tied_embeddings=True, num_kv_heads=4, pad_token_id=0),
        _BIASES,
        HeadWidth(256),
        _WIDTH,
        *_GEMMA,
        ActivationOf("hidden_activation", "gelu_pytorch_tanh"),
        Given("norms", "both"),
        Given("qk_norm", True),
        ScoreScale("query_pre_attn_scalar", 256),
        LayerWindows(4096, but_each(6), switch=None),
        LayerRotations(1000000.0, 10000.0),
        Fixed("attn_logit_softcapping", None),
        Fixed("final_logit_softcapping", None),
    ),
    _row("GlmForCausalLM", "glm", *_GLM, names=HuggingFaceNames(fused=GATE_UP)),
    _row(
        "Glm4ForCausalLM",
        "glm4",
        *_GLM,
        Given("norms", "both"),
        names=HuggingFaceNames(
            fused=GATE_UP,
            renamed={
                "attention_out_norm": "post_self_attn_layernorm",
                "ffn_norm": "post_attention_layernorm",
                "ffn_out_norm": "post_mlp_layernorm",
            },
        ),
    ),
    _row(
        "GraniteForCausalLM",
        "granite",
        *_own(),
        _BIASES,
        _MLP_BIAS,
        HeadWidth(),
        _WIDTH,
        _ACTIVATION,
        _ROTATION,
        Value("embedding_multiplier", "embedding_multiplier", "number", 1.0),
        Value("residual_multiplier", "residual_multiplier", "number", 1.0),
        Value("attention_multiplier", "attention_multiplier", "number", 1.0),
        Value("logits_divisor", "logits_scaling", "number", 1.0),
    ),
    _row(
        "HeliumForCausalLM",
        "helium",
        *_own(norm_eps=1e-8, num_kv_heads=20, pad_token_id=3),
        Value("bias", "attention_bias", "flag", default=False),
        _MLP_BIAS,
        HeadWidth(128),
        _WIDTH,
        _ACTIVATION,
        Rotation(100000.0),
        _TURNED_PAIRS,
    ),
    _row(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        *_own(norm_eps=1e-5, pad_token_id=0),
        _BIASES,
        HeadWidth(),
        _WIDTH,
        _ACTIVATION,
        Given("qk_norm", True),
        Given("norms_rotated", True),
        _ROTATION,
        names=HuggingFaceNames(
            renamed={
                "attention.q_norm": "self_attn.query_layernorm",
                "attention.k_norm": "self_attn.key_layernorm",
            }
        ),
    ),
    _row(
        "MinistralForCausalLM",
        "ministral",
        *_own(num_kv_heads=8),
        HeadWidth(),
        _WIDTH,
        _ACTIVATION,
        LayerWindows(4096, _has_window, switch=None),
        _ROTATION,
    ),
    _row(
        "MistralForCausalLM",
        "mistral",
        *_own(num_kv_heads=8),
        HeadWidth(),
        _WIDTH,
        _ACTIVATION,
        Window(4096),
        _ROTATION,
    ),
    _row(
        "NemotronForCausalLM",
        "nemotron",
        *_own(norm_key="norm_eps", norm_eps=1e-5),
        _BIASES,
        _MLP_BIAS,
        HeadWidth(),
        _WIDTH,
        ActivationOf(default="relu2"),
        _PLAIN,
        Given("norm", NormKind(subtracts_mean=True, bias=True, zero_centered=True)),
        RotatedShare(0.5),
        _ROTATION,
        names=HuggingFaceNames(renamed={"feed_forward.w1": "mlp.up_proj"}),
    ),
    _row(
        "OlmoForCausalLM",
        "olmo",
        *_own(norm_key=None, norm_eps=1e-5, pad_token_id=1),
        _BIASES,
        HeadWidth(),
        _WIDTH,
        _ACTIVATION,
        Given("norm", NormKind(subtracts_mean=True, weight=False)),
        Fixed("clip_qkv", None),
        _ROTATION,
    ),
    _row(
        "Qwen2ForCausalLM",
        "qwen2",
        *_own(),
        Given("bias", True),
        HeadWidth(),
        _WIDTH,
        _ACTIVATION,
        LayerWindows(4096, is_late),
        _ROTATION,
    ),
    _row(
        "SeedOssForCausalLM",
        "seed_oss",
        *_own(num_kv_heads=8, pad_token_id=1),
        Value("bias", "attention_bias", "flag", default=True),
        Value("out_bias", "attention_out_bias", "flag", default=False),
        _MLP_BIAS,
        HeadWidth(128),
        _WIDTH,
        _ACTIVATION,
        _ROTATION,
    ),
    _row(
        "SmolLM3ForCausalLM",
        "smollm3",
        *_own(num_kv_heads=4, tied_embeddings=True, pad_token_id=128004),
        _BIASES,
        _MLP_BIAS,
        HeadWidth(),
        _WIDTH,
        _ACTIVATION,
        LayersWithoutRope(),
        LayerWindows(None, _is_without_rope),
        Rotation(2000000.0),
    ),
    _row(
        "StableLmForCausalLM",
        "stablelm",
        *_own(norm_key="layer_norm_eps", norm_eps=1e-5, num_kv_heads=32),
        Value("bias", "use_qkv_bias", "flag", default=False),
        _WIDTH,
        _ACTIVATION,
        _LAYER_NORM,
        Parallel("shared_norm", "use_parallel_residual", default=False),
        Fixed("qk_layernorm", False),
        RotatedShare(0.25),
        _ROTATION,
    ),
    _row(
        "Starcoder2ForCausalLM",
        "starcoder2",
        *_own(norm_key="norm_epsilon", norm_eps=1e-5, num_kv_heads=2, tied_embeddings=True),
        Biases("use_bias", default=True, ours=_ALL_BIASES),
        HeadWidth(),
        _WIDTH,
        ActivationOf(default="gelu_pytorch_tanh"),
        _PLAIN,
        _LAYER_NORM,
        Window(None),
        _ROTATION,
        Fixed("mlp_type", "default", is_written=False),
        Fixed("norm_type", "layer_norm", is_written=False),
        names=HuggingFaceNames(
            renamed={"feed_forward.w1": "mlp.c_fc", "feed_forward.w2": "mlp.c_proj"}
        ),
    ),
)
