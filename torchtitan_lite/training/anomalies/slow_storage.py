"""Detection of storage that is slower for one rank than for the others.

Each rank reports how long its last write of a checkpoint took, and how much it wrote. No torch.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np

from torchtitan_lite.training.anomalies.slow_ranks import median_of_others

RankId = tuple[int, int]
"""Replica, and rank in it."""
_WRITES = 4
"""Consecutive writes per decision: a single one may have waited for the disk's other users."""
_SLOW, _NOT_SLOW = 4.0, 2.0
"""Factors relative to the others, of seconds and of seconds per byte: beyond the first storage is
slow, below the second no longer. Ranks write different amounts, and each write costs some time."""
_NOISE_S = 0.25
"""Differences below this are noise of any disk."""


class SlowStorageDetector:
    """Observes the writes of all ranks, and returns a rank once when its storage becomes slow."""

    def __init__(self) -> None:
        self._last: dict[RankId, tuple[float, float]] = {}
        self._writes: dict[RankId, deque[tuple[float, float]]] = {}
        """Seconds, and seconds per byte, of the newest writes."""
        self._counts: dict[RankId, int] = {}
        self._decided = 0
        self._slow: set[RankId] = set()

    def step(self, last_writes: Mapping[RankId, tuple[float, float]]) -> list[tuple[RankId, float]]:
        """Observe the seconds and bytes of each rank's newest write; 0: it has written nothing.
        Returns the ranks whose storage has become slow, and how many times slower it is. Other
        ranks than before restart the detection."""
        if last_writes.keys() != self._counts.keys():
            # The newest write of a rank that was there before does not count again.
            self._last = {rank: self._last.get(rank, (0.0, 0.0)) for rank in last_writes}
            self._counts = dict.fromkeys(last_writes, 0)
            self._writes = {rank: deque(maxlen=_WRITES) for rank in last_writes}
            self._decided = 0
            self._slow &= last_writes.keys()
        for rank, (seconds, num_bytes) in last_writes.items():
            # Two writes never take equally many nanoseconds.
            if seconds > 0 and num_bytes > 0 and (seconds, num_bytes) != self._last[rank]:
                self._counts[rank] += 1
                self._writes[rank].append((seconds, seconds / num_bytes))
        self._last = dict(last_writes)
        if len(self._counts) < 2 or min(self._counts.values()) <= self._decided:
            return []
        self._decided = min(self._counts.values())
        return [] if self._decided < _WRITES else self._changes()

    def _changes(self) -> list[tuple[RankId, float]]:
        writes = np.array(list(self._writes.values()))
        fastest, usual = writes.min(axis=1), np.median(writes, axis=1)
        medians_s = np.stack([median_of_others(column) for column in usual.T], axis=1)
        times = (fastest / medians_s).min(axis=1)
        newly_slow = []
        for place, rank in enumerate(self._writes):
            if times[place] < _NOT_SLOW:
                self._slow.discard(rank)
            is_slow = times[place] >= _SLOW and fastest[place, 0] - medians_s[place, 0] >= _NOISE_S
            if is_slow and rank not in self._slow:
                self._slow.add(rank)
                newly_slow.append((rank, float(times[place])))
        return newly_slow
