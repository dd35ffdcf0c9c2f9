"""The validation set, in rounds in which every rank participates.

Layer: above packing, windows and microbatch. Invariant: every rank gets the same number of rounds,
each of `local_batch_size` samples; over all ranks each sample is used once. If the number of
samples is not a multiple of the number of ranks, filler samples without targets complete the last
round.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from torchtitan_lite.data.microbatch import FILLER, collate
from torchtitan_lite.data.packing import Blocks, PackedBlocks
from torchtitan_lite.data.windows import DocumentWindows
from torchtitan_lite.spec import Microbatch


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
        for number, part in enumerate(self._parts):
            rows = (owner == number) & (indices != FILLER)
            if rows.any():
                first = int(self._ends[number]) - part.num_blocks
                blocks.put(rows, part.read(indices[rows] - first))
        return blocks
