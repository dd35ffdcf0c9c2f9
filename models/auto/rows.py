"""Facts that rows share."""

from collections.abc import Sequence
from typing import Any

from torchtitan_lite.nn.hugging_face.facts import (
    ActivationOf,
    Architecture,
    Biases,
    Fact,
    Fixed,
    Given,
    Value,
    decoder_facts,
)
from torchtitan_lite.nn.hugging_face.names import USUAL_NAMES, HuggingFaceNames
from torchtitan_lite.nn.hugging_face.position_facts import Rotation
from torchtitan_lite.nn.norm import NormKind
from torchtitan_lite.nn.spec import HuggingFaceKey


def row(
    name: str,
    model_type: str,
    *facts: Fact,
    names: HuggingFaceNames = USUAL_NAMES,
    experts: tuple[HuggingFaceKey, ...] = (),
) -> Architecture:
    """Return a row of the table."""
    return Architecture(
        name=name,
        model_type=model_type,
        facts=(Given("model_type", model_type), *facts),
        names=names,
        experts=experts,
    )


def base_facts(**defaults: Any) -> Sequence[Fact]:
    """Return the facts of all decoders, for an architecture with facts of its own about activation
    and biases."""
    return decoder_facts(activation=None, attention_bias=None, mlp_bias=None, **defaults)


ACTIVATION = ActivationOf()
SILU = Fixed("hidden_act", "silu", "swish")
"""The activation of all experts here."""
BIASES = Biases()
ALL_BIASES = ("bias", "out_bias", "feed_forward_bias")
MLP_BIAS = Biases("mlp_bias", ours=("feed_forward_bias",))
LAYER_NORM = Given("norm", NormKind(subtracts_mean=True, bias=True))
UNGATED = Given("gated", False)
ROTATION = Rotation()
ADJACENT_PAIRS = Given("rotates_adjacent", True)
WIDTH = Value("hidden_dim", "intermediate_size")
MULTIPLIERS = (
    Value("embedding_multiplier", "embedding_multiplier", "number", 1.0),
    Value("residual_multiplier", "residual_multiplier", "number", 1.0),
)
GRANITE_MULTIPLIERS = (
    *MULTIPLIERS,
    Value("attention_multiplier", "attention_multiplier", "number", 1.0),
    Value("logits_divisor", "logits_scaling", "number", 1.0),
)
