"""Sampling of tokens."""

from collections import Counter
from typing import Any

import pytest
import torch

from torchtitan_lite.core.errors import ConfigError, UserError
from torchtitan_lite.serving.inference import Sampling
from torchtitan_lite.serving.inference.sampling import top_p_filter

SHARES = torch.tensor([0.1, 0.4, 0.15, 0.3, 0.05])


def drawn(number: int = 2000, **settings: Any) -> dict[int, float]:
    """Return the share of each token in some draws."""
    sampling = Sampling(**settings)
    draws = [sampling.random_draws(sample) for sample in range(number)]
    ids = sampling.next_ids(SHARES.log().expand(number, -1), draws)
    return {token: count / number for token, count in Counter(ids).items()}


def test_frequencies_of_many_draws() -> None:
    actual = drawn(temperature=1.0)
    assert actual == pytest.approx(dict(enumerate(SHARES.tolist())), abs=0.05)
    sharper = (SHARES**2 / (SHARES**2).sum()).tolist()
    assert drawn(temperature=0.5) == pytest.approx(dict(enumerate(sharper)), abs=0.05)
    assert drawn(temperature=1.0, seed=1) != actual


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    rows = SHARES[None]
    assert top_p_filter(rows, 1.0) is rows
    for top_p, kept in ((0.3, {1}), (0.5, {1, 3}), (0.71, {1, 2, 3}), (0.9, {0, 1, 2, 3})):
        assert set(top_p_filter(rows, top_p)[0].nonzero().flatten().tolist()) == kept
    assert drawn(temperature=1.0, top_p=0.5) == pytest.approx({1: 4 / 7, 3: 3 / 7}, abs=0.05)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1e-30}])
def test_temperature_zero_is_greedy(settings: dict[str, float]) -> None:
    assert drawn(20, **settings) == {1: 1.0}


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_settings_out_of_range_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(settings.values())))):
        Sampling(**settings)


def test_non_finite_logits_are_rejected() -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3] = torch.nan
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature)
        with pytest.raises(UserError, match="not numbers"):
            sampling.next_ids(logits, [sampling.random_draws(0)] * 2)


def test_the_draws_from_bfloat16_logits_are_those_from_the_same_in_float32() -> None:
    logits_BV = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    sampling = Sampling(temperature=0.7, top_p=0.9)
    narrow, wide = (
        [
            sampling.next_ids(logits, [sampling.random_draws(64 * turn + row) for row in range(64)])
            for turn in range(20)
        ]
        for logits in (logits_BV, logits_BV.float())
    )
    assert narrow == wide
