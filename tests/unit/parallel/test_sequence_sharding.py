"""The positions of each rank."""

from typing import Any

import pytest
import torch

from torchtitan_lite.parallel.context import (
    SequenceSharding,
    _attending,
    _CarryOverRanks,
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
