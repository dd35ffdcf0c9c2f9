"""Blocks of `seq_len` + 1 tokens cut from one long row of documents.

Layer: above errors. Invariant: block i is tokens [i*S, i*S + S], so neighbours share one token
and every token but the first (and a tail shorter than a block) is a target exactly once.
"""

from typing import Protocol

import numpy as np

from torchtitan_lite.errors import DataError


class BlockSource(Protocol):
    """Anything that blocks can be read from."""

    @property
    def num_blocks(self) -> int | None:
        """None for a stream, which has no end."""
        ...

    def read(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """tokens int64 [n, S+1] and document numbers int32 [n, S+1] of `blocks` (int64 [n])."""
        ...


class PackedBlocks:
    """The blocks of tokens that lie in memory or in a mapped file."""

    def __init__(
        self,
        tokens: np.ndarray,
        document_starts: np.ndarray,
        seq_len: int,
        *,
        name: str = "the corpus",
        remedy: str = "lower seq_len or add documents",
    ) -> None:
        if len(tokens) < seq_len + 1:
            raise DataError(
                f"{name} has {len(tokens)} tokens in {len(document_starts)} documents, but one "
                f"block needs seq_len + 1 = {seq_len + 1}; {remedy}."
            )
        self._tokens = tokens
        self._document_starts = document_starts
        self._seq_len = seq_len
        self._num_blocks = (len(tokens) - 1) // seq_len

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def read(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """tokens int64 [n, S+1] and document numbers int32 [n, S+1]; see `cut_blocks`."""
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self._num_blocks:
            raise IndexError(f"blocks {blocks} of a corpus with {self._num_blocks}")
        starts = blocks * self._seq_len
        return cut_blocks(self._tokens, self._document_starts, starts, self._seq_len)


def cut_blocks(
    tokens: np.ndarray, document_starts: np.ndarray, starts: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """The blocks that begin at `starts`: tokens int64 [n, S+1], and the number of the document
    that each token belongs to, int32 [n, S+1], rising from 0 within the block."""
    places = starts[:, None] + np.arange(seq_len + 1)
    documents = np.searchsorted(document_starts, places, side="right")
    documents -= documents[:, :1].copy()
    return tokens[places].astype(np.int64), documents.astype(np.int32)
