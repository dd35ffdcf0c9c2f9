"""Attention: causal, within documents, with grouped query heads."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.harness.tolerances import ATTENTION_FLOAT64
from tests.unit.models.tiny import DIMS, tiny_decoder, tiny_samples
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.nn.attention import AttentionMask, BlockContext, ChunkWindow, SDPAKernel
from torchtitan_lite.nn.attention_scores import SoftCapKernel, plain_attention
from torchtitan_lite.nn.grouped_query import GroupedQuery, Temperature
from torchtitan_lite.nn.rope import Rope, rotate
from torchtitan_lite.serving.inference.kv_cache import _CachedCarry


def test_a_packed_document_equals_the_document_alone() -> None:
    # Positions restart, so that rotations are bitwise equal.
    lengths = [5, 1, 8]
    documents_BS = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].int()
    positions_BS = torch.cat([torch.arange(length) for length in lengths])[None]
    model = tiny_decoder().eval()
    tokens_BS = tiny_samples(1, sum(lengths))["tokens_BS"]
    rng_keys_B = torch.zeros(1, dtype=torch.int64)
    packed_BSV = model(
        tokens_BS, positions_BS=positions_BS, rng_keys_B=rng_keys_B, documents_BS=documents_BS
    )
    for start, length in zip([0, 5, 6], lengths, strict=True):
        part = slice(start, start + length)
        alone = model(tokens_BS[:, part], positions_BS=positions_BS[:, part], rng_keys_B=rng_keys_B)
        torch.testing.assert_close(packed_BSV[:, part], alone, atol=ATTENTION_FLOAT64, rtol=0)
    mixed_BSV = model(tokens_BS, positions_BS=positions_BS, rng_keys_B=rng_keys_B)
    assert (mixed_BSV[:, 5:] - packed_BSV[:, 5:]).abs().min(dim=-1).values.max() > 1e-5


def test_a_later_token_changes_no_earlier_logit() -> None:
    model = tiny_decoder().eval()
    samples = dict(tiny_samples())
    before_BSV = model(**samples)
    samples["tokens_BS"] = samples["tokens_BS"].clone()
    samples["tokens_BS"][:, 9] = (samples["tokens_BS"][:, 9] + 1) % DIMS.vocab_size
    after_BSV = model(**samples)
    torch.testing.assert_close(after_BSV[:, :9], before_BSV[:, :9], atol=ATTENTION_FLOAT64, rtol=0)
    assert ((after_BSV - before_BSV)[:, 9:].abs().amax(-1) > 1e-6).all()


def test_only_documents_need_a_mask() -> None:
    positions_BS = torch.arange(4).repeat(2, 1)
    assert AttentionMask("sdpa")(positions_BS, None) is None
    documents_BS = torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]], dtype=torch.int32)
    mask = AttentionMask("sdpa")(positions_BS, documents_BS)
    assert mask.int().tolist() == [
        [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]],
        [[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]],
    ]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_attention_is_softmax_of_scores_over_the_past(num_kv_heads: int) -> None:
    draws = torch.Generator().manual_seed(0)
    rope = Rope(head_dim=10, theta=100.0)
    dims = GroupedQuery(num_heads=6, num_kv_heads=num_kv_heads, head_dim=10, rotation=rope)
    attention = dims.build(20, "sdpa").double()
    x_BSD = torch.randn(2, 7, 20, generator=draws, dtype=torch.float64)
    positions_BS = torch.arange(7).repeat(2, 1)
    cos, sin = rope.build()(positions_BS)
    context = BlockContext(cos, sin, None, positions_BS, torch.zeros(2, dtype=torch.int64))

    q_BSHE = rotate(attention.wq(x_BSD).unflatten(-1, (6, 10)), cos, sin)
    k_BSKE = rotate(attention.wk(x_BSD).unflatten(-1, (num_kv_heads, 10)), cos, sin)
    v_BSKE = attention.wv(x_BSD).unflatten(-1, (num_kv_heads, 10))
    heads = []
    for head in range(6):
        shared = head * num_kv_heads // 6
        scores_BSS = q_BSHE[:, :, head] @ k_BSKE[:, :, shared].mT / 10**0.5
        future_SS = torch.ones(7, 7, dtype=torch.bool).triu(1)
        weights_BSS = scores_BSS.masked_fill(future_SS, -torch.inf).softmax(-1)
        heads.append(weights_BSS @ v_BSKE[:, :, shared])
    expected_BSD = attention.wo(torch.cat(heads, dim=-1))

    torch.testing.assert_close(
        attention(x_BSD, context), expected_BSD, atol=ATTENTION_FLOAT64, rtol=0
    )


def test_without_a_mask_the_kernel_uses_its_causal_path() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(SDPAKernel()(q, k, v, None), expected)


def test_temperatures_grow_in_float32_whatever_the_default_dtype() -> None:
    temperature, positions_BS = Temperature(weight=0.5, interval=2), torch.arange(4)[None]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        factors_BS = temperature.of(positions_BS)
    finally:
        torch.set_default_dtype(before)
    once, twice = (1 + 0.5 * math.log1p(turns) for turns in (1, 2))
    expected_BS = torch.tensor([[1.0, once, once, twice]])
    assert factors_BS.dtype == expected_BS.dtype == torch.float32
    torch.testing.assert_close(factors_BS, expected_BS)


def test_a_chunk_sees_its_own_positions_up_to_the_query() -> None:
    positions = torch.arange(10)
    seen_SS = ChunkWindow(4).sees(positions[:, None], positions)
    for query in range(10):
        assert seen_SS[query].nonzero().flatten().tolist() == list(range(query // 4 * 4, query + 1))


def test_scores_with_sinks_are_normalized_in_float32() -> None:
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 8, generator=draws).bfloat16() for _ in range(3))
    sinks_H = torch.randn(2, generator=draws).bfloat16()
    scores = (q @ k.mT * 8**-0.5).float()
    scores.masked_fill_(~torch.ones(32, 32, dtype=torch.bool).tril(), -torch.inf)
    sinks = sinks_H.float()[:, None, None].expand(1, 2, 32, 1)
    shares = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    assert torch.equal(plain_attention(q, k, v, None, sinks_H=sinks_H), shares.bfloat16() @ v)


def test_a_soft_cap_bounds_the_scores_before_the_mask() -> None:
    draws = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 9, 8, generator=draws, dtype=torch.float64) * 5
    k, v = (torch.randn(1, 2, 9, 8, generator=draws, dtype=torch.float64) for _ in range(2))
    past = torch.ones(9, 9, dtype=torch.bool).tril()
    whole = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    scores = torch.tanh(q @ whole[0].mT * 8**-0.5 / 1.5) * 1.5
    expected = scores.masked_fill(~past, -torch.inf).softmax(-1) @ whole[1]
    kernel = SoftCapKernel("sdpa", 1.5)
    for mask in (None, past[None, None]):
        torch.testing.assert_close(kernel(q, k, v, mask), expected, atol=ATTENTION_FLOAT64, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"soft_cap": 0.0}, "soft cap of scores .0.0. must be above 0"),
        ({"soft_cap": 1.0, "has_sinks": True}, "without sinks"),
        ({"fused": True}, "as many heads of keys and values .1. as of queries .2."),
    ],
)
def test_combinations_that_no_kernel_has_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupedQuery(num_heads=2, num_kv_heads=1, head_dim=4, rotation=None, **change)


def test_the_cached_state_of_a_recurrence_is_float32() -> None:
    carry: Any = _CachedCarry.__new__(_CachedCarry)
    carry._input_shape, carry._state_shape = (3, 4), (2, 5, 7)
    carry._dtype, carry._device = torch.bfloat16, torch.device("cpu")
    carry.allocate(6, 100)
    assert carry._inputs_BMI.shape == (6, 3, 4) and carry._inputs_BMI.dtype == torch.bfloat16
    assert carry._state_BHEG.shape == (6, 2, 5, 7) and carry._state_BHEG.dtype == torch.float32
