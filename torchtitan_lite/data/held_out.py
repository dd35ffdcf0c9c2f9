"""The validation set, in rounds in which every rank participates.

Invariant: every rank gets the same number of rounds, each of `local_batch_size` samples; over all
ranks each sample is used once. If the number of samples is not a multiple of the number of ranks,
filler samples without targets complete the last round.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data.loader import FILLER, collate
from torchtitan_lite.data.packing import Blocks, PackedBlocks
from torchtitan_lite.nn.spec import Microbatch


class DocumentWindows:
    """Blocks of one document each: its tokens after `prefix`, in windows of at most `seq_len`
    targets. The first window of a document has `seq_len` new targets, each further one `stride`,
    with the preceding tokens as context; a smaller stride gives more context at a higher cost.

    Raises DataError if no document has a target.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        document_starts: np.ndarray,
        seq_len: int,
        *,
        stride: int,
        prefix: int | None,
        num_after: int,
        target_bounds: np.ndarray | None,
        name: str,
        remedy: str,
    ) -> None:
        """Prepare the windows. `prefix`: the token before each document; None if documents
        already contain it. `num_after`: tokens at the end of each document that are not targets.
        `target_bounds`: as for `split_into_blocks`."""
        self._tokens, self._starts, self._bounds = tokens, document_starts, target_bounds
        self._seq_len, self._stride, self._prefix = seq_len, stride, prefix
        lengths = np.diff(document_starts, append=len(tokens)) + (prefix is not None)
        # From here on indices count from the prefix: a document's targets are 1 to `num_targets`.
        self._num_targets = np.maximum(lengths - 1 - num_after, 0)
        further = -(-np.maximum(self._num_targets - seq_len, 0) // stride)
        self._ends = np.cumsum(np.where(self._num_targets > 0, 1 + further, 0))
        if not len(self._ends) or self._ends[-1] == 0:
            raise DataError(f"{name} has no document of at least two tokens: {remedy}.")

    @property
    def num_blocks(self) -> int:
        """Number of windows over all documents."""
        return int(self._ends[-1])

    def read(self, blocks: np.ndarray) -> Blocks:
        """Return the windows with these numbers (int64 [n]); positions after the document have
        token 0 and are not targets."""
        document = np.searchsorted(self._ends, blocks, side="right")
        before = np.concatenate(([0], self._ends))[document]
        window = blocks - before
        new_from = np.where(window > 0, 1 + self._seq_len + (window - 1) * self._stride, 1)
        end = 1 + np.minimum(self._num_targets[document], self._seq_len + window * self._stride)
        first = np.maximum(end - 1 - self._seq_len, 0)
        indices = first[:, None] + np.arange(self._seq_len + 1)
        is_inside = indices < end[:, None]
        places = self._starts[document][:, None] + indices - (self._prefix is not None)
        tokens = self._tokens[np.where(is_inside, np.maximum(places, 0), 0)].astype(np.int64)
        if self._prefix is not None:
            tokens[indices == 0] = self._prefix
        are_targets = is_inside & (indices >= new_from[:, None])
        if self._bounds is not None:
            are_targets &= np.searchsorted(self._bounds, places, side="right") % 2 == 1
        return Blocks(tokens * is_inside, np.zeros(indices.shape, np.int32), are_targets)


class ValidationData:
    """Blocks of one or more corpora in sequence."""

    def __init__(
        self,
        parts: Sequence[PackedBlocks | DocumentWindows],
        *,
        seq_len: int,
        local_batch_size: int,
        steps: int,
        seed: int,
        document_mask: bool,
        pin_memory: bool,
    ) -> None:
        self._parts = tuple(parts)
        self._ends = np.cumsum([part.num_blocks for part in parts])
        self._seq_len = seq_len
        self._local_batch_size = local_batch_size
        self._steps = steps
        self._seed = seed
        self._document_mask = document_mask
        self._pin_memory = pin_memory

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return int(self._ends[-1])

    def num_rounds(self, num_batch_ranks: int) -> int:
        """Return the rounds per rank: all blocks, or at most `steps`."""
        whole = -(-self.num_blocks // (self._local_batch_size * num_batch_ranks))
        return whole if self._steps == -1 else min(self._steps, whole)

    def microbatches(self, batch_rank: int, num_batch_ranks: int) -> Iterator[list[Microbatch]]:
        """Yield this rank's rounds, in the same order each time. With fewer `steps` than rounds,
        the blocks used are spread evenly over the set."""
        rounds = self.num_rounds(num_batch_ranks)
        places = rounds * num_batch_ranks * self._local_batch_size
        used = min(places, self.num_blocks)
        samples = np.full(places, FILLER, dtype=np.int64)
        samples[:used] = np.arange(used) * self.num_blocks // used
        own_samples = samples.reshape(rounds, num_batch_ranks, self._local_batch_size)[
            :, batch_rank
        ]
        for indices in own_samples:
            yield [
                collate(
                    self._read(indices),
                    indices.tolist(),
                    seed=self._seed,
                    step=0,
                    document_mask=self._document_mask,
                    pin_memory=self._pin_memory,
                )
            ]

    def _read(self, indices: np.ndarray) -> Blocks:
        blocks = Blocks.empty(len(indices), self._seq_len)
        owner = np.searchsorted(self._ends, indices, side="right")
        for index, part in enumerate(self._parts):
            rows = (owner == index) & (indices != FILLER)
            if rows.any():
                first = int(self._ends[index]) - part.num_blocks
                blocks.put(rows, part.read(indices[rows] - first))
        return blocks
