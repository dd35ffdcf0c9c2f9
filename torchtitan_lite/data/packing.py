"""Blocks of `seq_len` + 1 tokens from the concatenated documents.

Invariant: block i is tokens [i*S, i*S + S], so neighbors share one token and every token except the
first (and a tail shorter than a block) is a target exactly once, unless its document excludes it.
"""

from typing import NamedTuple

import numpy as np

from torchtitan_lite.core.errors import DataError


class Blocks(NamedTuple):
    """A batch of blocks, as arrays [n, S+1]."""

    tokens: np.ndarray
    """int64."""
    documents: np.ndarray
    """int32 index of each token's document, ascending from 0 within the block."""
    are_targets: np.ndarray
    """bool: targets. All tokens are, except in conversations, where only the assistant's are."""
    values: dict[str, np.ndarray] = {}
    """float64 numbers of each token by name; only of online data sets."""

    @classmethod
    def empty(cls, count: int, seq_len: int) -> "Blocks":
        """Allocate `count` blocks without targets."""
        shape = (count, seq_len + 1)
        return cls(
            np.zeros(shape, np.int64), np.zeros(shape, np.int32), np.zeros(shape, np.bool_), {}
        )

    def put(self, rows: np.ndarray, blocks: "Blocks") -> None:
        """Copy `blocks` to `rows`. Values that only some blocks have are 0 elsewhere."""
        self.tokens[rows] = blocks.tokens
        self.documents[rows] = blocks.documents
        self.are_targets[rows] = blocks.are_targets
        for name, values in blocks.values.items():
            self.values.setdefault(name, np.zeros(self.tokens.shape))[rows] = values

    def rows(self, rows: slice) -> "Blocks":
        """Return some blocks, as views."""
        values = {name: array[rows] for name, array in self.values.items()}
        return Blocks(self.tokens[rows], self.documents[rows], self.are_targets[rows], values)


class PackedBlocks:
    """Blocks of tokens in memory or in a mapped file."""

    def __init__(
        self,
        tokens: np.ndarray,
        document_starts: np.ndarray,
        seq_len: int,
        *,
        target_bounds: np.ndarray | None = None,
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
        self._target_bounds = target_bounds
        self._seq_len = seq_len
        self._num_blocks = (len(tokens) - 1) // seq_len

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def read(self, blocks: np.ndarray) -> Blocks:
        """Return the blocks with these numbers (int64 [n]); see `split_into_blocks`."""
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self._num_blocks:
            raise IndexError(f"blocks {blocks} of a corpus with {self._num_blocks}")
        starts = blocks * self._seq_len
        return split_into_blocks(
            self._tokens, self._document_starts, starts, self._seq_len, self._target_bounds
        )


def split_into_blocks(
    tokens: np.ndarray,
    document_starts: np.ndarray,
    starts: np.ndarray,
    seq_len: int,
    target_bounds: np.ndarray | None = None,
) -> Blocks:
    """Read the blocks that begin at `starts`. Targets are the tokens [b0, b1), [b2, b3) and so on
    of `target_bounds`; None: all."""
    places = starts[:, None] + np.arange(seq_len + 1)
    documents = np.searchsorted(document_starts, places, side="right")
    documents -= documents[:, :1].copy()
    if target_bounds is None:
        are_targets = np.ones(places.shape, np.bool_)
    else:
        are_targets = np.searchsorted(target_bounds, places, side="right") % 2 == 1
    return Blocks(tokens[places].astype(np.int64), documents.astype(np.int32), are_targets)
