"""Reading and tokenizing a streaming data set, in runs of a few documents.

Invariant: the runs from an origin on are the same however reading came there: in order, again, or
from a saved state.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.data.corpus import Corpus
from torchtitan_lite.data.documents import text_of
from torchtitan_lite.data.token_cache import is_held_out
from torchtitan_lite.data.tokenization import (
    DocumentTokenizer,
    PendingTokens,
    TokenizationWorkers,
)
from torchtitan_lite.data.unusable_rows import UnusableRows

_DOCUMENTS_PER_RUN = 32


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A position at which reading can begin."""

    position: int
    """Preceding tokens."""
    epoch: int
    dataset_state: dict[str, Any] | None
    """None at the start of the data set."""

    def values(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"position": self.position, "epoch": self.epoch, "dataset": self.dataset_state}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Origin":
        """Restore from `values`."""
        return cls(
            position=values["position"], epoch=values["epoch"], dataset_state=values["dataset"]
        )


BEGINNING = Origin(position=0, epoch=0, dataset_state=None)


@dataclass(frozen=True, kw_only=True)
class TokenRun:
    """Tokens of a few documents."""

    origin: Origin
    following: Origin
    """Behind the run."""
    tokens: np.ndarray
    """uint32."""
    document_starts: np.ndarray
    """Position of the first token of each document; int64."""

    @property
    def end(self) -> int:
        return self.following.position


class RunReader(Protocol):
    """Source of a stream's runs."""

    name: str
    """Name of the corpus in messages."""

    def runs(self, origin: Origin) -> Iterator[TokenRun]:
        """Yield the runs from `origin` on, without those that have no tokens, for any number of
        epochs. A new call ends the earlier one. Raises DataError."""
        ...

    def close(self) -> None:
        """Release what the reader holds."""
        ...


class StreamReader:
    """Reads and tokenizes the stream itself."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: DocumentTokenizer | TokenizationWorkers,
        *,
        held_out_fraction: float = 0.0,
    ) -> None:
        self.name = corpus.name
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._held_out_fraction = held_out_fraction

    def runs(self, origin: Origin) -> Iterator[TokenRun]:
        """See `RunReader`."""
        # Nobody takes the results that an earlier call has requested.
        self._tokenizer.close()
        return self._epochs(origin)

    def close(self) -> None:
        """End the worker processes, if there are any."""
        self._tokenizer.close()

    def _epochs(self, origin: Origin) -> Iterator[TokenRun]:
        while True:
            start = origin
            for run in self._epoch(origin):
                if len(run.tokens):
                    yield run
                origin = run.following
            if start.dataset_state is None and origin.position == start.position:
                raise DataError(
                    f"the stream {self.name!r} has no text to train on in column "
                    f"{self._corpus.column!r}. Check dataset_path and text_column."
                )
            origin = Origin(position=origin.position, epoch=origin.epoch + 1, dataset_state=None)

    def _epoch(self, origin: Origin) -> Iterator[TokenRun]:
        """Yield the runs from `origin` to the end of the data."""
        batches, pending = self._batches(origin), deque[tuple[PendingTokens, dict[str, Any]]]()
        while True:
            for tokens, state in islice(batches, self._tokenizer.max_pending - len(pending)):
                pending.append((tokens, state))
            if not pending:
                return
            tokens, state = pending.popleft()
            run = _run(origin, tokens(), state)
            yield run
            origin = run.following

    def _batches(self, origin: Origin) -> Iterator[tuple[PendingTokens, dict[str, Any]]]:
        """Read from `origin` to the end of the data. Yield the documents of each run, which are
        being tokenized, with the state after them."""
        corpus, unusable = self._corpus, UnusableRows(self._corpus)
        stream, is_reported = corpus.rows([corpus.column], origin.dataset_state), False
        while batch := list(islice(stream.rows, _DOCUMENTS_PER_RUN)):
            texts = [text_of(row, corpus.column, unusable) for row in batch]
            unusable.check(is_end=False)
            if unusable and not is_reported:
                is_reported = True
                unusable.report()
            kept = [
                text for text in texts if text and not is_held_out(text, self._held_out_fraction)
            ]
            yield self._tokenizer.submit(kept), stream.state()
        if origin.dataset_state is None:
            unusable.check()
        unusable.report()


def _run(origin: Origin, documents: list[np.ndarray], state: dict[str, Any]) -> TokenRun:
    lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
    end = origin.position + int(lengths.sum())
    return TokenRun(
        origin=origin,
        following=Origin(position=end, epoch=origin.epoch, dataset_state=state),
        tokens=np.concatenate([np.empty(0, np.uint32), *documents]),
        document_starts=origin.position + np.cumsum(lengths) - lengths,
    )
