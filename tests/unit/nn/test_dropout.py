"""Keyed dropout."""

import pytest
import torch

from torchtitan_lite.nn import dropout as module
from torchtitan_lite.nn.dropout import KeyedDropout

_POSITIONS_BS = torch.arange(50).repeat(4, 1)
_KEYS_B = torch.tensor([0, 1, 2**40, -(2**62)])
_ONES_BSD = torch.ones(4, 50, 40)


def _mask(share: float = 0.25, site: int = 0, rng_keys_B: torch.Tensor = _KEYS_B) -> torch.Tensor:
    return KeyedDropout(share, site)(_ONES_BSD, rng_keys_B, _POSITIONS_BS) != 0


def test_the_same_key_drops_the_same_elements() -> None:
    torch.manual_seed(1)
    first = _mask()
    torch.manual_seed(2)
    assert torch.equal(_mask(), first)


def test_sites_samples_and_positions_drop_different_elements() -> None:
    mask_BSD = _mask()
    chance = 0.75**2 + 0.25**2  # Agreement of two independent masks.
    for other in (_mask(site=1), _mask(rng_keys_B=_KEYS_B + 1000), mask_BSD.roll(1, 0),
                  mask_BSD.roll(1, 1), mask_BSD.roll(1, 2)):  # fmt: skip
        assert abs((mask_BSD == other).float().mean() - chance) < 0.03


def test_dropout_of_a_sample_does_not_depend_on_its_batch_or_sharding() -> None:
    dropout = KeyedDropout(0.25, 3)
    full = dropout(_ONES_BSD, _KEYS_B, _POSITIONS_BS)
    part = dropout(_ONES_BSD[:1, 20:30], _KEYS_B[2:3], _POSITIONS_BS[:1, 20:30])
    assert torch.equal(part[0], full[2, 20:30])


def test_the_share_is_dropped_and_the_rest_scaled_up() -> None:
    for share in (0.1, 0.25, 0.9):
        dropped = KeyedDropout(share, 0)(_ONES_BSD, _KEYS_B, _POSITIONS_BS)
        kept = dropped != 0
        # 8,000 draws: a standard deviation of at most 0.0056.
        assert abs(kept.float().mean() - (1 - share)) < 0.02
        torch.testing.assert_close(dropped[kept], torch.ones(()).expand(kept.sum()) / (1 - share))


def test_draws_below_the_share_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    # Draws are from [0, 1): a quarter of them is below 0.25.
    draws = torch.tensor([0.0, 0.125, 0.25, 0.5])
    monkeypatch.setattr(module, "uniform", lambda keys: draws.expand(keys.shape))
    out = KeyedDropout(0.25, 0)(_ONES_BSD[..., :4], _KEYS_B, _POSITIONS_BS)
    assert (out[0, 0] != 0).tolist() == [False, False, True, True]


def test_nothing_is_dropped_in_eval_or_at_rate_zero() -> None:
    assert KeyedDropout(0.5, 0).eval()(_ONES_BSD, _KEYS_B, _POSITIONS_BS) is _ONES_BSD
    assert KeyedDropout(0.0, 0)(_ONES_BSD, _KEYS_B, _POSITIONS_BS) is _ONES_BSD


def test_gradients_pass_where_elements_were_kept() -> None:
    x_BSD = _ONES_BSD.clone().requires_grad_()
    out = KeyedDropout(0.25, 0)(x_BSD, _KEYS_B, _POSITIONS_BS)
    out.sum().backward()
    assert x_BSD.grad is not None
    assert torch.equal(x_BSD.grad, out.detach())
