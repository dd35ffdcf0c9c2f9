"""The data loader: microbatches of a step, by the samples' indices in the global order.

The result of `load` depends on the indices and the step alone; prefetching only changes when it is
ready. The trainer has the only cursor.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchtitan_lite.core.errors import DataError
from torchtitan_lite.core.rng import fold, mix
from torchtitan_lite.data.online import OnlineBlocks
from torchtitan_lite.data.order import SampleOrder
from torchtitan_lite.data.packing import Blocks, PackedBlocks
from torchtitan_lite.data.stream import StreamedBlocks
from torchtitan_lite.nn.spec import IGNORE_INDEX, Microbatch

_Request = tuple[tuple[tuple[int, ...], ...], int]


@dataclass(frozen=True, kw_only=True)
class CorpusSource:
    """A corpus of the blend, with its weight."""

    name: str
    weight: float
    digest: str | None
    """Hash of the tokens; None for a stream or an online data set."""
    blocks: PackedBlocks | StreamedBlocks | OnlineBlocks
    shuffle_window: int = 1
    """Consecutive blocks of a stream that are shuffled; 1: none."""


class DataLoader:
    """Reads microbatches, prefetching one request in a background thread. All reading is in that
    thread, so that a stream has one reader. With an online data set there is no prefetching: its
    samples may depend on the weights of the step before."""

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        *,
        seq_len: int,
        seed: int,
        document_mask: bool,
        pin_memory: bool,
    ) -> None:
        self._sources = tuple(sources)
        self._seq_len = seq_len
        self._seed = seed
        self._document_mask = document_mask
        self._pin_memory = pin_memory
        self._order = SampleOrder(
            seed,
            [source.blocks.num_blocks for source in sources],
            [source.weight for source in sources],
            [source.shuffle_window for source in sources],
        )
        self._prefetches = not any(isinstance(source.blocks, OnlineBlocks) for source in sources)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._ahead: tuple[_Request, Future[list[Microbatch]]] | None = None
        self._state_wait_s = 0.0

    def load(self, microbatch_indices: Sequence[Sequence[int]], step: int) -> list[Microbatch]:
        """Return the microbatches of `step` with these samples. An index of -1 is a filler sample.
        A request may be repeated, as after an aborted step."""
        request = _as_request(microbatch_indices, step)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == request:
            return ahead[1].result()
        if ahead is not None:
            ahead[1].cancel()
        return self._thread.submit(self._read, request).result()

    def prefetch(self, microbatch_indices: Sequence[Sequence[int]], step: int) -> None:
        """Start reading the next `load`. A different `load` discards it. Do nothing with an online
        data set."""
        if not self._prefetches:
            return
        request = _as_request(microbatch_indices, step)
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._ahead = (request, self._thread.submit(self._read, request))

    def state(self, cursor: int) -> dict[str, Any]:
        """Return JSON values from which a run resumes at sample `cursor`, equal on all ranks. With
        a stream it waits for the prefetch in progress, because a stream has one reader."""
        if not any(isinstance(source.blocks, StreamedBlocks) for source in self._sources):
            return self._state(cursor)
        started = time.perf_counter()
        state = self._thread.submit(self._state, cursor).result()
        self._state_wait_s += time.perf_counter() - started
        return state

    def take_state_wait_s(self) -> float:
        """Return the seconds that `state` has waited for the stream since the last call."""
        waited_s, self._state_wait_s = self._state_wait_s, 0.0
        return waited_s

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from `state`. Raises DataError if the data differ, because the order of samples
        would not be continued."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].cancel()
        self._check_same_data(state)
        self._thread.submit(self._load_state, state).result()

    def close(self) -> None:
        """Stop the background thread."""
        self._ahead = None
        self._thread.shutdown(wait=True, cancel_futures=True)
        for source in self._sources:
            if isinstance(source.blocks, StreamedBlocks):
                source.blocks.close()

    def _read(self, request: _Request) -> list[Microbatch]:
        microbatches, step = request
        indices = np.array([index for samples in microbatches for index in samples], dtype=np.int64)
        blocks = self._read_samples(indices)
        result, first = [], 0
        for samples in microbatches:
            rows = slice(first, first + len(samples))
            first += len(samples)
            result.append(
                collate(
                    blocks.rows(rows),
                    samples,
                    seed=self._seed,
                    step=step,
                    document_mask=self._document_mask,
                    pin_memory=self._pin_memory,
                )
            )
        return result

    def _read_samples(self, indices: np.ndarray) -> Blocks:
        result = Blocks.empty(len(indices), self._seq_len)
        real = np.flatnonzero(indices != FILLER)
        corpora, _, blocks = self._order.locate(indices[real])
        for corpus, source in enumerate(self._sources):
            rows = corpora == corpus
            if rows.any():
                result.put(real[rows], source.blocks.read(blocks[rows]))
        return result

    def _state(self, cursor: int) -> dict[str, Any]:
        corpora = [self._identity(source) for source in self._sources]
        for corpus, source in enumerate(self._sources):
            if isinstance(source.blocks, StreamedBlocks):
                corpus_samples_before = self._order.corpus_samples_before(cursor, corpus)
                corpora[corpus]["stream"] = source.blocks.state(corpus_samples_before)
        return {"seed": self._seed, "corpora": corpora}

    def _identity(self, source: CorpusSource) -> dict[str, Any]:
        """Return what must not change for the order of samples to be the same."""
        kind = "stream" if source.digest is None else "table"
        if isinstance(source.blocks, OnlineBlocks):
            kind = "online"
        return {
            "name": source.name,
            "kind": kind,
            "weight": source.weight,
            "seq_len": self._seq_len,
            "num_blocks": source.blocks.num_blocks,
            "digest": source.digest,
            # Older checkpoints have no such key, and no shuffled streams.
            **({"shuffle_window": source.shuffle_window} if source.shuffle_window > 1 else {}),
        }

    def _check_same_data(self, state: dict[str, Any]) -> None:
        # A corpus may have moved to another folder; a stream is identified by its name only.
        saved = [
            {k: v for k, v in corpus.items() if k != "stream" and _counts(corpus, k)}
            for corpus in state["corpora"]
        ]
        now = [
            {k: v for k, v in corpus.items() if _counts(corpus, k)}
            for corpus in map(self._identity, self._sources)
        ]
        if saved == now and state["seed"] == self._seed:
            return
        differences = []
        if state["seed"] != self._seed:
            differences.append(f"debug.seed was {state['seed']}, now {self._seed}")
        if len(saved) != len(now):
            differences.append(f"there were {len(saved)} corpora, now {len(now)}")
        for index, (before, after) in enumerate(zip(saved, now, strict=False)):
            differences += [
                f"corpus {index} had {key} {before.get(key)}, now {after.get(key)}"
                for key in before | after
                if before.get(key) != after.get(key)
            ]
        raise DataError(
            f"the data differ from those of the checkpoint: {'; '.join(differences)}. Restore the "
            f'data settings and files to continue in the same order, or add "dataloader" to '
            f"checkpoint.exclude_from_loading to start the new data from its beginning."
        )

    def _load_state(self, state: dict[str, Any]) -> None:
        for saved, source in zip(state["corpora"], self._sources, strict=True):
            if isinstance(source.blocks, StreamedBlocks):
                source.blocks.load_state(saved["stream"])


def _counts(corpus: dict[str, Any], key: str) -> bool:
    return not (key == "name" and corpus["kind"] == "table")


def _as_request(microbatch_indices: Sequence[Sequence[int]], step: int) -> _Request:
    return tuple(tuple(samples) for samples in microbatch_indices), step


FILLER = -1
"""Index of a filler sample, which has no targets."""


def collate(
    blocks: Blocks,
    indices: Sequence[int],
    *,
    seed: int,
    step: int,
    document_mask: bool,
    pin_memory: bool,
) -> Microbatch:
    """Build the microbatch of the samples `indices` with `blocks`. With `document_mask` the last
    token of a document has no target."""
    tokens, documents, are_targets, values = blocks
    indices_B = np.array(indices, dtype=np.int64)
    targets = np.where(are_targets[:, 1:], tokens[:, 1:], IGNORE_INDEX)
    if document_mask:
        targets[documents[:, 1:] != documents[:, :-1]] = IGNORE_INDEX
    targets[indices_B == FILLER] = IGNORE_INDEX
    keys = mix(np.uint64(fold(seed, "sample", step)) ^ mix(indices_B.view(np.uint64)))
    batch_size, seq_len = targets.shape

    def tensor(array: np.ndarray) -> torch.Tensor:
        as_tensor = torch.from_numpy(np.ascontiguousarray(array))
        return as_tensor.pin_memory() if pin_memory else as_tensor

    return Microbatch(
        tokens_BS=tensor(tokens[:, :-1]),
        targets_BS=tensor(targets),
        positions_BS=tensor(np.tile(np.arange(seq_len, dtype=np.int64), (batch_size, 1))),
        documents_BS=tensor(documents[:, :-1]) if document_mask else None,
        rng_keys_B=tensor(keys.view(np.int64)),
        samples=tuple(int(index) for index in indices_B),
        target_values={name: tensor(array[:, 1:]) for name, array in values.items()},
    )
