"""Blocks of a streaming data set, in the order of the stream.

Layer: above corpus, tokenizer, token_cache and packing. Every rank reads and tokenizes the whole
stream and keeps only its own blocks: each rank does the work of all, which makes the samples of a
step independent of the number of ranks. Invariant: block i has the same tokens on any path:
sequential reading, after a step back, or from a saved state.

The stream is read in runs of a few documents. The saved state is the data set's own state before
the run in which a block starts, and the number of tokens before that run.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from torchtitan_lite.data.corpus import Corpus
from torchtitan_lite.data.packing import Blocks, split_into_blocks
from torchtitan_lite.data.token_cache import is_held_out, tokenize
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.errors import DataError
from torchtitan_lite.log import logger

_DOCUMENTS_PER_RUN = 32
_REMEMBERED_READS = 8


@dataclass(frozen=True, kw_only=True)
class _Origin:
    """A position at which reading can begin."""

    position: int
    """Preceding tokens."""
    epoch: int
    dataset_state: dict[str, Any] | None
    """None at the start of the data set."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Tokens of a few documents."""

    origin: _Origin
    tokens: np.ndarray
    document_starts: np.ndarray
    """Position of the first token."""

    @property
    def end(self) -> int:
        return self.origin.position + len(self.tokens)


class StreamedBlocks:
    """Blocks of a repeated stream. Reading forward is cheap; recent blocks are kept, so that a step
    can be retried; going back further reads again from the last known position."""

    num_blocks: None = None

    def __init__(
        self, corpus: Corpus, tokenizer: Tokenizer, seq_len: int, *, held_out_fraction: float = 0.0
    ) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._held_out_fraction = held_out_fraction
        self._beginning = _Origin(position=0, epoch=0, dataset_state=None)
        self._loaded = self._beginning
        self._recent_firsts: deque[int] = deque(maxlen=_REMEMBERED_READS)
        self._restart(self._beginning)

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
        self._recent_firsts.append(max(0, 2 * first - last))
        self._forget_before(min(self._recent_firsts))
        return result

    def state(self, block: int) -> dict[str, Any]:
        """Return JSON values from which `load_state` continues with `block`."""
        position = block * self._seq_len
        self._cover(position, position)
        origin = next(run.origin for run in self._runs if run.end > position)
        return {
            "position": origin.position,
            "epoch": origin.epoch,
            "dataset": origin.dataset_state,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from `state`."""
        self._loaded = _Origin(
            position=state["position"], epoch=state["epoch"], dataset_state=state["dataset"]
        )
        self._recent_firsts.clear()
        self._restart(self._loaded)

    def _cover(self, first: int, last: int) -> None:
        """Load the tokens [first, last]."""
        start = self._runs[0].origin.position if self._runs else self._start.position
        if first < start:
            origin = self._loaded if first >= self._loaded.position else self._beginning
            logger.warning(
                "%s: going back from token %d of the stream to %d, reading again from %d",
                self._corpus.name,
                start,
                first,
                origin.position,
            )
            self._restart(origin)
        while not self._runs or self._runs[-1].end <= last:
            self._runs.append(next(self._reader))
            if not self._recent_firsts:
                # Skip forward to the first requested block; nothing before it is needed.
                self._forget_before(first)

    def _forget_before(self, position: int) -> None:
        while len(self._runs) > 1 and self._runs[0].end <= position:
            self._runs.popleft()

    def _restart(self, origin: _Origin) -> None:
        self._start = origin
        self._runs: deque[_Run] = deque()
        self._reader = self._read_from(origin)

    def _read_from(self, origin: _Origin) -> Iterator[_Run]:
        """Yield tokens of repeated epochs."""
        while True:
            epoch_start = origin.position
            for run, state in self._read_epoch(origin):
                if len(run.tokens):
                    yield run
                origin = _Origin(position=run.end, epoch=origin.epoch, dataset_state=state)
            if origin.position == 0 or (origin.position == epoch_start and origin.epoch > 0):
                raise DataError(
                    f"the stream {self._corpus.name!r} has no text to train on in column "
                    f"{self._corpus.column!r}. Check dataset_path and text_column."
                )
            origin = _Origin(position=origin.position, epoch=origin.epoch + 1, dataset_state=None)

    def _read_epoch(self, origin: _Origin) -> Iterator[tuple[_Run, dict[str, Any]]]:
        """Yield the tokens from `origin` to the end of the data, each with the state after it."""
        dataset = self._corpus.stream()
        if origin.dataset_state is not None:
            dataset.load_state_dict(origin.dataset_state)
        examples = iter(dataset)
        while True:
            with self._corpus.reading():
                batch = list(islice(examples, _DOCUMENTS_PER_RUN))
            if not batch:
                return
            run = self._tokenize(origin, [self._corpus.text_of(example) for example in batch])
            state = dataset.state_dict()
            yield run, state
            origin = _Origin(position=run.end, epoch=origin.epoch, dataset_state=state)

    def _tokenize(self, origin: _Origin, texts: list[str]) -> _Run:
        kept = [text for text in texts if text and not is_held_out(text, self._held_out_fraction)]
        documents = tokenize(self._tokenizer, kept)
        lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
        return _Run(
            origin=origin,
            tokens=np.concatenate([np.empty(0, np.uint32), *documents]),
            document_starts=origin.position + np.cumsum(lengths) - lengths,
        )
