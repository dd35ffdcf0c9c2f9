"""Gated DeltaNet: chunks against the recurrence of single positions, maps, documents, bounds."""

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.harness.tolerances import DELTA_BFLOAT16, DELTA_FLOAT32, DELTA_FLOAT64
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.nn.attention import BlockContext
from torchtitan_lite.nn.gated_delta import (
    GatedDelta,
    GatedDeltaNet,
    gated_delta_rule,
    short_convolution,
)
from torchtitan_lite.nn.recurrent import AffineMap, Carry

DIMS = GatedDelta(num_heads=2, num_value_heads=6, key_head_dim=5, value_head_dim=7, chunk_size=4)
LENGTH = 21
TOLERANCES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, DELTA_FLOAT64), (torch.float32, DELTA_FLOAT32)]
)
DOCUMENTS = torch.tensor([[0] * 3 + [1] * 9 + [2] + [3] * 8, [0] * 21]).int()


def draw(dtype: torch.dtype = torch.float64, length: int = LENGTH) -> tuple[torch.Tensor, ...]:
    """Return queries, keys of length 1, values, logarithms of decays, and strengths."""
    draws = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64)

    q, k = (F.normalize(normal(2, 3, length, 5), dim=-1) for _ in range(2))
    decay = -F.softplus(3 * normal(2, 3, length))
    found = q, k, normal(2, 3, length, 7), decay, normal(2, 3, length).sigmoid()
    return tuple(x.to(dtype).requires_grad_() for x in found)


def by_position(
    inputs: tuple[torch.Tensor, ...],
    documents_BS: torch.Tensor | None,
    state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the outputs of the recurrence, one position after the other."""
    q, k, v, decay, strength = inputs
    state = q.new_zeros(2, 3, 5, 7) if state is None else state
    out = []
    for at in range(q.shape[2]):
        if documents_BS is not None and at:
            is_same = documents_BS[:, at] == documents_BS[:, at - 1]
            state = state * is_same[:, None, None, None]
        state = state * decay[:, :, at, None, None].exp()
        found = torch.einsum("bhe,bheg->bhg", k[:, :, at], state)
        new = strength[:, :, at, None] * (v[:, :, at] - found)
        state = state + k[:, :, at, :, None] * new[:, :, None]
        out.append(torch.einsum("bhe,bheg->bhg", q[:, :, at], state))
    return torch.stack(out, dim=2)


def gradients(out: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return torch.autograd.grad((out * weights).sum(), inputs)


@TOLERANCES
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 7, 64])
def test_chunks_equal_the_recurrence(
    chunk_size: int, with_documents: bool, dtype: torch.dtype, tolerance: float
) -> None:
    inputs, exact = draw(dtype), draw()
    documents_BS = DOCUMENTS if with_documents else None
    before = None if documents_BS is None else F.pad(documents_BS, (1, 0), value=-1)
    found = gated_delta_rule(*inputs, documents_ZL=before, carry=Carry(), chunk_size=chunk_size)
    expected = by_position(exact, documents_BS)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    pairs = zip(gradients(found, inputs), gradients(expected, exact), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=10 * tolerance)


class Recorded(Carry):
    """Begins with a given state, and records the map."""

    needs_map = True

    def __init__(self, state: torch.Tensor) -> None:
        self.state, self.map = state, AffineMap(state, state)

    def begin(self, own: AffineMap | None) -> torch.Tensor:
        assert own is not None
        self.map = own
        return self.state


@TOLERANCES
def test_maps_of_pieces_compose(dtype: torch.dtype, tolerance: float) -> None:
    inputs = draw(dtype)
    state = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = by_position(draw(), None, state.double())
    found = []
    for piece in (slice(0, 9), slice(9, 10), slice(10, 21)):
        carry = Recorded(state)
        parts = tuple(x[:, :, piece] for x in inputs)
        found.append(gated_delta_rule(*parts, documents_ZL=None, carry=carry, chunk_size=4))
        state = carry.map.of(state)
    torch.testing.assert_close(torch.cat(found, 2).double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("decay", [-1e5, -100.0, 0.0])
@pytest.mark.parametrize("others", [-1e5, -0.01])
def test_extreme_decays_are_exact(decay: float, others: float) -> None:
    q, k, v, _, strength = draw(torch.float32, 150)
    decays = torch.full((2, 3, 150), others)
    decays[..., ::7] = decay
    inputs = q, k, v, decays.requires_grad_(), strength
    found = gated_delta_rule(*inputs, documents_ZL=None, carry=Carry(), chunk_size=64)
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    expected = by_position(exact, None)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=DELTA_FLOAT32)
    assert all(gradient.isfinite().all() for gradient in gradients(found, inputs))


@TOLERANCES
def test_the_convolution_is_causal_and_within_documents(
    dtype: torch.dtype, tolerance: float
) -> None:
    draws = torch.Generator().manual_seed(3)
    inputs_BSI = torch.randn(2, LENGTH, 6, generator=draws, dtype=dtype)
    taps_I1T = torch.randn(6, 1, 4, generator=draws, dtype=dtype)
    padded = F.pad(inputs_BSI, (0, 0, 3, 0))
    expected = F.silu(F.conv1d(padded.mT, taps_I1T, groups=6).mT)
    found = short_convolution(padded, taps_I1T, None)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    apart = short_convolution(padded, taps_I1T, F.pad(DOCUMENTS, (3, 0), value=-1))
    bounds = [0, 3, 12, 13, 21]
    for first, end in pairwise(bounds):
        alone = F.pad(inputs_BSI[:1, first:end], (0, 0, 3, 0))
        wanted = short_convolution(alone, taps_I1T, None)
        torch.testing.assert_close(apart[:1, first:end], wanted, rtol=0, atol=tolerance)
    torch.testing.assert_close(apart[1], found[1], rtol=0, atol=tolerance)


def test_the_convolution_rounds_bfloat16_once() -> None:
    draws = torch.Generator().manual_seed(3)
    inputs_BSI = torch.randn(2, LENGTH, 6, generator=draws).bfloat16()
    taps_I1T = torch.randn(6, 1, 4, generator=draws).bfloat16()
    wide = short_convolution(inputs_BSI.float(), taps_I1T.float(), None)
    assert torch.equal(short_convolution(inputs_BSI, taps_I1T, None), wide.bfloat16())


def _layer(dtype: torch.dtype) -> GatedDeltaNet:
    layer = DIMS.build(18, "sdpa")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(4))
    return layer.to(dtype)


def _context(documents: list[int] | None, length: int) -> BlockContext:
    documents_BS = None if documents is None else torch.tensor([documents]).int()
    positions_BS = torch.arange(length)[None]
    return BlockContext(None, None, None, positions_BS, torch.zeros(1).long(), documents_BS)


def test_a_bfloat16_layer_holds_its_state_in_float32() -> None:
    layer, length = _layer(torch.bfloat16), 200
    draws = torch.Generator().manual_seed(5)
    x_BSD = torch.randn(2, length, 18, generator=draws).bfloat16()
    found = layer(x_BSD, _context(None, length))
    assert found.dtype == torch.bfloat16
    expected = copy.deepcopy(layer).double()(x_BSD.double(), _context(None, length))
    assert (found - expected).norm() < DELTA_BFLOAT16 * expected.norm()


def test_a_packed_document_equals_the_document_alone() -> None:
    layer = _layer(torch.float64)
    x_BSD = torch.randn(1, 14, 18, generator=torch.Generator().manual_seed(5)).double()
    packed = layer(x_BSD, _context([0] * 5 + [1] + [2] * 8, 14))
    for first, end in ((0, 5), (5, 6), (6, 14)):
        alone = layer(x_BSD[:, first:end], _context(None, end - first))
        torch.testing.assert_close(packed[:, first:end], alone, rtol=0, atol=DELTA_FLOAT64)
    mixed = layer(x_BSD, _context(None, 14))
    assert (mixed - packed)[:, 5:].abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_value_heads": 5}, r"as many value heads \(5\) as key heads \(2\), or a multiple"),
        ({"key_head_dim": 0}, r"sizes above 0: key_head_dim \(0\)"),
        ({"chunk_size": 0}, r"chunk_size \(0\)"),
        ({"kernel_size": 1}, r"kernel_size \(1\) positions, which must be at least 2"),
    ],
)
def test_sizes_that_do_not_fit_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(DIMS, **changes)


def test_a_convolution_needs_the_inputs_before_it() -> None:
    assert replace(DIMS, kernel_size=4).sharding.carried_inputs == 3
