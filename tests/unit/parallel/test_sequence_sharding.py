"""The positions of each rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.threads import run_on_threads
from torchtitan_lite.nn.recurrent import AffineMap
from torchtitan_lite.parallel.context import (
    SequenceSharding,
    _attending,
    _CarryOverRanks,
    _UlyssesKernel,
    sequence_order,
)


def test_each_rank_has_a_chunk_from_the_head_and_one_from_the_tail() -> None:
    order = sequence_order(12, 3, True)
    assert order.dtype == torch.int64
    assert order.tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]


def test_without_balancing_positions_keep_their_order() -> None:
    assert sequence_order(12, 3, False).tolist() == list(range(12))


def test_chunks_must_be_equal() -> None:
    with pytest.raises(ValueError, match="10 positions does not divide into 4 chunks"):
        sequence_order(10, 2, True)


@pytest.mark.parametrize("head_tail", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_in_a_ring_each_query_attends_once_to_each_key_up_to_its_position(
    num_ranks: int, head_tail: bool
) -> None:
    length = 4
    device = torch.device("cpu")
    num_positions = num_ranks * length
    attended_SS = torch.zeros(num_positions, num_positions, dtype=torch.int64)
    shardings = [
        SequenceSharding(num_ranks=num_ranks, rank=rank, head_tail=head_tail)
        for rank in range(num_ranks)
    ]
    own = [sharding.own(num_positions, device) for sharding in shardings]
    for rank, sharding in enumerate(shardings):
        for turn in range(num_ranks):
            attending = _attending(sharding, turn, length)
            if attending is None:
                continue
            queries, keys, is_causal = attending
            # Those of the rank before arrive in each turn.
            rows, columns = own[rank][queries], own[(rank - turn) % num_ranks][keys]
            pairs = torch.ones(len(rows), len(columns), dtype=torch.int64)
            attended_SS[rows[:, None], columns] += pairs.tril() if is_causal else pairs
    assert torch.equal(attended_SS, torch.ones_like(attended_SS).tril())


@pytest.mark.parametrize("head_tail", [True, False])
def test_pieces_know_the_documents_of_the_positions_before_them(head_tail: bool) -> None:
    documents_BS = torch.arange(24).view(2, 12)
    sharding = SequenceSharding(num_ranks=2, rank=1, head_tail=head_tail)
    group: Any = None
    found_ZS = _CarryOverRanks(sharding, group).documents(documents_BS, 2)
    length = 3 if head_tail else 6
    starts = [3, 6] if head_tail else [6]
    expected = [
        documents_BS[sample, start - 2 : start + length] for sample in (0, 1) for start in starts
    ]
    assert torch.equal(found_ZS, torch.stack(expected))


@pytest.mark.parametrize("head_tail", [True, False])
def test_pieces_take_over_the_inputs_and_the_state_of_the_pieces_before(head_tail: bool) -> None:
    length, num_before = 12, 2
    draws = torch.Generator().manual_seed(0)
    inputs_BSI = torch.randn(2, length, 5, generator=draws, dtype=torch.float64)
    num_pieces = 4 if head_tail else 2
    matrices_PBHEE = torch.randn(num_pieces, 2, 1, 3, 3, generator=draws, dtype=torch.float64)
    offsets_PBHEG = torch.randn(num_pieces, 2, 1, 3, 4, generator=draws, dtype=torch.float64)
    padded = nn.functional.pad(inputs_BSI, (0, 0, num_before, 0))
    size = length // num_pieces
    states = [torch.zeros_like(offsets_PBHEG[0])]
    for matrix, offset in zip(matrices_PBHEE, offsets_PBHEG, strict=True):
        states.append(matrix @ states[-1] + offset)

    def take_over() -> None:
        group = dist.group.WORLD
        assert group is not None
        sharding = SequenceSharding(num_ranks=2, rank=dist.get_rank(), head_tail=head_tail)
        pieces = sharding.own_pieces
        carry = _CarryOverRanks(sharding, group)
        inputs = [inputs_BSI[:, piece * size : (piece + 1) * size] for piece in pieces]
        extended = carry.extend(torch.stack(inputs, 1).flatten(0, 1), num_before)
        wanted = [padded[:, one * size : (one + 1) * size + num_before] for one in pieces]
        assert torch.equal(extended, torch.stack(wanted, 1).flatten(0, 1))
        own = AffineMap(
            matrices_PBHEE[pieces].movedim(0, 1).flatten(0, 1),
            offsets_PBHEG[pieces].movedim(0, 1).flatten(0, 1),
        )
        expected = torch.stack([states[piece] for piece in pieces], 1).flatten(0, 1)
        torch.testing.assert_close(carry.begin(own), expected)

    run_on_threads(2, take_over)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_exchanged_heads_attend_over_entire_sequences(num_kv_heads: int) -> None:
    length = 8
    draws = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, 3, generator=draws)
        for heads in (4, num_kv_heads, num_kv_heads)
    )
    expected = _Attend()(q, k, v, None)
    num_heads: list[int] = []

    def attend() -> None:
        group = dist.group.WORLD
        assert group is not None
        sharding = SequenceSharding(num_ranks=2, rank=dist.get_rank(), head_tail=True)
        own = sharding.own(length, torch.device("cpu"))
        inner = _Attend()
        inner.register_forward_pre_hook(lambda _, inputs: num_heads.append(inputs[1].shape[1]))
        out = _UlyssesKernel(inner, sharding, group)(q[:, :, own], k[:, :, own], v[:, :, own], None)
        torch.testing.assert_close(out, expected[:, :, own])

    run_on_threads(2, attend)
    # Heads are copied only where there are too few for all ranks.
    assert num_heads == [{1: 2, 2: 1, 4: 2}[num_kv_heads]] * 2


class _Attend(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None) -> Any:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
