"""Properties of rotary embeddings that need no second implementation."""

import math
from dataclasses import replace

import pytest
import torch

from tests.harness.tolerances import ROPE_FLOAT32
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.nn.rope import (
    LongRopeScaling,
    RopeScaling,
    RotaryEmbedding,
    YarnScaling,
    rotate,
)


def test_scores_depend_only_on_the_distance_of_positions() -> None:
    rotary = RotaryEmbedding(8, 100.0, None)
    draws = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=draws)

    def score(q_at: int, k_at: int) -> torch.Tensor:
        turned_q = rotate(q, *rotary(torch.tensor([[q_at]])))
        turned_k = rotate(k, *rotary(torch.tensor([[k_at]])))
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(3, 1), score(7, 5), atol=8 * ROPE_FLOAT32, rtol=0)
    assert (score(3, 1) - score(3, 2)).abs() > 1e-3


def test_rotation_keeps_the_dtype_and_computes_in_float32() -> None:
    cos, sin = RotaryEmbedding(8, 100.0, None)(torch.tensor([[1000]]))
    assert cos.dtype == sin.dtype == torch.float32
    x = torch.randn(1, 1, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = rotate(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), cos, sin).bfloat16())


def test_scaling_lowers_low_frequencies_and_keeps_high_ones() -> None:
    plain = RotaryEmbedding(64, 500000.0, None).frequencies_E
    scaled = RotaryEmbedding(64, 500000.0, RopeScaling(factor=8.0)).frequencies_E
    turns = 8192 * plain / (2 * torch.pi)
    assert torch.equal(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_rotations_are_computed_even_if_the_model_is_on_the_meta_device() -> None:
    with torch.device("meta"):
        rotary = RotaryEmbedding(8, 100.0, RopeScaling())
    expected = RotaryEmbedding(8, 100.0, RopeScaling())
    assert torch.equal(rotary.frequencies_E, expected.frequencies_E)


def _exact(head_dim: int, theta: float) -> torch.Tensor:
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def test_frequencies_are_powers_of_theta() -> None:
    frequencies = RotaryEmbedding(128, 500000.0, None).frequencies_E
    torch.testing.assert_close(
        frequencies.double(), _exact(128, 500000.0), rtol=ROPE_FLOAT32, atol=0
    )


def test_yarn_interpolates_in_the_number_of_the_frequency() -> None:
    scaling = YarnScaling(factor=40.0, original_max_position=4096, truncate=False)
    scaled = RotaryEmbedding(64, 10000.0, scaling).frequencies_E
    low, high = (
        64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10000)) for turns in (32, 1)
    )
    plain = _exact(64, 10000.0)
    slow = ((torch.arange(32, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    expected = plain / 40 * slow + plain * (1 - slow)
    torch.testing.assert_close(scaled.double(), expected, rtol=10 * ROPE_FLOAT32, atol=0)


def test_yarn_interpolates_at_most_to_the_width() -> None:
    # From 2.5 to 8.5, rounded to whole frequencies: 2 to 9, of a width of 8.
    scaling = YarnScaling(factor=4.0, original_max_position=838)
    scaled = RotaryEmbedding(8, 10.0, scaling).frequencies_E
    plain = _exact(8, 10.0)
    slow = torch.tensor([0, 0, 0, 1 / (7 - 2)], dtype=torch.float64)
    expected = plain / 4 * slow + plain * (1 - slow)
    torch.testing.assert_close(scaled.double(), expected, rtol=10 * ROPE_FLOAT32, atol=0)


def test_the_magnitude_of_yarn_is_relative_to_that_of_the_scores() -> None:
    scaling = YarnScaling(factor=4.0, original_max_position=64, mscale=1.0, mscale_all_dim=0.5)
    growth = 0.1 * math.log(4)
    assert scaling.magnitude == pytest.approx((1 + growth) / (1 + 0.5 * growth))


def test_long_rope_has_other_frequencies_in_long_sequences() -> None:
    scaling = LongRopeScaling(
        short_factor=(1.0, 2.0), long_factor=(4.0, 8.0), original_max_position=6, max_position=24
    )
    rotary = RotaryEmbedding(4, 100.0, scaling)
    plain = RotaryEmbedding(4, 100.0, None)
    magnitude = math.sqrt(1 + math.log(4) / math.log(6))
    for length, factors in ((6, (1.0, 2.0)), (7, (4.0, 8.0))):
        positions = torch.arange(length)[None]
        angles = positions[0, :, None] * plain.frequencies_E / torch.tensor(factors)
        cos, _ = rotary(positions)
        expected = angles.cos()[None, :, None] * magnitude
        torch.testing.assert_close(cos, expected, atol=ROPE_FLOAT32, rtol=0)
    with pytest.raises(ConfigError, match="long_factor has 2 numbers, and 3 are needed"):
        RotaryEmbedding(6, 100.0, replace(scaling, short_factor=(1.0, 1.0, 1.0)))
