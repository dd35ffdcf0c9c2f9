"""A small Llama of odd sizes, its weights, and samples for it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tests.harness.jobs import qwen3_like
from torchtitan_lite.models import llama3
from torchtitan_lite.models.deepseek_v3 import DeepseekV3Dims
from torchtitan_lite.models.gpt_oss import GptOssDims
from torchtitan_lite.models.llama3 import Llama3Dims
from torchtitan_lite.models.llama4 import Llama4Dims
from torchtitan_lite.models.qwen3_next import Qwen3NextDims
from torchtitan_lite.nn.decoder import Decoder
from torchtitan_lite.nn.decoder_family import build_decoder
from torchtitan_lite.nn.grouped_query import Temperature
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.rope import RopeScaling, YarnScaling
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel.context import SequenceSharding

WHOLE = SequenceSharding(num_ranks=1, rank=0, head_tail=True)
"""No context parallelism."""

DIMS = Llama3Dims(
    dim=18,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    hidden_dim=38,
    vocab_size=53,
    rope_theta=1000.0,
    # Of the five frequencies, some are high, some are low and one is in between.
    rope_scaling=RopeScaling(factor=4.0, original_max_position=64),
)

QWEN3 = qwen3_like(DIMS, rope_theta=DIMS.rope_theta)
QWEN3_EXPERTS = replace(QWEN3, hidden_dim=None, moe=MoEDims(num_experts=7, top_k=3, hidden_dim=11))

DEEPSEEK = DeepseekV3Dims(
    dim=18,
    num_layers=3,
    num_dense_layers=1,
    num_heads=6,
    hidden_dim=38,
    moe=MoEDims(
        num_experts=8,
        top_k=3,
        hidden_dim=11,
        shared_hidden_dim=22,
        score="sigmoid",
        num_groups=4,
        top_groups=2,
        route_scale=2.5,
    ),
    q_lora_rank=14,
    kv_lora_rank=9,
    qk_nope_head_dim=7,
    qk_rope_head_dim=10,
    v_head_dim=8,
    vocab_size=53,
    rope_theta=1000.0,
    rope_scaling=YarnScaling(
        factor=4.0, original_max_position=64, beta_fast=6.0, mscale=1.0, mscale_all_dim=0.7
    ),
)
GPT_OSS = GptOssDims(
    dim=18,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    moe=MoEDims(num_experts=7, top_k=3, hidden_dim=11, swiglu_limit=0.5),
    window=4,
    vocab_size=53,
    rope_theta=1000.0,
    rope_scaling=YarnScaling(factor=4.0, original_max_position=64, truncate=False),
)
LLAMA4 = Llama4Dims(
    dim=18,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    hidden_dim=38,
    moe=MoEDims(
        num_experts=7,
        top_k=1,
        hidden_dim=11,
        shared_hidden_dim=11,
        score="sigmoid",
        normalize_weights=False,
        weights_inputs=True,
    ),
    moe_interval=2,
    nope_interval=2,
    first_nope_layer=1,
    chunk=5,
    qk_norm=True,
    temperature=Temperature(weight=0.3, interval=4),
    vocab_size=53,
    rope_theta=1000.0,
)
QWEN3_NEXT = Qwen3NextDims(
    dim=18,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    moe=MoEDims(num_experts=7, top_k=3, hidden_dim=11, shared_hidden_dim=13, shared_gate=True),
    full_attention_interval=2,
    head_dim=10,
    rotated_share=0.45,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=5,
    linear_value_head_dim=7,
    chunk_size=4,
    vocab_size=53,
    rope_theta=1000.0,
)
DEEPSEEK_V2 = replace(
    DEEPSEEK,
    q_lora_rank=None,
    # transformers needs even widths here.
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    moe=replace(DEEPSEEK.moe, score="softmax", normalize_weights=False, group_score="max"),
)


def tiny_spec(**changes: Any) -> ModelSpec:
    """Return the spec of `DIMS` with some dimensions changed."""
    return llama3.spec_of(replace(DIMS, **changes), "tiny")


def tiny_decoder(dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    """Return a model with initialized weights, in training mode."""
    model = build_decoder(replace(DIMS, **changes))
    initialize(model, tiny_spec(**changes).init, seed=11)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def tiny_samples(batch_size: int = 3, length: int = 17) -> Mapping[str, torch.Tensor]:
    """Return the inputs of a forward pass, without targets and documents."""
    draws = torch.Generator().manual_seed(3)
    return {
        "tokens_BS": torch.randint(0, DIMS.vocab_size, (batch_size, length), generator=draws),
        "positions_BS": torch.arange(length).repeat(batch_size, 1),
        "rng_keys_B": torch.arange(batch_size) * 7919,
    }


def tiny_targets(batch_size: int = 3, length: int = 17) -> torch.Tensor:
    """Return targets, some of which are ignored."""
    draws = torch.Generator().manual_seed(4)
    targets = torch.randint(0, DIMS.vocab_size, (batch_size, length), generator=draws)
    targets[0, 3:7] = -100
    targets[-1, -1] = -100
    return targets
