"""Blocks of a streaming data set, numbered in the order of the stream.

Every rank has the tokens of the whole stream and keeps only its own blocks, which makes the samples
of a step independent of the number of ranks; one rank of each node reads and tokenizes them
(`node_streams`). Invariant: block i has the same tokens on any path: sequential reading, after a
step back, or from a saved state.

Blocks that are shuffled are read in any order within their window, whose tokens are all kept.

The saved state is the data set's own state before the run in which a block starts, and the number
of tokens before that run.
"""

from collections import deque
from typing import Any

import numpy as np

from torchtitan_lite.core.log import logger
from torchtitan_lite.data.packing import Blocks, split_into_blocks
from torchtitan_lite.data.stream_reader import BEGINNING, Origin, RunReader, TokenRun

_REMEMBERED_READS = 8


class StreamedBlocks:
    """Blocks of a repeated stream. Reading forward is cheap; recent blocks are kept, so that a step
    can be retried, and those of the same window; going back further reads again from the last known
    position."""

    num_blocks: None = None

    def __init__(self, reader: RunReader, seq_len: int, *, shuffle_window: int = 1) -> None:
        """`shuffle_window` is the number of consecutive blocks that are read in any order."""
        self._reader = reader
        self._seq_len = seq_len
        self._window_tokens = shuffle_window * seq_len
        self._loaded = BEGINNING
        self._recent_firsts: deque[int] = deque(maxlen=_REMEMBERED_READS)
        self._restart(BEGINNING)

    def read(self, blocks: np.ndarray) -> Blocks:
        """Read the blocks with these indices (int64 [n])."""
        starts = blocks * self._seq_len
        first, last = int(starts.min()), int(starts.max()) + self._seq_len
        self._cover(first, last)
        runs = [run for run in self._runs if run.end > first and run.origin.position <= last]
        base = runs[0].origin.position
        result = split_into_blocks(
            np.concatenate([run.tokens for run in runs]),
            np.concatenate([run.document_starts for run in runs]) - base,
            starts - base,
            self._seq_len,
        )
        # The other ranks' blocks of the same steps are close to these; a rank that replaces
        # another may need them.
        self._recent_firsts.append(self._window_start(max(0, 2 * first - last)))
        self._forget_before(min(self._recent_firsts))
        return result

    def state(self, block: int) -> dict[str, Any]:
        """Return JSON values from which `load_state` continues with `block`."""
        position = self._window_start(block * self._seq_len)
        self._cover(position, position)
        return next(run.origin for run in self._runs if run.end > position).values()

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from `state`."""
        self._loaded = Origin.of(state)
        self._recent_firsts.clear()
        self._restart(self._loaded)

    def close(self) -> None:
        """Release what the reader holds."""
        self._reader.close()

    def _window_start(self, position: int) -> int:
        return position - position % self._window_tokens

    def _cover(self, first: int, last: int) -> None:
        """Load the tokens [first, last]."""
        start = self._runs[0].origin.position if self._runs else self._start.position
        if first < start:
            origin = self._loaded if first >= self._loaded.position else BEGINNING
            logger.warning(
                "%s: going back from token %d of the stream to %d, reading again from %d",
                self._reader.name,
                start,
                first,
                origin.position,
            )
            self._restart(origin)
        while not self._runs or self._runs[-1].end <= last:
            self._runs.append(next(self._following))
            if not self._recent_firsts:
                # Skip forward to the window of the first requested block; nothing before it is
                # needed.
                self._forget_before(self._window_start(first))

    def _forget_before(self, position: int) -> None:
        while len(self._runs) > 1 and self._runs[0].end <= position:
            self._runs.popleft()

    def _restart(self, origin: Origin) -> None:
        self._start = origin
        self._runs: deque[TokenRun] = deque()
        self._following = self._reader.runs(origin)
