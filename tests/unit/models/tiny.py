"""A small Llama of odd sizes, its weights, and samples for it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tests.models import qwen3_like
from torchtitan_lite.models import llama3
from torchtitan_lite.models.llama3 import Llama3Dims
from torchtitan_lite.nn.decoder import Decoder
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.rope import RopeScaling
from torchtitan_lite.parallel.context import SequenceSharding
from torchtitan_lite.spec import ModelSpec

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


def tiny_spec(**changes: Any) -> ModelSpec:
    """Return the spec of `DIMS` with some dimensions changed."""
    return llama3.spec_of(replace(DIMS, **changes), "tiny")


def tiny_decoder(dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    """Return a model with initialized weights, in training mode."""
    model = llama3.build(replace(DIMS, **changes))
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
