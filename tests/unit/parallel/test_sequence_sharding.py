"""The positions of each rank."""

import pytest
import torch

from torchtitan_lite.parallel.context import sequence_order


def test_each_rank_has_a_chunk_from_the_head_and_one_from_the_tail() -> None:
    order = sequence_order(12, 3, True)
    assert order.dtype == torch.int64
    assert order.tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]


def test_without_balancing_positions_keep_their_order() -> None:
    assert sequence_order(12, 3, False).tolist() == list(range(12))


def test_chunks_must_be_equal() -> None:
    with pytest.raises(ValueError, match="10 positions does not divide into 4 chunks"):
        sequence_order(10, 2, True)
