"""Tiny models of transformers with random weights, in folders written by its `save_pretrained`.

Their sizes cover edge cases: grouped heads, a head width other than dim / heads, a vocabulary size
that no number of ranks divides, RoPE scaling from a context that is shorter than the samples.

transformers needs 3 s of CPU time to import. It is imported in the functions that call it, because
the ranks of a test import this module only for names.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import ByteLevelBPETokenizer
from torch import nn

from tests.harness.float64 import in_float64
from tests.harness.jobs import FIXTURE
from torchtitan_lite.checkpoint.loading import open_snapshot
from torchtitan_lite.checkpoint.snapshots import Snapshot, read_tensor
from torchtitan_lite.checkpoint.storage.base import open_parent_storage
from torchtitan_lite.models import hugging_face_model, model_spec, read_hugging_face_config
from torchtitan_lite.models.auto.dims import ARCHITECTURES
from torchtitan_lite.nn.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 517
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
_SCALED_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
_DEFAULT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 20000.0}
_LINEAR_ROPE: dict[str, Any] = {"rope_type": "linear", "factor": 3.0}


_WINDOWS: dict[str, Any] = {"sliding_window": 9, "sliding_window_pattern": 2}
_WHOLE = ["full_attention"] * 2


def _new_model(model_type: str, **sizes: Any) -> "PreTrainedModel":
    from transformers import AutoConfig, AutoModelForCausalLM

    # transformers adds defaults to the tables that it gets.
    config = AutoConfig.for_model(model_type, **deepcopy(sizes))
    return AutoModelForCausalLM.from_config(config)


def _llama(**more: Any) -> "PreTrainedModel":
    return _new_model("llama", **_COMMON, intermediate_size=80, **more)


def _qwen3(**more: Any) -> "PreTrainedModel":
    sizes: dict[str, Any] = {"intermediate_size": 80, "rope_parameters": _DEFAULT_ROPE}
    return _new_model("qwen3", **_COMMON, **sizes, **more)


def _qwen3_moe(**more: Any) -> "PreTrainedModel":
    sizes: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
    }
    return _new_model("qwen3_moe", **_COMMON, **sizes, rope_parameters=_DEFAULT_ROPE, **more)


def _qwen3_next(**more: Any) -> "PreTrainedModel":
    sizes: dict[str, Any] = {
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "initializer_range": 0.16,
        "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.25},
    }
    return _new_model("qwen3_next", **_COMMON | sizes | more)


def _mixtral(**more: Any) -> "PreTrainedModel":
    sizes: dict[str, Any] = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 40,
    }
    return _new_model("mixtral", **_COMMON, **sizes, rope_parameters=_DEFAULT_ROPE, **more)


def _deepseek(version: int, **more: Any) -> "PreTrainedModel":
    sizes: dict[str, Any] = {
        "num_key_value_heads": 6,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 14,
        "intermediate_size": 80,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "initializer_range": 0.16,
    }
    common = {name: value for name, value in _COMMON.items() if name != "head_dim"}
    sizes["rope_parameters"] = _YARN_ROPE
    return _new_model(f"deepseek_v{version}", **common | sizes | more)


def gpt_oss(**more: Any) -> "PreTrainedModel":
    """Return a model of this family with some sizes changed. Its widths consist of whole blocks of
    MXFP4."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 96,
        "sliding_window": 9,
        "rope_parameters": {
            **{name: _YARN_ROPE[name] for name in ("rope_type", "rope_theta", "factor")},
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    }
    return _new_model("gpt_oss", **_COMMON | sizes | more)


def _llama4(**more: Any) -> "PreTrainedModel":
    sizes: dict[str, Any] = {
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "intermediate_size": 40,
        "intermediate_size_mlp": 56,
        "attention_chunk_size": 9,
        "floor_scale": 7,
        "rope_parameters": _DEFAULT_ROPE,
    }
    return _new_model("llama4_text", **_COMMON | sizes | more)


def _dense(model_type: str, **more: Any) -> "PreTrainedModel":
    """Return a model of a row of `models/auto/` whose config.json has the usual names of sizes.
    Call `_new_model` for others."""
    sizes: dict[str, Any] = {"intermediate_size": 80, "pad_token_id": None}
    return _new_model(model_type, **_COMMON | sizes | {"rope_parameters": _DEFAULT_ROPE} | more)


def _renamed_llama(name: str, model_type: str, **more: Any) -> "PreTrainedModel":
    """Return a model whose class has the name that releases give, with code of their own, to
    transformers' Llama."""
    model = _dense(model_type, **more)
    model.__class__ = type(name, (type(model),), {})
    return model


_LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 20000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.0, 3.5, 5.0],
}


def _halves(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the factors of half a head."""
    return {name: rope[name][:2] for name in ("short_factor", "long_factor")}


_NEOX: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": None,
    "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.5},
}
_GPTJ: dict[str, Any] = {
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "rotary_dim": 6,
    "n_positions": 256,
    "layer_norm_epsilon": 3e-5,
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.2,
}
_SIGMOIDS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}


def _sparse(model_type: str, **more: Any) -> "PreTrainedModel":
    sizes: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
    if "n_routed_experts" not in more:
        sizes["num_experts"] = 4
    return _dense(model_type, **sizes, **more)


_FAMILIES: dict[str, Callable[[], "PreTrainedModel"]] = {
    "gpt_oss": gpt_oss,
    "llama4": lambda: _llama4(use_qk_norm=True),
    "llama4_some_experts": lambda: _llama4(
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        rope_parameters=_SCALED_ROPE,
    ),
    "llama": lambda: _llama(rope_parameters=_DEFAULT_ROPE, rms_norm_eps=3e-5),
    "llama_linear": lambda: _llama(rope_parameters=_DEFAULT_ROPE | _LINEAR_ROPE),
    "llama_dynamic": lambda: _llama(
        rope_parameters=_DEFAULT_ROPE | {"rope_type": "dynamic", "factor": 3.0}
    ),
    "llama_yarn": lambda: _llama(
        rope_parameters=_YARN_ROPE | {"mscale": None, "attention_factor": 1.3}
    ),
    "llama_tied_stretched": lambda: _llama(rope_parameters=_SCALED_ROPE, tie_word_embeddings=True),
    "llama_biased": lambda: _llama(
        rope_parameters=_DEFAULT_ROPE, attention_bias=True, mlp_bias=True
    ),
    "qwen3_windows": lambda: _qwen3(
        attention_bias=True, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "mixtral_window": lambda: _mixtral(sliding_window=9),
    "arcee": lambda: _dense("arcee"),
    "arcee_biased": lambda: _dense("arcee", attention_bias=True, mlp_bias=True),
    "cohere": lambda: _dense("cohere", logit_scale=0.9),
    "cohere2": lambda: _dense(
        "cohere2", **_WINDOWS, head_dim=8, num_hidden_layers=4, logit_scale=0.9
    ),
    "ernie4_5": lambda: _dense("ernie4_5"),
    "ernie4_5_biased": lambda: _dense("ernie4_5", use_bias=True, tie_word_embeddings=False),
    "exaone4": lambda: _dense("exaone4", **_WINDOWS, num_hidden_layers=4),
    "exaone4_whole": lambda: _dense("exaone4", sliding_window=None, layer_types=_WHOLE),
    "exaone4_unused_window": lambda: _dense("exaone4", sliding_window=9, layer_types=_WHOLE),
    "gemma3_text": lambda: _dense(
        "gemma3_text",
        tie_word_embeddings=False,
        sliding_window=9,
        num_hidden_layers=6,
        query_pre_attn_scalar=24,
        rope_parameters={
            "sliding_attention": _DEFAULT_ROPE,
            "full_attention": {**_DEFAULT_ROPE, **_LINEAR_ROPE, "rope_theta": 5000.0},
        },
    ),
    "glm": lambda: _dense("glm"),
    "glm4": lambda: _dense("glm4", attention_bias=False),
    "helium": lambda: _dense("helium", head_dim=8, mlp_bias=True),
    "hunyuan_v1_dense": lambda: _dense("hunyuan_v1_dense"),
    "hunyuan_v1_dense_alpha": lambda: _dense(
        "hunyuan_v1_dense",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 9.0, "factor": 1.0},
    ),
    "ministral": lambda: _dense(
        "ministral", sliding_window=9, layer_types=["sliding_attention", "full_attention"]
    ),
    "nemotron": lambda: _dense("nemotron", initializer_range=0.3),
    "nemotron_biased": lambda: _dense("nemotron", attention_bias=True, mlp_bias=True),
    "olmo": lambda: _dense("olmo"),
    "olmo_clipped": lambda: _dense("olmo", clip_qkv=1.1, attention_bias=True),
    "olmo2": lambda: _dense("olmo2"),
    "olmo3": lambda: _dense(
        "olmo3",
        sliding_window=9,
        num_hidden_layers=4,
        rope_parameters={
            "sliding_attention": _DEFAULT_ROPE,
            "full_attention": {**_YARN_ROPE, "rope_theta": 20000.0, "attention_factor": 1.2},
        },
    ),
    "dots1": lambda: _sparse("dots1", **_SIGMOIDS, sliding_window=9, max_window_layers=1),
    "glm4_moe": lambda: _sparse("glm4_moe", **_SIGMOIDS, use_qk_norm=True, attention_bias=True),
    "granitemoe": lambda: _dense(
        "granitemoe",
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=40,
        embedding_multiplier=2.5,
        residual_multiplier=0.6,
        attention_multiplier=0.4,
        logits_scaling=0.7,
    ),
    "hunyuan_v1_moe": lambda: _dense(
        "hunyuan_v1_moe", num_experts=4, moe_topk=2, intermediate_size=40
    ),
    "minimax_m2": lambda: _dense(
        "minimax_m2",
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=40,
        rope_parameters={**_DEFAULT_ROPE, "partial_rotary_factor": 0.5},
    ),
    "olmoe": lambda: _dense(
        "olmoe", num_experts=4, num_experts_per_tok=2, intermediate_size=40, head_dim=8
    ),
    "qwen2_moe": lambda: _sparse(
        "qwen2_moe", shared_expert_intermediate_size=56, mlp_only_layers=[0]
    ),
    "qwen2_moe_windows": lambda: _sparse(
        "qwen2_moe", use_sliding_window=True, sliding_window=9, norm_topk_prob=True
    ),
    "phi3": lambda: _dense("phi3", head_dim=8, sliding_window=9),
    "phi3_short": lambda: _dense(
        "phi3", head_dim=8, rope_parameters=_LONG_ROPE, original_max_position_embeddings=64
    ),
    "phi3_long": lambda: _dense(
        "phi3",
        head_dim=8,
        tie_word_embeddings=True,
        rope_parameters={**_LONG_ROPE, "partial_rotary_factor": 0.5, **_halves(_LONG_ROPE)},
        original_max_position_embeddings=32,
    ),
    "gemma2": lambda: _dense(
        "gemma2",
        sliding_window=9,
        query_pre_attn_scalar=9,
        attn_logit_softcapping=3.0,
        # Tied, the scaled embedding of a token would predict the token itself.
        tie_word_embeddings=False,
    ),
    "gemma2_uncapped": lambda: _dense(
        "gemma2",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
    ),
    "gptj": lambda: _new_model("gptj", **_GPTJ),
    "gptj_wide": lambda: _new_model(
        "gptj",
        **_GPTJ | {"initializer_range": 0.3},
        n_inner=80,
        activation_function="gelu",
    ),
    "gpt_neox": lambda: _dense("gpt_neox", **_NEOX),
    "gpt_neox_serial": lambda: _dense(
        "gpt_neox",
        **_NEOX,
        use_parallel_residual=False,
        attention_bias=False,
        initializer_range=0.3,
    ),
    "phi": lambda: _dense("phi", head_dim=8),
    "flex_olmo": lambda: _dense(
        "flex_olmo", num_experts=4, num_experts_per_tok=2, intermediate_size=40
    ),
    "granitemoeshared": lambda: _dense(
        "granitemoeshared",
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=40,
        shared_intermediate_size=56,
        attention_multiplier=0.3,
    ),
    "granite_swa": lambda: _dense(
        "granite_swa",
        sliding_window=9,
        num_hidden_layers=4,
        layer_rope_theta=[20000.0, 10000.0, 0, 10000.0],
        attention_multiplier=0.2,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "iquestcoder": lambda: _renamed_llama("IQuestCoderForCausalLM", "iquestcoder"),
    "internlm3": lambda: _renamed_llama("InternLM3ForCausalLM", "internlm3"),
    "internlm3_biased": lambda: _renamed_llama(
        "InternLM3ForCausalLM",
        "internlm3",
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=_DEFAULT_ROPE | {"rope_type": "dynamic", "factor": 3.0},
    ),
    "ernie4_5_moe": lambda: _dense(
        "ernie4_5_moe",
        num_hidden_layers=4,
        head_dim=8,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=40,
        moe_num_shared_experts=1,
        moe_layer_interval=2,
        tie_word_embeddings=False,
    ),
    "ernie4_5_moe_alone": lambda: _dense(
        "ernie4_5_moe",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=40,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_layer_end_index=0,
        tie_word_embeddings=False,
    ),
    "exaone_moe": lambda: _sparse(
        "exaone_moe",
        num_hidden_layers=4,
        sliding_window=9,
        sliding_window_pattern=2,
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        num_shared_experts=2,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.7,
    ),
    "exaone_moe_whole": lambda: _sparse("exaone_moe", layer_types=_WHOLE, norm_topk_prob=False),
    "mellum": lambda: _sparse(
        "mellum",
        num_hidden_layers=4,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        attention_bias=True,
        norm_topk_prob=False,
        rope_parameters={
            "sliding_attention": _DEFAULT_ROPE,
            "full_attention": {**_YARN_ROPE, "rope_theta": 20000.0, "attention_factor": 1.2},
        },
    ),
    "mellum_whole": lambda: _sparse("mellum", tie_word_embeddings=True, rope_parameters=None),
    "aria_text": lambda: _dense(
        "aria_text", moe_num_experts=4, intermediate_size=40, attention_bias=True
    ),
    "flint": lambda: _sparse(
        "flint",
        sliding_window=9,
        num_hidden_layers=4,
        mlp_only_layers=[0],
        shared_expert_intermediate_size=56,
        attention_bias=True,
    ),
    "granitemoeshared_alone": lambda: _dense(
        "granitemoeshared",
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=40,
        shared_intermediate_size=0,
        attention_multiplier=0.3,
    ),
    "hyperclovax": lambda: _dense("hyperclovax", residual_multiplier=0.6, logits_scaling=1.7),
    "hyperclovax_before": lambda: _dense(
        "hyperclovax", use_post_norm=False, attention_multiplier=0.3
    ),
    "jais2": lambda: _dense("jais2"),
    "persimmon": lambda: _dense("persimmon", **_NEOX),
    "phi_normed": lambda: _dense("phi", head_dim=8, qk_layernorm=True),
    "solar_open": lambda: _sparse(
        "solar_open",
        **{key: value for key, value in _SIGMOIDS.items() if key != "first_k_dense_replace"},
    ),
    "vaultgemma": lambda: _dense("vaultgemma", sliding_window=9, query_pre_attn_scalar=9),
    "stablelm": lambda: _dense("stablelm", head_dim=None),
    "stablelm_parallel": lambda: _dense(
        "stablelm", head_dim=None, use_parallel_residual=True, use_qkv_bias=True
    ),
    "starcoder2": lambda: _dense("starcoder2", sliding_window=9),
    "starcoder2_unbiased": lambda: _dense("starcoder2", use_bias=False, tie_word_embeddings=False),
    "gemma": lambda: _dense("gemma"),
    "granite": lambda: _dense(
        "granite",
        attention_bias=True,
        embedding_multiplier=2.5,
        residual_multiplier=0.6,
        attention_multiplier=0.4,
        logits_scaling=0.7,
    ),
    "mistral": lambda: _dense("mistral", sliding_window=9),
    "mistral_whole": lambda: _dense(
        "mistral", sliding_window=None, head_dim=8, rope_parameters=_SCALED_ROPE
    ),
    "qwen2": lambda: _dense("qwen2", rms_norm_eps=3e-5),
    "qwen2_windows": lambda: _dense(
        "qwen2",
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
        tie_word_embeddings=True,
        rope_parameters={k: v for k, v in _YARN_ROPE.items() if not k.startswith("mscale")},
    ),
    "seed_oss": lambda: _dense("seed_oss", attention_out_bias=True),
    # Without rotary embedding, the gradient of a key's bias is 0 up to rounding.
    "smollm3": lambda: _dense(
        "smollm3", no_rope_layers=[1, 1], attention_bias=True, tie_word_embeddings=False
    ),
    "smollm3_windows": lambda: _dense(
        "smollm3",
        num_hidden_layers=4,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=9,
    ),
    "qwen3": _qwen3,
    "qwen3_tied": lambda: _qwen3(tie_word_embeddings=True),
    "qwen3_moe": lambda: _qwen3_moe(norm_topk_prob=True),
    "qwen3_moe_raw_weights": lambda: _qwen3_moe(norm_topk_prob=False),
    "qwen3_next": lambda: _qwen3_next(norm_topk_prob=True),
    "qwen3_next_half": lambda: _qwen3_next(
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_conv_kernel_dim=3,
        norm_topk_prob=False,
        rope_parameters={**_DEFAULT_ROPE, "partial_rotary_factor": 0.5},
    ),
    "mixtral": _mixtral,
    "deepseek_v3": lambda: _deepseek(3, q_lora_rank=20, norm_topk_prob=True),
    "deepseek_v3_plain_queries": lambda: _deepseek(
        3,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        rms_norm_eps=3e-5,
        rope_parameters=_DEFAULT_ROPE,
    ),
    "deepseek_v2": lambda: _deepseek(
        2,
        q_lora_rank=20,
        topk_method="group_limited_greedy",
        routed_scaling_factor=3.0,
    ),
    "deepseek_v2_lite": lambda: _deepseek(2, q_lora_rank=None, n_group=1, topk_group=1),
}
"""Variants of the architectures, named by model type: one or more for each branch of the facts of
a row, with sizes and settings other than the defaults."""
FAMILIES = tuple(_FAMILIES)
_WITH_EXPERTS = (
    *("deepseek", "gpt_oss", "llama4", "mixtral", "qwen3_moe", "qwen3_next"),
    *(row.model_type for row in ARCHITECTURES if row.experts),
)


def has_experts(family: str) -> bool:
    """Whether a model has mixtures of experts."""
    return family.startswith(_WITH_EXPERTS)


_COVER = {
    *("deepseek_v2", "deepseek_v3", "gemma3_text", "glm4_moe", "gpt_neox", "gpt_oss"),
    *("granitemoeshared", "llama4_some_experts", "llama_tied_stretched", "minimax_m2", "mixtral"),
    *("olmo3", "persimmon", "phi", "phi3_long", "qwen2_windows", "qwen3", "qwen3_moe"),
    *("qwen3_next", "smollm3", "starcoder2"),
}
"""Families with every form of names and weights, and every class of facts. Options of a class are
tested by the long tests."""


def family_rows() -> list[Any]:
    """Return all families, of which `make test` runs those that cover the forms of a folder."""
    return [
        pytest.param(family, marks=() if family in _COVER else pytest.mark.matrix)
        for family in FAMILIES
    ]


_CENTERED = ("gemma", "nemotron", "vaultgemma")
"""Families whose norms multiply by 1 + weight."""


def make_model(family: str, dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """Return the same model in each call, in float32 or float64, with norm weights other than 1 and
    biases other than 0. That in float64 must be called in `in_float64`, too."""
    torch.manual_seed(5)
    with in_float64() if dtype == torch.float64 else nullcontext():
        model = _FAMILIES[family]()
        # The grouped product of experts has no float64.
        model.set_experts_implementation("eager")
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    of_norms = {id(weight) for norm in norms for weight in norm.parameters(recurse=False)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in of_norms and not name.endswith("bias"):
                # Some multiply by 1 + weight: of Qwen3-Next, but those of heads.
                is_centered = family.startswith(_CENTERED) or (
                    family.startswith("qwen3_next") and "linear_attn" not in name
                )
                parameter.uniform_(-0.5, 0.5) if is_centered else parameter.uniform_(0.5, 1.5)
            elif "bias" in name or "sinks" in name:
                parameter.uniform_(-0.5, 0.5)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.uniform_(-0.2, 0.2)
    return model.eval()


def make_folder(
    folder: Path, family: str, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "60KB"
) -> Path:
    """Save a model with its weights in several shards, and return its folder."""
    model = make_model(family, torch.float64 if dtype == torch.float64 else torch.float32)
    for name, parameter in model.named_parameters():
        # transformers keeps it in float32, as a buffer or as a parameter.
        if "correction_bias" not in name:
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def save_gradients(model: "PreTrainedModel", folder: Path) -> Path:
    """Save the gradients of a model's parameters in place of their values, which are lost."""
    for parameter in model.parameters():
        gradient = parameter.grad
        parameter.data = torch.zeros_like(parameter) if gradient is None else gradient
    model.save_pretrained(folder)
    return folder


def save_config(folder: Path, family: str) -> Path:
    """Save only the config.json, and return its folder."""
    model = make_model(family)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


def update_config(folder: Path, **values: Any) -> None:
    """Set keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | values))


def add_tokenizer(folder: Path) -> Path:
    """Add a tokenizer trained on the text fixture, with fewer ids than the model, to a folder."""
    from transformers import PreTrainedTokenizerFast

    raw = ByteLevelBPETokenizer()
    raw.train([str(FIXTURE)], vocab_size=500, special_tokens=["<s>", "</s>"], show_progress=False)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=raw._tokenizer, bos_token="<s>", eos_token="</s>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return folder


def our_model(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Load the model of a folder in one process, without a mesh. That in float64 has rotations in
    float64, too."""
    spec = model_spec(hugging_face_model(read_hugging_face_config(folder), str(folder)))
    snapshot = open_snapshot(*open_parent_storage(str(folder)), spec)
    with in_float64() if dtype == torch.float64 else nullcontext():
        model = spec.build()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return _fill(model, spec, snapshot)


def filled(spec: ModelSpec, snapshot: Snapshot) -> nn.Module:
    """Return the model of a spec with the weights of a snapshot."""
    return _fill(spec.build(), spec, snapshot)


def _fill(model: nn.Module, spec: ModelSpec, snapshot: Snapshot) -> nn.Module:
    tensors = {
        name.removeprefix("model."): read_tensor(snapshot, name)
        for name in snapshot.tensors
        if name.startswith("model.")
    }
    model.load_state_dict(tensors, strict=spec.tied_units is None)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in the files of a folder."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def in_transformers(kind: str, folder: Path, **options: Any) -> Any:
    """Load a folder with a class of transformers, given by name."""
    import transformers

    return getattr(transformers, kind).from_pretrained(folder, **options)


def assert_loads_in_transformers(folder: Path, vocab_size: int, tolerance: float) -> None:
    """Check that transformers loads an exported folder, with the logits that the model has here;
    the tolerance is relative to their standard deviation."""
    tokens_BS = torch.randint(0, vocab_size, (2, 31), generator=torch.Generator().manual_seed(1))
    theirs = in_transformers("AutoModelForCausalLM", folder, dtype=torch.float32)
    ours = our_model(folder)
    with torch.no_grad():
        expected_BSV = theirs(tokens_BS).logits
        actual_BSV = ours(
            tokens_BS,
            positions_BS=torch.arange(31).expand(2, -1),
            rng_keys_B=torch.zeros(2, dtype=torch.int64),
        )
    scale = expected_BSV.std().item()
    assert scale > 0.1
    torch.testing.assert_close(actual_BSV, expected_BSV, atol=tolerance * scale, rtol=0)


def tokens() -> torch.Tensor:
    """Return two samples of 41 positions."""
    return torch.randint(0, VOCAB_SIZE, (2, 41), generator=torch.Generator().manual_seed(1))
