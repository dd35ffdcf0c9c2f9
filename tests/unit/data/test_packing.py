"""Blocks and document ids, compared with a plain loop."""

import numpy as np
import pytest

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data.packing import PackedBlocks

SEQ_LEN = 7


def plain_blocks(documents: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    tokens = [token for document in documents for token in document]
    owners = [number for number, document in enumerate(documents) for _ in document]
    blocks = []
    start = 0
    while start + SEQ_LEN < len(tokens):
        places = range(start, start + SEQ_LEN + 1)
        blocks.append(([tokens[p] for p in places], [owners[p] - owners[start] for p in places]))
        start += SEQ_LEN
    return blocks


@pytest.mark.parametrize("seed", range(4))
def test_blocks_match_a_plain_loop(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 20, size=30)
    values = iter(range(10_000))
    documents = [[next(values) for _ in range(length)] for length in lengths]
    expected = plain_blocks(documents)
    flat = np.array([token for document in documents for token in document], dtype=np.uint16)
    blocks = PackedBlocks(flat, np.cumsum(lengths) - lengths, SEQ_LEN)
    assert blocks.num_blocks == len(expected)
    order = generator.permutation(len(expected))
    tokens, numbers, are_targets, _ = blocks.read(order)
    assert (tokens.dtype, numbers.dtype) == (np.int64, np.int32)
    assert are_targets.all()
    assert tokens.tolist() == [expected[block][0] for block in order]
    assert numbers.tolist() == [expected[block][1] for block in order]


def test_every_token_is_a_target_once() -> None:
    blocks = PackedBlocks(np.arange(71), np.array([0]), SEQ_LEN).read(np.arange(10))
    assert blocks.tokens[:, 1:].ravel().tolist() == list(range(1, 71))


@pytest.mark.parametrize("num_tokens", range(8, 23))
def test_tokens_of_an_incomplete_block_are_left_out(num_tokens: int) -> None:
    blocks = PackedBlocks(np.arange(num_tokens), np.array([0]), SEQ_LEN)
    assert blocks.num_blocks == len(plain_blocks([list(range(num_tokens))]))


def test_one_block_is_the_minimum() -> None:
    assert PackedBlocks(np.arange(SEQ_LEN + 1), np.array([0]), SEQ_LEN).num_blocks == 1
    with pytest.raises(DataError, match=r"7 tokens in 1 documents, .* seq_len \+ 1 = 8"):
        PackedBlocks(np.arange(SEQ_LEN), np.array([0]), SEQ_LEN)


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_out_of_range_is_rejected(index: int) -> None:
    blocks = PackedBlocks(np.arange(15), np.array([0]), SEQ_LEN)
    with pytest.raises(IndexError, match=rf"blocks \[ *{index}\] of a corpus with 2"):
        blocks.read(np.array([index]))
    assert blocks.read(np.array([], np.int64)).tokens.shape == (0, SEQ_LEN + 1)
