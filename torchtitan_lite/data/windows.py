"""Windows over documents, for evaluation: every token of every document is a target exactly once,
except the first one if the tokenizer has no token to prepend.

Layer: above errors and packing. Each document is evaluated separately, from its beginning, as by
`loglikelihood_rolling` of lm-eval: the token that begins a document is context, and the one that
ends it is not a target, because it is not part of the text.
"""

import numpy as np

from torchtitan_lite.data.packing import Blocks
from torchtitan_lite.errors import DataError


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
