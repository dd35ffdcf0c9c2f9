"""Each key of a config.json is used, irrelevant, or refused by name; the config.json of popular
releases, with the keys that they have, are read."""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import version
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.harness.ranks import REPOSITORY
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.models import families, family, hugging_face_dims
from torchtitan_lite.models.auto.dims import ARCHITECTURES as AUTO
from torchtitan_lite.models.auto.dims import AutoDims
from torchtitan_lite.models.auto.missing_parts import _MODEL_TYPES
from torchtitan_lite.nn.hugging_face.config import HuggingFaceConfig, is_irrelevant
from torchtitan_lite.nn.hugging_face.facts import Architecture

_ROPE_3_1 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _release(
    name: str, model_type: str, sizes: tuple[int, int, int, int, int, int], **more: Any
) -> dict[str, Any]:
    """Return what most releases have. `sizes`: width, features, layers, heads, key/value heads,
    vocabulary."""
    dim, hidden, layers, heads, kv_heads, vocab = sizes
    return {
        "architectures": [name],
        "model_type": model_type,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": dim,
        "initializer_range": 0.02,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "vocab_size": vocab,
        **more,
    }


RELEASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 2 7B": (
        _release(
            "LlamaForCausalLM",
            "llama",
            (4096, 11008, 32, 32, 32, 32000),
            _name_or_path="llama-2-7b-hf",
            max_position_embeddings=4096,
            pretraining_tp=1,
            rms_norm_eps=1e-5,
            rope_scaling=None,
        ),
        {"rope_theta": 10000.0, "max_seq_len": 4096},
    ),
    "Llama 3.1 8B": (
        _release(
            "LlamaForCausalLM",
            "llama",
            (4096, 14336, 32, 32, 8, 128256),
            attention_bias=False,
            eos_token_id=[128001, 128008, 128009],
            max_position_embeddings=131072,
            mlp_bias=False,
            pretraining_tp=1,
            rms_norm_eps=1e-5,
            rope_scaling=_ROPE_3_1,
            rope_theta=500000.0,
        ),
        {"rope_theta": 500000.0, "num_kv_heads": 8},
    ),
    "Llama 3.2 1B": (
        _release(
            "LlamaForCausalLM",
            "llama",
            (2048, 8192, 16, 32, 8, 128256),
            attention_bias=False,
            head_dim=64,
            max_position_embeddings=131072,
            mlp_bias=False,
            pretraining_tp=1,
            rms_norm_eps=1e-5,
            rope_scaling=_ROPE_3_1 | {"factor": 32.0},
            rope_theta=500000.0,
            tie_word_embeddings=True,
            unsloth_fixed=True,
            pad_token_id=128004,
        ),
        {"tied_embeddings": True, "pad_token_id": 128004},
    ),
    "SmolLM2 135M": (
        _release(
            "LlamaForCausalLM",
            "llama",
            (576, 1536, 30, 9, 3, 49152),
            attention_bias=False,
            is_llama_config=True,
            max_position_embeddings=8192,
            mlp_bias=False,
            pretraining_tp=1,
            rms_norm_eps=1e-5,
            rope_interleaved=False,
            rope_scaling=None,
            rope_theta=100000,
            tie_word_embeddings=True,
            **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        ),
        {"rope_theta": 100000.0},
    ),
    "Qwen2.5 7B": (
        _release(
            "Qwen2ForCausalLM",
            "qwen2",
            (3584, 18944, 28, 28, 4, 152064),
            max_position_embeddings=131072,
            max_window_layers=28,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            sliding_window=131072,
            use_mrope=False,
            use_sliding_window=False,
        ),
        {"bias": True, "max_seq_len": 131072},
    ),
    "Qwen3 0.6B": (
        _release(
            "Qwen3ForCausalLM",
            "qwen3",
            (1024, 3072, 28, 16, 8, 151936),
            attention_bias=False,
            head_dim=128,
            max_position_embeddings=40960,
            max_window_layers=28,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=None,
            tie_word_embeddings=True,
            use_sliding_window=False,
        ),
        {"head_dim": 128},
    ),
    "Qwen3 30B-A3B": (
        _release(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            (2048, 6144, 48, 32, 4, 151936),
            attention_bias=False,
            decoder_sparse_step=1,
            head_dim=128,
            max_position_embeddings=40960,
            max_window_layers=48,
            mlp_only_layers=[],
            moe_intermediate_size=768,
            norm_topk_prob=True,
            num_experts=128,
            num_experts_per_tok=8,
            output_router_logits=False,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.001,
            sliding_window=None,
            use_sliding_window=False,
        ),
        {"num_layers": 48},
    ),
    "Mistral 7B v0.1": (
        _release(
            "MistralForCausalLM",
            "mistral",
            (4096, 14336, 32, 32, 8, 32000),
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            sliding_window=4096,
        ),
        {"window": 4096},
    ),
    "Mistral 7B v0.3": (
        _release(
            "MistralForCausalLM",
            "mistral",
            (4096, 14336, 32, 32, 8, 32768),
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            rope_theta=1000000.0,
            sliding_window=None,
        ),
        {"vocab_size": 32768},
    ),
    "Mixtral 8x7B": (
        _release(
            "MixtralForCausalLM",
            "mixtral",
            (4096, 14336, 32, 32, 8, 32000),
            max_position_embeddings=32768,
            num_experts_per_tok=2,
            num_local_experts=8,
            output_router_logits=False,
            rms_norm_eps=1e-5,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.02,
            sliding_window=None,
        ),
        {"rope_theta": 1000000.0},
    ),
    "gpt-oss 20b": (
        _release(
            "GptOssForCausalLM",
            "gpt_oss",
            (2880, 2880, 24, 64, 8, 201088),
            attention_bias=True,
            experts_per_token=4,
            head_dim=64,
            initial_context_length=4096,
            layer_types=["sliding_attention", "full_attention"] * 12,
            max_position_embeddings=131072,
            num_experts_per_tok=4,
            num_local_experts=32,
            output_router_logits=False,
            pad_token_id=199999,
            quantization_config={
                "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
                "quant_method": "mxfp4",
            },
            rms_norm_eps=1e-5,
            rope_scaling={
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            rope_theta=150000,
            router_aux_loss_coef=0.9,
            sliding_window=128,
            swiglu_limit=7.0,
        ),
        {"window": 128},
    ),
    "ERNIE 4.5 21B-A3B": (
        _release(
            "Ernie4_5_MoeForCausalLM",
            "ernie4_5_moe",
            (2560, 12288, 28, 20, 4, 103424),
            max_position_embeddings=131072,
            moe_capacity=[64, 64, 64],
            moe_gate="topk",
            moe_intermediate_size=1536,
            moe_k=6,
            moe_layer_end_index=27,
            moe_layer_interval=1,
            moe_layer_start_index=1,
            moe_num_experts=64,
            moe_num_shared_experts=2,
            moe_use_aux_free=True,
            num_nextn_predict_layers=1,
            pad_token_id=0,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            rope_theta=500000.0,
            tie_word_embeddings=True,
            use_bias=False,
        ),
        {"dense_layers": [0], "rotates_adjacent": True},
    ),
    "InternLM3 8B": (
        _release(
            "InternLM3ForCausalLM",
            "internlm3",
            (4096, 10240, 48, 32, 2, 128512),
            bias=False,
            head_dim=128,
            max_position_embeddings=32768,
            pad_token_id=2,
            qkv_bias=False,
            rms_norm_eps=1e-5,
            rope_scaling={"factor": 6.0, "rope_type": "dynamic"},
            rope_theta=50000000,
        ),
        {"rope_theta": 5e7},
    ),
    "Gemma 2B": (
        _release(
            "GemmaForCausalLM",
            "gemma",
            (2048, 16384, 18, 8, 1, 256000),
            attention_bias=False,
            head_dim=256,
            hidden_act="gelu",
            hidden_activation=None,
            max_position_embeddings=8192,
            pad_token_id=0,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=10000.0,
            tie_word_embeddings=True,
        ),
        {"activation": "gelu_tanh", "pad_token_id": 0},
    ),
    "SmolLM3 3B": (
        _release(
            "SmolLM3ForCausalLM",
            "smollm3",
            (2048, 11008, 36, 16, 4, 128256),
            attention_bias=False,
            layer_types=["full_attention"] * 36,
            max_position_embeddings=65536,
            max_window_layers=28,
            mlp_bias=False,
            no_rope_layer_interval=4,
            no_rope_layers=[1, 1, 1, 0] * 9,
            pad_token_id=128004,
            pretraining_tp=2,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=5000000.0,
            sliding_window=None,
            tie_word_embeddings=True,
            use_sliding_window=False,
        ),
        {"layers_without_rope": list(range(3, 36, 4))},
    ),
    "Granite 3.3 2B": (
        _release(
            "GraniteForCausalLM",
            "granite",
            (2048, 8192, 40, 32, 8, 49159),
            attention_bias=False,
            attention_multiplier=0.015625,
            embedding_multiplier=12.0,
            logits_scaling=8.0,
            max_position_embeddings=131072,
            mlp_bias=False,
            residual_multiplier=0.22,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            rope_theta=10000000.0,
            tie_word_embeddings=True,
        ),
        {"logits_divisor": 8.0},
    ),
    "Granite SWA 2B": (
        _release(
            "GraniteSWAForCausalLM",
            "granite_swa",
            (2560, 8192, 24, 20, 4, 100352),
            attention_bias=False,
            attention_multiplier=0.0078125,
            embedding_multiplier=12.0,
            layer_rope_theta=[0, 10000, 20000, 10000] * 6,
            layer_types=["full_attention", "sliding_attention"] * 12,
            logits_scaling=8.0,
            max_position_embeddings=8192,
            mlp_bias=False,
            residual_multiplier=0.22,
            rms_norm_eps=1e-5,
            rope_theta=30000.0,
            sliding_window=128,
            tie_word_embeddings=True,
        ),
        {
            "layers_without_rope": list(range(0, 24, 4)),
            "rope_theta": 20000.0,
            "windowed_rope": {"theta": 10000.0},
        },
    ),
    "Gemma 3 1B": (
        _release(
            "Gemma3ForCausalLM",
            "gemma3_text",
            (1152, 6912, 26, 4, 1, 262144),
            attention_bias=False,
            attn_logit_softcapping=None,
            cache_implementation="hybrid",
            final_logit_softcapping=None,
            head_dim=256,
            hidden_act=None,
            hidden_activation="gelu_pytorch_tanh",
            max_position_embeddings=32768,
            pad_token_id=0,
            query_pre_attn_scalar=256,
            rms_norm_eps=1e-6,
            rope_local_base_freq=10000,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=512,
            sliding_window_pattern=6,
            tie_word_embeddings=True,
        ),
        {"windowed_rope": {"theta": 10000.0}, "rope_theta": 1000000.0},
    ),
    "Phi-4 mini": (
        _release(
            "Phi3ForCausalLM",
            "phi3",
            (3072, 8192, 32, 24, 8, 200064),
            attention_bias=False,
            embd_pdrop=0.0,
            full_attn_mod=1,
            interpolate_factor=1,
            lm_head_bias=False,
            max_position_embeddings=131072,
            mlp_bias=False,
            original_max_position_embeddings=4096,
            pad_token_id=199999,
            partial_rotary_factor=0.75,
            resid_pdrop=0.0,
            rms_norm_eps=1e-5,
            rope_scaling={"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "su"},
            rope_theta=10000.0,
            sliding_window=262144,
            tie_word_embeddings=True,
        ),
        {"rotated_share": 0.75, "window": 262144},
    ),
    "Command R": (
        _release(
            "CohereForCausalLM",
            "cohere",
            (8192, 22528, 40, 64, 64, 256000),
            layer_norm_eps=1e-5,
            logit_scale=0.0625,
            max_position_embeddings=8192,
            model_max_length=131072,
            pad_token_id=0,
            rope_theta=8000000.0,
            use_qk_norm=False,
        ),
        {"logits_multiplier": 0.0625, "parallel": "shared_norm"},
    ),
    "DeepSeek-V2-Lite": (
        _release(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            (2048, 10944, 27, 16, 16, 102400),
            attention_bias=False,
            auto_map={"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
            aux_loss_alpha=0.001,
            first_k_dense_replace=1,
            kv_lora_rank=512,
            max_position_embeddings=163840,
            moe_intermediate_size=1408,
            moe_layer_freq=1,
            n_group=1,
            n_routed_experts=64,
            n_shared_experts=2,
            norm_topk_prob=False,
            num_experts_per_tok=6,
            pretraining_tp=1,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            rms_norm_eps=1e-6,
            rope_scaling={
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            rope_theta=10000,
            routed_scaling_factor=1.0,
            scoring_func="softmax",
            seq_aux=True,
            topk_group=1,
            topk_method="greedy",
            v_head_dim=128,
        ),
        {"num_dense_layers": 1},
    ),
    "GPT-J 6B": (
        {
            "activation_function": "gelu_new",
            "architectures": ["GPTJForCausalLM"],
            "attn_pdrop": 0.0,
            "bos_token_id": 50256,
            "embd_pdrop": 0.0,
            "eos_token_id": 50256,
            "gradient_checkpointing": False,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "model_type": "gptj",
            "n_embd": 4096,
            "n_head": 16,
            "n_inner": None,
            "n_layer": 28,
            "n_positions": 2048,
            "rotary": True,
            "rotary_dim": 64,
            "scale_attn_weights": True,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "tie_word_embeddings": False,
            "tokenizer_class": "GPT2Tokenizer",
            "use_cache": True,
            "vocab_size": 50400,
        },
        {"hidden_dim": 16384, "rotated_width": 64},
    ),
}


@pytest.mark.parametrize("release", RELEASES)
def test_the_config_json_of_a_release_is_read(release: str) -> None:
    values, wanted = RELEASES[release]
    _, dims = hugging_face_dims(values)
    assert {name: dims[name] for name in wanted} == wanted


@pytest.mark.parametrize("release", RELEASES)
def test_keys_that_are_not_understood_are_named_all_at_once(release: str) -> None:
    values, _ = RELEASES[release]
    more = {"mystery": 1, "a_twist": False, "absent_feature": None, "num_beams": 4}
    with pytest.raises(ConfigError) as caught:
        hugging_face_dims(values | more)
    expected = f"a_twist (False), mystery (1) of model_type '{values['model_type']}' is not"
    assert expected in str(caught.value)
    assert "absent_feature" not in str(caught.value) and "num_beams" not in str(caught.value)


def test_fields_of_the_base_class_are_irrelevant_at_their_defaults() -> None:
    config = PreTrainedConfig()
    names = {field.name for field in fields(PreTrainedConfig)}
    names |= config.to_dict().keys() | GenerationConfig._get_default_generation_params().keys()
    relevant = [name for name in names if not is_irrelevant(name, getattr(config, name, None))]
    # null, which is accepted for any key.
    assert [name for name in relevant if getattr(config, name, None) is not None] == []
    assert not is_irrelevant("is_encoder_decoder", True)
    assert not is_irrelevant("pruned_heads", {"0": [1]})


@pytest.mark.parametrize(
    ("release", "change", "message"),
    [
        ("Llama 3.1 8B", {"quantization_config": {"quant_method": "fp8"}}, "are quantized .fp8"),
        ("Llama 3.1 8B", {"is_encoder_decoder": True}, "is_encoder_decoder .True"),
        ("Mixtral 8x7B", {"decoder_sparse_step": 2}, "decoder_sparse_step .2. of model_type"),
        ("Qwen3 0.6B", {"layer_types": ["sliding_attention"] * 28}, "window is off"),
        ("SmolLM2 135M", {"rope_interleaved": True}, "rope_interleaved is True"),
        ("InternLM3 8B", {"bias": True}, "attention_bias is False and mlp_bias True"),
        ("ERNIE 4.5 21B-A3B", {"moe_norm_min": 0.1}, "moe_norm_min is 0.1"),
        ("Gemma 2B", {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ("Gemma 2B", {"use_bidirectional_attention": 0}, "use_bidirectional_attention is 0"),
        ("Gemma 3 1B", {"rope_parameters": {"rope_theta": 1.0}}, "rope_theta, and a table for"),
        ("Granite SWA 2B", {"layer_rope_theta": [1e4]}, "a number for each layer is needed"),
        ("Granite SWA 2B", {"layer_rope_theta": [-1] * 24}, "a number for each layer is needed"),
        (
            "Granite SWA 2B",
            {"layer_rope_theta": [1e4, 2e4, 3e4, 4e4] * 6},
            "one number for layers with a window and one for the others",
        ),
    ],
)
def test_features_that_are_not_supported_are_refused(
    release: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        hugging_face_dims(RELEASES[release][0] | change)


def test_settings_of_rope_have_the_priorities_of_transformers() -> None:
    values, _ = RELEASES["Llama 3.1 8B"]
    after = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    _, dims = hugging_face_dims(values | {"rope_parameters": after})
    assert dims["rope_scaling"]["low_freq_factor"] == 1.0 and dims["rope_theta"] == 500000.0
    _, dims = hugging_face_dims(values | {"rope_parameters": after, "rope_scaling": None})
    assert dims["rope_scaling"] == {"kind": "linear", "factor": 2.0}
    assert dims["rope_theta"] == 7.0
    short = {k: v for k, v in _ROPE_3_1.items() if not k.startswith("original")}
    _, dims = hugging_face_dims(values | {"rope_scaling": short})
    assert dims["rope_scaling"]["original_max_position"] == values["max_position_embeddings"]


_MODEL_TYPES_HERE = sorted(
    model_type
    for name in families()
    for model_type in getattr(family(name), "ARCHITECTURES", {}).values()
)

_WITH_DEFAULTS = [
    model_type
    for model_type in _MODEL_TYPES_HERE
    # The defaults of transformers are of no model that exists, and refused.
    if model_type not in ("deepseek_v2", "dots1", "glm4_moe", "llama4")
]
_POSITIONS = {"max_seq_len", "window", "chunk", "temperature.interval"}
"""Dimensions with which a model does not grow."""


def _all_values(model_type: str) -> dict[str, Any]:
    """Return a config.json with every key, at the default of transformers."""
    return json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))


def _needed_values(model_type: str) -> dict[str, Any]:
    """Return the values without which a config.json is refused: the sizes of a model."""
    with pytest.raises(ConfigError) as caught:
        hugging_face_dims({"model_type": model_type})
    keys = re.findall(r"(\w+) is absent, and a whole number", str(caught.value))
    assert len(keys) > 4
    values = _all_values(model_type)
    return {key: values[key] for key in keys}


@pytest.mark.parametrize("model_type", _WITH_DEFAULTS)
def test_absent_keys_mean_what_transformers_means(model_type: str) -> None:
    """transformers writes every key; folders of the hub, of other programs and releases do not."""
    few = {"model_type": model_type, **_needed_values(model_type)}
    assert hugging_face_dims(few) == hugging_face_dims(_all_values(model_type))


@pytest.mark.parametrize("model_type", _WITH_DEFAULTS)
def test_a_wrong_size_is_the_only_problem(model_type: str) -> None:
    sizes = _needed_values(model_type)
    for key in sizes:
        only = f"built here: {key} is '8', and a whole number above 0 is needed[.]$"
        with pytest.raises(ConfigError, match=only):
            hugging_face_dims({"model_type": model_type, **sizes, key: "8"})


@pytest.mark.parametrize("model_type", _WITH_DEFAULTS)
def test_sizes_that_no_machine_holds_are_refused_at_once(model_type: str) -> None:
    """Building such a model would not end."""
    values, needed = _all_values(model_type), _needed_values(model_type)
    # A null may be a size, too.
    keys = [key for key, value in values.items() if value is None or type(value) is int]
    for key, size in itertools.product(keys, (10**12, 10**30)):
        dims, error = {}, ""
        try:
            _, dims = hugging_face_dims(values | {key: size})
        except ConfigError as caught:
            error = str(caught)
        if re.match(f"config.json: {key} is {size}, and at most [0-9,]+ fit into the .* GB", error):
            continue
        read = {name for name, value in _integers(dims) if value >= 10**11}
        assert read <= _POSITIONS and (read or key not in needed), f"use config.size({key!r})"


def _integers(dims: dict[str, Any], start: str = "") -> Iterator[tuple[str, int]]:
    for name, value in dims.items():
        if isinstance(value, dict):
            yield from _integers(value, f"{start}{name}.")
        elif type(value) is int:
            yield f"{start}{name}", value


@pytest.mark.parametrize(
    "model_type", ["ernie4_5", "granite_swa", "iquestcoder", "llama", "seed_oss"]
)
def test_null_key_value_heads_are_as_many_as_query_heads(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, num_key_value_heads=None)
    values = json.loads(config.to_json_string(use_diff=False)) | {"num_key_value_heads": None}
    _, dims = hugging_face_dims(values)
    assert dims["num_kv_heads"] == config.num_key_value_heads == config.num_attention_heads


@pytest.mark.parametrize("row", [row for row in AUTO if row.experts], ids=lambda row: row.name)
def test_another_activation_of_experts_is_refused(row: Architecture) -> None:
    values = json.loads(AutoConfig.for_model(row.model_type).to_json_string(use_diff=False))
    with pytest.raises(ConfigError, match="hidden_act is 'gelu', and only 'silu'"):
        hugging_face_dims(values | {"hidden_act": "gelu"})


def test_numbers_are_no_flags() -> None:
    config = HuggingFaceConfig({"a": 1, "b": 1, "c": True, "d": None})
    config.only("a", 1.0)
    config.only("b", True)
    config.only("c", 1)
    config.only("d", None, 3)
    assert [problem.split(" ")[0] for problem in config.problems] == ["b", "c"]


def test_the_model_type_decides() -> None:
    values, _ = RELEASES["Llama 3.1 8B"]
    expected = hugging_face_dims(values)
    assert expected[0] == "llama3"
    assert hugging_face_dims(values | {"architectures": ["MistralForCausalLM"]}) == expected
    assert hugging_face_dims(values | {"architectures": None}) == expected
    for other in (["LlamaForSequenceClassification"], "LlamaForSequenceClassification"):
        with pytest.raises(ConfigError, match="'LlamaForSequenceClassification'.*Known are"):
            hugging_face_dims(values | {"architectures": other})
    code = {"auto_map": {"AutoConfig": "configuration_my.MyConfig"}}
    assert hugging_face_dims(values | code | {"model_type": "my_llama"}) == expected


@pytest.mark.parametrize("more", [{}, {"auto_map": {"AutoModel": "modeling_my.MyModel"}}])
@pytest.mark.parametrize("model_type", ["my_llama", "", None, 7, ["llama"]])
def test_a_known_architecture_beside_another_model_type_is_refused(
    model_type: Any, more: dict[str, Any]
) -> None:
    values = RELEASES["Llama 3.1 8B"][0] | more | {"model_type": model_type}
    with pytest.raises(
        ConfigError, match=r'^here/config.json: model_type = ".*" is not one of'
    ) as e:
        hugging_face_dims(values, "here/config.json")
    assert ('Did you mean "llama"?' in str(e.value)) == (model_type not in ("", None, 7))
    with pytest.raises(ConfigError, match="model_type 'gpt2'.* needs learned or sinusoidal"):
        hugging_face_dims(values | {"model_type": "gpt2"})


@pytest.mark.parametrize("model_type", _WITH_DEFAULTS)
def test_no_more_than_a_head_is_rotated(model_type: str) -> None:
    whole = _all_values(model_type)
    more = {"partial_rotary_factor": 1.5}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **more}}
    with pytest.raises(ConfigError):
        hugging_face_dims(whole | more | rope)


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("phi", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, and at most 1"),
        ("gpt_neox", {"rotary_pct": 4}, "rotary_pct is 4.0, and at most 1, the whole head"),
        ("minimax_m2", {"rotary_dim": 130}, "rotary_dim is 130, and at most 128, the width of a"),
        ("gptj", {"rotary_dim": 258}, "rotated_width .258. must be above 0 and at most 256"),
        ("gptj", {"rotary_dim": 63}, "rotated width of a head .63. must be even"),
    ],
)
def test_the_key_of_a_wrong_rotation_is_named(
    model_type: str, change: dict[str, Any], message: str
) -> None:
    values = _all_values(model_type) | {"rope_parameters": None}
    with pytest.raises(ConfigError, match=message):
        hugging_face_dims(values | change)


def test_a_given_width_of_the_rotation_is_exact() -> None:
    # 30 / 88 * 88 is below 30.
    values = _all_values("gptj") | {"n_embd": 352, "n_head": 4, "rotary_dim": 30}
    dims = AutoDims(**hugging_face_dims(values)[1])
    rotation = dims.attention(0).rotation
    assert rotation is not None and rotation.head_dim == 30


@pytest.mark.parametrize(
    ("release", "change", "message"),
    [
        ("Llama 3.1 8B", {"rope_tetha": 1.0}, "rope_tetha .1.0. of"),
        ("Llama 3.1 8B", {"head_dims": 128}, "head_dims .128; did you mean head_dim.. of"),
        (
            "Llama 3.1 8B",
            {"rope_scaling": {"rope_type": "linear", "facto": 4.0}},
            "facto .4.0; did you mean factor.. of RoPE .linear.",
        ),
    ],
)
def test_a_similar_key_that_is_absent_is_named_beside_an_unknown_one(
    release: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        hugging_face_dims(RELEASES[release][0] | change)


@pytest.mark.parametrize(
    ("release", "change", "message"),
    [
        (
            "Llama 3.1 8B",
            {"num_hidden_layers": 32.0},
            "32.0, and a whole number above 0 is .*: write 32",
        ),
        (
            "Llama 3.1 8B",
            {"num_hidden_layers": 2.5},
            "2.5, and a whole number above 0 is needed[.]",
        ),
        (
            "Llama 3.1 8B",
            {"num_hidden_layers": None},
            "absent, and a whole number above 0 is needed",
        ),
        ("Llama 3.1 8B", {"pad_token_id": 3.0}, "3.0, and a whole number is needed: write 3"),
        (
            "Qwen3 30B-A3B",
            {"num_experts": None, "num_local_experts": 8.0},
            "num_local_experts is 8.0",
        ),
        (
            "Llama 3.1 8B",
            {"rope_scaling": {**_ROPE_3_1, "original_max_position_embeddings": 2.5}},
            "2.5, and a whole number",
        ),
    ],
)
def test_whole_numbers_have_no_point_as_in_transformers(
    release: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        hugging_face_dims(RELEASES[release][0] | change)


def test_a_window_without_a_width_is_none() -> None:
    values = json.loads(
        AutoConfig.for_model(
            "qwen2", use_sliding_window=True, sliding_window=None, max_window_layers=0
        ).to_json_string(use_diff=False)
    )
    assert values["layer_types"] == ["full_attention"] * 32
    for more in ({}, {"layer_types": None}):
        _, dims = hugging_face_dims(values | more)
        assert "window" not in dims and "windowed_layers" not in dims


def test_the_length_of_pretraining_of_phi_3_has_a_default() -> None:
    factors = [1.0] * 48
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    values = json.loads(
        AutoConfig.for_model("phi3", max_position_embeddings=8192).to_json_string(use_diff=False)
    )
    del values["original_max_position_embeddings"]
    values["rope_parameters"] = rope | {"rope_theta": 1e4, "original_max_position_embeddings": 99}
    _, dims = hugging_face_dims(values)
    assert dims["rope_scaling"]["original_max_position"] == 4096


def test_what_an_unsupported_architecture_needs_is_named() -> None:
    values = {"architectures": ["MptForCausalLM"], "model_type": "mpt"}
    with pytest.raises(ConfigError, match=r"'mpt' .*needs ALiBi.*docs/models.md lists what"):
        hugging_face_dims(values)
    with pytest.raises(ConfigError, match='model_type = "new" is not one of arcee, '):
        hugging_face_dims({"architectures": ["NewForCausalLM"], "model_type": "new"})
    unsupported = [name for names in _MODEL_TYPES.values() for name in names.split()]
    assert len(set(unsupported)) == len(unsupported)
    assert set(unsupported) <= set(CONFIG_MAPPING)
    rows = {row.model_type for row in AUTO}
    assert rows & set(unsupported) == set(), "remove these rows from missing_parts.py"


def test_every_decoder_of_transformers_is_a_row_or_lacks_a_named_part() -> None:
    # Other versions have other architectures. CI runs this one, so that a new version of it comes
    # with new names here.
    pinned = f"transformers=={version('transformers')}"
    if pinned not in (REPOSITORY / "requirements-dev.txt").read_text().splitlines():
        pytest.skip("transformers is not the version of requirements-dev.txt")
    known = set(_MODEL_TYPES_HERE)
    unsupported = {name for names in _MODEL_TYPES.values() for name in names.split()}
    # The example of a row outside: tests/assets/new_family.
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - known - unsupported == {"cwm"}
    assert known & unsupported == set(), "remove these rows from missing_parts.py"
