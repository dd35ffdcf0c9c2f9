"""Windows over documents: each token is a target once, with the context that the stride leaves."""

from typing import Any

import numpy as np
import pytest

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data.held_out import DocumentWindows

BOS, EOS, SEQ_LEN = 1, 2, 8
LENGTHS = (0, 1, 5, 7, 8, 9, 16, 17, 30)


def rolling_windows(
    tokens: list[int], prefix: int, seq_len: int, stride: int
) -> list[tuple[list[int], list[int]]]:
    """Return (context, targets) of each window, following the definition: the first has up to
    `seq_len` targets, the others the next `stride`, each with the `seq_len` tokens before its last
    target."""
    row, result, done = [prefix, *tokens], [], 0
    while done < len(tokens):
        end = min(len(tokens), done + (stride if done else seq_len))
        context = row[max(0, end - seq_len) : end]
        result.append((context, tokens[done:end]))
        done = end
    return result


def windows(documents: list[np.ndarray], **options: Any) -> DocumentWindows:
    starts = np.cumsum([0, *(len(one) for one in documents[:-1])])
    settings: dict[str, Any] = {"stride": SEQ_LEN, "prefix": None, "num_after": 1}
    settings |= {"target_bounds": None, "name": "the set", "remedy": "add documents", **options}
    return DocumentWindows(np.concatenate(documents), starts, SEQ_LEN, **settings)


@pytest.mark.parametrize("stride", [1, 3, SEQ_LEN])
@pytest.mark.parametrize("has_bos", [True, False])
@pytest.mark.parametrize("has_eos", [True, False])
def test_windows_follow_the_definition(stride: int, has_bos: bool, has_eos: bool) -> None:
    texts = [np.arange(10, 10 + n) + 100 * i for i, n in enumerate(LENGTHS)]
    before, after = [BOS] * has_bos, [EOS] * has_eos
    documents = [np.array([*before, *text, *after], dtype=np.uint16) for text in texts]
    source = windows(
        documents, stride=stride, prefix=None if has_bos else EOS, num_after=int(has_eos)
    )
    expected = [
        window
        for text in texts
        for window in rolling_windows(text.tolist(), BOS if has_bos else EOS, SEQ_LEN, stride)
    ]
    actual = source.read(np.arange(source.num_blocks))
    assert source.num_blocks == len(expected)
    assert not actual.documents.any() and not actual.are_targets[:, 0].any()
    for tokens, are_targets, (context, targets) in zip(
        actual.tokens, actual.are_targets, expected, strict=True
    ):
        assert tokens[are_targets].tolist() == targets
        assert tokens[: len(context)].tolist() == context
        # The last target follows the context.
        assert np.flatnonzero(are_targets)[-1] == len(context)
        assert not tokens[len(context) + 1 :].any()
    shuffled = np.random.default_rng(0).permutation(source.num_blocks)
    again = source.read(shuffled)
    assert all((a == b[shuffled]).all() for a, b in zip(again[:3], actual[:3], strict=True))


def test_only_assistant_tokens_are_targets() -> None:
    documents = [np.arange(20), np.arange(20, 30)]
    bounds = np.array([3, 5, 12, 14, 22, 30])
    source = windows(documents, num_after=0, target_bounds=bounds, stride=4)
    actual = source.read(np.arange(source.num_blocks))
    targets = sorted(actual.tokens[actual.are_targets].tolist())
    assert targets == [3, 4, 12, 13, *range(22, 30)]


def test_documents_without_a_target_are_rejected() -> None:
    with pytest.raises(DataError, match="the set has no document of at least two tokens"):
        windows([np.array([BOS, EOS])])
