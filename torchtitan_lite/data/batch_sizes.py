"""The global batch size of each step, with its warm-up.

Invariant: it is a pure function of the position in the sample order. It does not depend on the
number of steps, on the mesh or on restarts, so that skipped and aborted steps, lost replicas and a
resume on another mesh leave the sequence of global batches as it is.
"""

from dataclasses import dataclass
from itertools import accumulate

from torchtitan_lite.config.tables.data import DataConfig


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The global batch size by position."""

    stages: tuple[tuple[int, int], ...] = ()
    """Stages of the warm-up, in order: the sample behind the stage, and its global batch size."""
    final: int
    """Global batch size after the warm-up."""

    def at(self, cursor: int) -> int:
        """Return the global batch size of the step that begins at sample `cursor`."""
        return next((size for end, size in self.stages if cursor < end), self.final)


def batch_sizes(config: DataConfig, num_batch_ranks: int) -> BatchSizes:
    """Return the global batch sizes of a run; `num_batch_ranks` ranks read different samples."""
    final = config.global_batch_size
    if final == -1:
        final = config.local_batch_size * num_batch_ranks
    ends = accumulate(samples for samples, _ in config.batch_size_warmup)
    sizes = (size for _, size in config.batch_size_warmup)
    return BatchSizes(stages=tuple(zip(ends, sizes, strict=True)), final=final)
