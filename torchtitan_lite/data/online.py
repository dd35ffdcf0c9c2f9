"""Online data sets: samples that are made while the run trains, such as the rollouts of
reinforcement learning.

Invariant: a sample has one content, however often it is read, so that a step can be retried and a
run resumed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from torchtitan_lite.config.tables.data import CorpusConfig
from torchtitan_lite.core.errors import DataError
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.data.packing import Blocks


@dataclass(frozen=True, kw_only=True)
class OnlineSample:
    """A sample of at most `training.seq_len` + 1 tokens; the rest of its block has no targets."""

    tokens: Sequence[int]
    are_targets: Sequence[bool]
    """Whether each token is a target. The first one never is: nothing predicts it."""
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Numbers of each token by name, for a registered loss: `Microbatch.target_values`."""


class OnlineDataset(Protocol):
    """The samples of an online data set, numbered from 0 in the order in which steps use them."""

    def read(self, samples: Sequence[int]) -> Sequence[OnlineSample]:
        """Return the samples with these numbers; block until they exist. Called by a thread of each
        rank, again after a resume or for a retried step. Raises DataError, which ends the run."""
        ...


def is_online(config: CorpusConfig) -> bool:
    """Return whether a corpus is an online data set."""
    return config.dataset in REGISTRY.online_datasets


class OnlineBlocks:
    """Samples of an online data set as blocks, one each."""

    num_blocks: None = None

    def __init__(self, name: str, dataset: OnlineDataset, seq_len: int, vocab_size: int) -> None:
        self._name, self._dataset = name, dataset
        self._seq_len, self._vocab_size = seq_len, vocab_size

    def read(self, blocks: np.ndarray) -> Blocks:
        """Return the blocks with these numbers (int64 [n]). Raises DataError for a sample that does
        not fit."""
        samples = self._dataset.read([int(block) for block in blocks])
        result = Blocks.empty(len(blocks), self._seq_len)
        if len(samples) != len(blocks):
            raise DataError(
                f"{self._name}: read returned {len(samples)} samples instead of {len(blocks)}."
            )
        for row, (index, sample) in enumerate(zip(blocks, samples, strict=True)):
            self._check(int(index), sample)
            length = len(sample.tokens)
            result.tokens[row, :length] = sample.tokens
            result.are_targets[row, :length] = sample.are_targets
            for name, values in sample.values.items():
                if name not in result.values:
                    result.values[name] = np.zeros(result.tokens.shape)
                result.values[name][row, :length] = values
        return result

    def _check(self, index: int, sample: OnlineSample) -> None:
        where, length = f"{self._name}: sample {index}", len(sample.tokens)
        if length > self._seq_len + 1:
            raise DataError(
                f"{where} has {length} tokens, more than training.seq_len + 1 = {self._seq_len + 1}"
            )
        if length and not 0 <= min(sample.tokens) <= max(sample.tokens) < self._vocab_size:
            raise DataError(f"{where} has tokens outside of [0, {self._vocab_size}).")
        for name, values in {"are_targets": sample.are_targets, **sample.values}.items():
            if len(values) != length:
                raise DataError(f"{where} has {length} tokens, and {len(values)} of {name}.")
