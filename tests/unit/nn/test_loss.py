"""The chunked loss compared with torch's cross entropy."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.harness.tolerances import (
    CHUNKED_LOSS_BFLOAT16,
    CHUNKED_LOSS_FLOAT32,
    CHUNKED_LOSS_FLOAT64,
    PARITY_FLOAT32_LOSS,
)
from torchtitan_lite.nn import loss as module
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.spec import IGNORE_INDEX

_NUM_TOKENS, _VOCAB, _DIM = 101, 37, 16
_Z_WEIGHT = 0.05


@pytest.fixture(params=[1, 10, 101, 512], ids=lambda size: f"chunk{size}")
def chunk_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The number of tokens per chunk: many chunks with a short last one, or one chunk."""
    monkeypatch.setattr(module, "_MIN_CHUNK_TOKENS", 1)
    yield request.param


@pytest.mark.parametrize(
    ("dtype", "loss_rtol", "grad_tolerance"),
    [
        (torch.float64, CHUNKED_LOSS_FLOAT64, CHUNKED_LOSS_FLOAT64),
        (torch.float32, PARITY_FLOAT32_LOSS, CHUNKED_LOSS_FLOAT32),
    ],
)
def test_value_and_gradients_equal_those_of_torch(
    chunk_tokens: int, dtype: torch.dtype, loss_rtol: float, grad_tolerance: float
) -> None:
    ours, theirs = _inputs(dtype), _inputs(dtype)
    loss = cross_entropy(logits_per_chunk=chunk_tokens * _VOCAB)(*ours)
    (loss * 0.7).backward()
    expected = _reference(*theirs)
    (expected * 0.7).backward()
    assert loss.dtype == dtype and loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=loss_rtol, atol=0)
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=grad_tolerance, atol=grad_tolerance)
    assert (ours[0].grad[ours[2] == IGNORE_INDEX] == 0).all()  # pyright: ignore[reportOptionalSubscript]


def test_unneeded_gradients_are_not_computed(
    chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _inputs(torch.float64)
    with_gradient = cross_entropy(logits_per_chunk=chunk_tokens * _VOCAB)(*inputs)

    def fail(*arguments: torch.Tensor) -> None:
        raise AssertionError("gradients were computed")

    monkeypatch.setattr(module, "_chunk_loss_and_gradients", fail)
    with torch.no_grad():
        under_no_grad = cross_entropy(logits_per_chunk=chunk_tokens * _VOCAB)(*inputs)
    of_constants = cross_entropy(logits_per_chunk=chunk_tokens * _VOCAB)(
        *(tensor.detach() for tensor in inputs)
    )
    with pytest.raises(AssertionError, match="gradients were computed"):
        cross_entropy(logits_per_chunk=chunk_tokens * _VOCAB)(*inputs)
    for value in (under_no_grad, of_constants):
        assert not value.requires_grad
        torch.testing.assert_close(value, with_gradient.detach(), rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("dtype", "loss_rtol", "grad_tolerance"),
    [
        (torch.float64, CHUNKED_LOSS_FLOAT64, CHUNKED_LOSS_FLOAT64),
        (torch.float32, PARITY_FLOAT32_LOSS, CHUNKED_LOSS_FLOAT32),
    ],
)
def test_a_z_loss_adds_its_gradient_and_keeps_the_value(
    chunk_tokens: int, dtype: torch.dtype, loss_rtol: float, grad_tolerance: float
) -> None:
    ours, theirs = _inputs(dtype), _inputs(dtype)
    loss = cross_entropy(logits_per_chunk=chunk_tokens * _VOCAB, z_loss_weight=_Z_WEIGHT)(*ours)
    (loss * 0.7).backward()
    expected = _reference(*theirs)
    (0.7 * (expected + _z_loss(*theirs))).backward()
    torch.testing.assert_close(loss, expected, rtol=loss_rtol, atol=0)
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=grad_tolerance, atol=grad_tolerance)
    without = _inputs(dtype)
    _reference(*without).mul(0.7).backward()
    assert ours[1].grad is not None and without[1].grad is not None
    assert (ours[1].grad - without[1].grad).abs().max() > 0.1


@pytest.mark.parametrize("z_loss_weight", [0.0, _Z_WEIGHT])
def test_a_soft_cap_of_logits(chunk_tokens: int, z_loss_weight: float) -> None:
    ours, theirs = _inputs(torch.float64), _inputs(torch.float64)
    ours_of = cross_entropy(logits_per_chunk=chunk_tokens * _VOCAB, z_loss_weight=z_loss_weight)
    loss = ours_of(*ours, soft_cap=2.0)
    loss.backward()
    logits = torch.tanh(theirs[0] @ theirs[1].T / 2.0) * 2.0
    targets = theirs[2]
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    counted = logits.logsumexp(-1)[targets != IGNORE_INDEX]
    (expected + z_loss_weight * (counted**2).sum()).backward()
    torch.testing.assert_close(loss, expected, rtol=CHUNKED_LOSS_FLOAT64, atol=0)
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        tolerance = CHUNKED_LOSS_FLOAT64
        torch.testing.assert_close(mine.grad, other.grad, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        alone = cross_entropy()(*_inputs(torch.float64), soft_cap=2.0)
    torch.testing.assert_close(alone, expected, rtol=CHUNKED_LOSS_FLOAT64, atol=0)


def test_a_compiled_z_loss() -> None:
    ours, theirs = _inputs(torch.float64), _inputs(torch.float64)
    cross_entropy(compile_backend="aot_eager", z_loss_weight=_Z_WEIGHT)(*ours).backward()
    (_reference(*theirs) + _z_loss(*theirs)).backward()
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        tolerance = CHUNKED_LOSS_FLOAT64
        torch.testing.assert_close(mine.grad, other.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("learner", [0, 1])
def test_either_input_may_be_frozen(learner: int) -> None:
    hidden, weight, targets = _inputs(torch.float64)
    (weight, hidden)[learner].requires_grad_(False)
    cross_entropy()(hidden, weight, targets).backward()
    reference = _inputs(torch.float64)
    _reference(*reference).backward()
    learned = (hidden, weight)[learner]
    torch.testing.assert_close(learned.grad, reference[learner].grad)
    assert (weight, hidden)[learner].grad is None


def test_ignored_targets_give_zero_loss_and_zero_gradients(chunk_tokens: int) -> None:
    hidden, weight, targets = _inputs(torch.float32)
    loss = cross_entropy(logits_per_chunk=chunk_tokens * _VOCAB)(
        hidden, weight, torch.full_like(targets, IGNORE_INDEX)
    )
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_bfloat16_computes_the_loss_in_float32(chunk_tokens: int) -> None:
    narrow = _inputs(torch.bfloat16)
    wide = [t.detach().float().requires_grad_(t.is_floating_point()) for t in narrow[:2]]
    loss = cross_entropy(logits_per_chunk=chunk_tokens * _VOCAB)(*narrow)
    loss.backward()
    expected = _reference(wide[0], wide[1], narrow[2])
    expected.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=CHUNKED_LOSS_BFLOAT16, atol=0)
    for mine, other in zip(narrow[:2], wide, strict=True):
        assert mine.grad is not None and other.grad is not None
        assert mine.grad.dtype == torch.bfloat16
        error = (mine.grad.float() - other.grad).abs().max() / other.grad.abs().max()
        assert error < CHUNKED_LOSS_BFLOAT16


def test_chunks_of_a_bfloat16_weight_gradient_are_summed_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MIN_CHUNK_TOKENS", 1)
    # 1,024 equal terms of 1/2: in bfloat16 the sum would stop at 128.
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    loss = cross_entropy(logits_per_chunk=1)
    loss(hidden, weight, torch.zeros(1024, dtype=torch.int64)).backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [-512.0, 512.0]


def test_full_logits_are_never_materialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_CHUNK_TOKENS", 1)
    sizes = []
    full = module._chunk_loss_and_gradients

    def recording(hidden: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        sizes.append(len(hidden))
        return full(hidden, *rest)

    monkeypatch.setattr(module, "_chunk_loss_and_gradients", recording)
    cross_entropy(logits_per_chunk=10 * _VOCAB)(*_inputs(torch.float32))
    assert sizes == [10] * 10 + [1]


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "size"),
    [
        (0, 10, 1),
        (7, 10, 7),
        (8192, 2093, 2048),
        # Five chunks would do, and eight are equal.
        (8192, 1766, 1024),
        # A prime.
        (101, 60, 51),
    ],
)
def test_chunks_are_equal_where_the_number_of_tokens_allows(
    num_tokens: int, max_tokens: int, size: int
) -> None:
    assert module._chunk_size(num_tokens, max_tokens) == size


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(_NUM_TOKENS, _DIM, generator=draws, dtype=torch.float64).to(dtype)
    weight = torch.randn(_VOCAB, _DIM, generator=draws, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, _VOCAB, (_NUM_TOKENS,), generator=draws)
    targets[torch.rand(_NUM_TOKENS, generator=draws) < 0.2] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def _reference(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def _z_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The auxiliary loss of arXiv:2204.02311, section 5, over the targets."""
    denominators = (hidden @ weight.T).exp().sum(-1)[targets != IGNORE_INDEX]
    return _Z_WEIGHT * (denominators.log() ** 2).sum()


def test_the_losses_of_many_chunks_are_summed_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    # In float32, adding 1 changes nothing.
    losses = [2.0**25, *[1.0] * 8]

    def chunk(*args: Any) -> tuple[torch.Tensor, None, None]:
        return torch.tensor(losses.pop(0)), None, None

    monkeypatch.setattr(module, "_MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(module, "_chunk_loss", chunk)
    with torch.no_grad():
        summed = cross_entropy(logits_per_chunk=3)(
            torch.zeros(9, 2), torch.zeros(3, 2), torch.zeros(9, dtype=torch.int64)
        )
    assert not losses and summed.item() == 2.0**25 + 8


def test_a_shard_of_the_vocabulary_holds_its_own_targets() -> None:
    shard: Any = SimpleNamespace(first=10)
    targets = torch.tensor([IGNORE_INDEX, 9, 10, 12, 14, 15])
    rows, is_mine = module._rows(targets, torch.zeros(5, 3), shard)
    assert is_mine.flatten().tolist() == [False, False, True, True, True, False]
    assert rows.flatten().tolist() == [0, 0, 0, 2, 4, 4]
