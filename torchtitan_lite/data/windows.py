"""Windows over documents, for evaluation: every token of every document is a target exactly once,
but the first one if the tokenizer has no token to put before it.

Layer: above errors and packing. Each document is seen by itself, from its beginning, as by
`loglikelihood_rolling` of lm-eval: the token that begins a document is context, and the one that
ends it is no target, because it is not part of the text.
"""

import numpy as np

from torchtitan_lite.data.packing import Blocks
from torchtitan_lite.errors import DataError


class DocumentWindows:
    """Blocks of one document each: its tokens after `prefix`, in windows of `seq_len` targets at
    most. The first window of a document has `seq_len` new targets, each further one `stride`, with
    the tokens before them as context; so a smaller stride means more context and more work.

    Raises DataError where no document has a target.
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
        """`prefix`: the token to put before each document; None if documents hold it already.
        `num_after`: tokens at the end of each document that are no targets. `target_bounds` as
        `cut_blocks` takes them."""
        self._tokens, self._starts, self._bounds = tokens, document_starts, target_bounds
        self._seq_len, self._stride, self._prefix = seq_len, stride, prefix
        lengths = np.diff(document_starts, append=len(tokens)) + (prefix is not None)
        # Indices from here on count from the prefix: targets are 1 to `num_targets` of a document.
        self._num_targets = np.maximum(lengths - 1 - num_after, 0)
        further = -(-np.maximum(self._num_targets - seq_len, 0) // stride)
        self._ends = np.cumsum(np.where(self._num_targets > 0, 1 + further, 0))
        if not len(self._ends) or self._ends[-1] == 0:
            raise DataError(
                f"{name} has no token that follows another one in its document: {remedy}."
            )

    @property
    def num_blocks(self) -> int:
        """Windows over all documents."""
        return int(self._ends[-1])

    def read(self, blocks: np.ndarray) -> Blocks:
        """The windows with these numbers (int64 [n]); places after the document hold token 0 and
        are no targets."""
        document = np.searchsorted(self._ends, blocks, side="right")
        before = np.concatenate(([0], self._ends))[document]
        window = blocks - before
        new_from = np.where(window > 0, 1 + self._seq_len + (window - 1) * self._stride, 1)
        end = 1 + np.minimum(self._num_targets[document], self._seq_len + window * self._stride)
        first = np.maximum(end - 1 - self._seq_len, 0)
        indices = first[:, None] + np.arange(self._seq_len + 1)
        is_inside = indices < end[:, None]
        places = self._starts[document][:, None] + indices - (self._prefix is not None)
        found = self._tokens[np.where(is_inside, np.maximum(places, 0), 0)].astype(np.int64)
        if self._prefix is not None:
            found[indices == 0] = self._prefix
        are_targets = is_inside & (indices >= new_from[:, None])
        if self._bounds is not None:
            are_targets &= np.searchsorted(self._bounds, places, side="right") % 2 == 1
        return Blocks(found * is_inside, np.zeros(indices.shape, np.int32), are_targets)
