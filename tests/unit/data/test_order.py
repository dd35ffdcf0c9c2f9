"""The sample order: a permutation per epoch, blends by weight, shares of ranks."""

import numpy as np
import pytest

from torchtitan_lite.data import SampleOrder, microbatch_indices, order


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 64, 257, 1023, 5000])
def test_each_epoch_uses_each_block_once(size: int) -> None:
    corpora, epochs, blocks = SampleOrder(3, [size], [1.0]).locate(np.arange(3 * size))
    assert not corpora.any()
    for epoch in range(3):
        assert sorted(blocks[epochs == epoch]) == list(range(size))
        assert (epochs[epoch * size : (epoch + 1) * size] == epoch).all()


def test_seeds_and_epochs_give_different_orders_without_structure() -> None:
    size = 4001
    indices = np.arange(2 * size)
    _, _, blocks = SampleOrder(1, [size], [1.0]).locate(indices)
    _, _, others = SampleOrder(2, [size], [1.0]).locate(indices)
    for a, b in [
        (blocks[:size], blocks[size:]),
        (blocks[:size], others[:size]),
        (blocks[:size], np.arange(size)),
    ]:
        assert (a == b).mean() < 0.01
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.1
    neighbours = np.abs(np.diff(blocks[:size])).mean()
    assert abs(neighbours / size - 1 / 3) < 0.03


@pytest.mark.parametrize(
    "expected",
    [
        *([1, 0], [1, 0, 2], [1, 3, 2, 0], [3, 2, 4, 1, 0]),
        [5, 8, 4, 7, 14, 13, 11, 6, 9, 2, 0, 15, 12, 3, 10, 1],
        [2, 5, 14, 3, 13, 10, 8, 1, 4, 9, 12, 7, 0, 6, 11, 16, 15],
    ],
)
def test_permutations_are_those_of_earlier_releases(expected: list[int]) -> None:
    """A run that resumes with another release must continue in the same order."""
    size = len(expected)
    permuted = order.permute(np.arange(size), size, np.full(size, np.uint64(12345)))
    assert permuted.tolist() == expected


def test_a_blend_is_that_of_earlier_releases() -> None:
    blend = SampleOrder(3, [None, 5, None, 4], [0.5, 0.25, 0.125, 0.125], [1, 1, 2, 1])
    located = [" ".join(map(str, values)) for values in blend.locate(np.arange(24))]
    assert located == [
        "0 1 0 2 0 1 0 3 0 1 0 2 0 1 0 3 0 1 0 2 0 1 0 3",
        "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 0 0",
        "0 1 1 1 2 4 3 0 4 3 5 0 6 0 7 1 8 2 9 2 10 0 11 2",
    ]


@pytest.mark.parametrize(("sizes", "weights"), [([], []), ([4], [1.0, 1.0]), ([4, 4], [1.0])])
def test_each_corpus_needs_a_weight(sizes: list[int], weights: list[float]) -> None:
    with pytest.raises(ValueError, match=f"{len(sizes)} sizes and {len(weights)} weights"):
        SampleOrder(0, sizes, weights)


@pytest.mark.parametrize("window", [1, 2, 7, 64])
def test_each_window_of_a_stream_is_permuted(window: int) -> None:
    order = SampleOrder(3, [None, 50], [2.0, 1.0], [window, 1])
    corpora, epochs, blocks = order.locate(np.arange(window * 60))
    streamed = blocks[corpora == 0]
    assert not epochs[corpora == 0].any()
    windows = streamed[: len(streamed) // window * window].reshape(-1, window)
    firsts = np.arange(len(windows))[:, None] * window
    assert (np.sort(windows, axis=1) == firsts + np.arange(window)).all()
    if window > 2:
        # The permutations differ between windows.
        assert len({tuple(row) for row in windows - firsts}) > len(windows) / 2


def test_order_is_a_function_of_the_index() -> None:
    order = SampleOrder(5, [101, 37], [2.0, 1.0])
    together = np.stack(order.locate(np.arange(1000)))
    far = np.stack(order.locate(np.array([999, 3, 500])))
    assert (far == together[:, [999, 3, 500]]).all()


@pytest.mark.parametrize(
    "weights",
    [
        *([1.0], [0.7, 0.3], [1, 1, 1], [0.5, 0.1, 0.25, 0.15], [1e-3, 1.0, 3.14159], [1.0] * 10),
        # Of more digits than are kept.
        *([0.123456789, 0.876543211], [1e-12, 1.0], [2e9, 1e9 + 1]),
    ],
)
def test_blend_keeps_shares_and_has_no_gaps(weights: list[float]) -> None:
    num_samples = 6000
    order = SampleOrder(0, [None] * len(weights), weights)
    corpora, epochs, blocks = order.locate(np.arange(num_samples))
    assert not epochs.any()
    for corpus, weight in enumerate(weights):
        here = corpora == corpus
        assert (blocks[here] == np.arange(here.sum())).all()
        used = np.concatenate([[0], np.cumsum(here)])
        share = np.arange(num_samples + 1) * weight / sum(weights)
        assert np.abs(used - share).max() <= 2
        for cursor in (0, 1, 2, 999, num_samples):
            assert order.corpus_samples_before(cursor, corpus) == used[cursor]


def test_a_corpus_of_tiny_weight_is_used_as_rarely_as_possible() -> None:
    order = SampleOrder(0, [None, None], [1e-9, 1.0])
    assert [order.corpus_samples_before(n << 20, 0) for n in (1, 2, 40)] == [1, 2, 40]


@pytest.mark.parametrize(("local", "steps_of"), [(2, 8), (1, 12), (3, 12)])
def test_ranks_divide_a_step_for_every_world_size(local: int, steps_of: int) -> None:
    for num_ranks in (1, 2, 4):
        if steps_of % (local * num_ranks):
            continue
        shares = [
            microbatch_indices(range(40, 40 + steps_of), local, rank, num_ranks)
            for rank in range(num_ranks)
        ]
        rounds = [samples for parts in zip(*shares, strict=True) for samples in parts]
        assert [i for samples in rounds for i in samples] == list(range(40, 40 + steps_of))
        assert all(len(samples) == local for samples in rounds)


def test_share_of_step_rejects_an_indivisible_batch() -> None:
    with pytest.raises(ValueError, match="10 samples in rounds of 4"):
        microbatch_indices(range(10), 2, 0, 2)


def test_weights_of_many_digits_are_rounded_to_units_of_their_sum() -> None:
    weights = [7 / 3, 14 / 3 * 1.0000001, 3e-8]
    integers = order._integer_weights(weights)
    total = sum(weights)
    assert integers[2] == 1
    for weight, integer in zip(weights[:2], integers[:2], strict=True):
        assert integer == pytest.approx(weight / total * 2**20, abs=1)
