"""The sample order: the block and corpus of sample i of the run.

Invariant: it is a pure function of the seed and the index, evaluated in O(1) memory at any position
of the run. It does not depend on the number of ranks, the batch size, or restarts, so a resume
needs only a cursor.

Within a corpus each epoch is a keyed permutation: a balanced Feistel network over the next power of
four, with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Corpora
are blended by Bresenham sequences: of the samples that the heavier corpora leave, number i belongs
to a corpus of share p/q if round(i*p/q) increases after it. A corpus's count after any number of
samples is therefore a closed form, within two of its exact share for up to ten corpora.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from torchtitan_lite.core.rng import fold, mix

_NUM_ROUNDS = 6
_WEIGHT_UNITS = 2**20
"""Maximum sum of the integer weights, so that i*p fits int64 for i < 2**42."""


def microbatch_indices(
    samples: range,
    local_batch_size: int,
    batch_rank: int,
    num_batch_ranks: int,
) -> list[range]:
    """Return the sample indices of one rank's microbatches in a step.

    Microbatch m of rank r contains first + m*local*ranks + r*local + [0, local). The number of
    samples is a multiple of local*ranks, which the config has checked.
    """
    round_size = local_batch_size * num_batch_ranks
    if len(samples) % round_size:
        raise ValueError(f"{len(samples)} samples in rounds of {round_size}")
    first = batch_rank * local_batch_size
    return [
        range(start + first, start + first + local_batch_size)
        for start in range(samples.start, samples.stop, round_size)
    ]


class SampleOrder:
    """The sample order of a blend of corpora. `sizes` are numbers of blocks; None is a stream, read
    in its own order, except that each `window` of consecutive blocks is permuted."""

    def __init__(
        self,
        seed: int,
        sizes: Sequence[int | None],
        weights: Sequence[float],
        windows: Sequence[int] | None = None,
    ) -> None:
        """`windows` are those of streams; by default 1."""
        if not sizes or len(sizes) != len(weights):
            raise ValueError(f"{len(sizes)} sizes and {len(weights)} weights")
        self._sizes = tuple(sizes)
        self._windows = (1,) * len(sizes) if windows is None else tuple(windows)
        self._keys = [np.uint64(fold(seed, "sample order", i)) for i in range(len(sizes))]
        self._weights = _integer_weights(weights)
        # Heaviest first keeps the rounding errors of the chain small.
        self._chain = sorted(range(len(sizes)), key=lambda i: (-self._weights[i], i))

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (corpus, epoch, block) of each sample index; int64 [n] each."""
        corpora, own = self._blend(indices.astype(np.int64))
        epochs = np.zeros_like(own)
        blocks = own.copy()
        for corpus, size in enumerate(self._sizes):
            here = corpora == corpus
            period = self._windows[corpus] if size is None else size
            if (size is None and period == 1) or not here.any():
                continue
            period_index = own[here] // period
            permuted = permute(own[here] % period, period, self._key(corpus, period_index))
            if size is None:
                blocks[here] = period_index * period + permuted
            else:
                epochs[here], blocks[here] = period_index, permuted
        return corpora, epochs, blocks

    def corpus_samples_before(self, cursor: int, corpus: int) -> int:
        """Count the samples before `cursor` from `corpus`."""
        left = cursor
        for taken, p, q in self._steps():
            count = (left * p + q // 2) // q
            if taken == corpus:
                return count
            left -= count
        raise IndexError(corpus)

    def _blend(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (corpus, index within the corpus) of each sample index."""
        corpora = np.empty_like(indices)
        own = np.empty_like(indices)
        places = np.arange(len(indices))
        for corpus, p, q in self._steps():
            count = (indices * p + q // 2) // q
            taken = ((indices + 1) * p + q // 2) // q > count
            corpora[places[taken]] = corpus
            own[places[taken]] = count[taken]
            places, indices = places[~taken], (indices - count)[~taken]
        return corpora, own

    def _steps(self) -> list[tuple[int, int, int]]:
        """Return (corpus, p, q): the corpus takes p of q of the remaining samples."""
        steps, q = [], sum(self._weights)
        for corpus in self._chain:
            steps.append((corpus, self._weights[corpus], q))
            q -= self._weights[corpus]
        return steps

    def _key(self, corpus: int, epochs: np.ndarray) -> np.ndarray:
        return mix(self._keys[corpus] ^ mix(epochs.astype(np.uint64)))


def permute(indices: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Permute `indices` in [0, size) by the permutations that `keys` (uint64, one per index)
    choose; int64."""
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    # Cycle walking: the network permutes [0, 4**half_bits); iterating until the value is in
    # [0, size) gives a permutation of that range, after fewer than four steps on average.
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, keys[outside])
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round in range(_NUM_ROUNDS):
        scattered = mix(mix(keys ^ np.uint64(round)) ^ right) & mask
        left, right = right, left ^ scattered
    return (left << shift) | right


def _integer_weights(weights: Sequence[float]) -> list[int]:
    """Return the weights as integers in the same ratio, exactly for decimals of few digits."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * scale) for weight in exact]
    if sum(integers) <= _WEIGHT_UNITS:
        return integers
    total = sum(exact)
    return [max(1, round(weight * _WEIGHT_UNITS / total)) for weight in exact]
