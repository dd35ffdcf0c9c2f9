"""Detection of storage that is slower for one rank than for the others.

Each rank reports how long its last write of a checkpoint took. No torch. Layer: above slow_ranks.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from torchtitan_lite.anomalies.slow_ranks import median_of_others

_WRITES = 4
"""Consecutive writes per decision: a single one may have waited for the disk's other users."""
_SLOW, _NOT_SLOW = 4.0, 2.0
"""Factors relative to the others: beyond the first storage is slow, below the second no longer."""
_NOISE_S = 0.25
"""Differences below this are noise of any disk."""


class SlowStorageDetector:
    """Observes the writes of all ranks, and returns a rank once when its storage becomes slow."""

    def __init__(self) -> None:
        self._last: tuple[float, ...] = ()
        self._counts: list[int] = []
        self._writes: list[deque[float]] = []
        self._decided = 0
        self._slow: set[int] = set()

    def step(self, last_write_s: Sequence[float]) -> list[tuple[int, float]]:
        """Observe the seconds of each rank's newest write; 0: it has written nothing. Returns the
        places of ranks whose storage has become slow, and how many times slower it is."""
        if len(last_write_s) != len(self._counts):
            self._last = (0.0,) * len(last_write_s)
            self._counts = [0] * len(last_write_s)
            self._writes = [deque(maxlen=_WRITES) for _ in last_write_s]
            self._decided = 0
            self._slow.clear()
        for place, (seconds, before) in enumerate(zip(last_write_s, self._last, strict=True)):
            # Two writes never take equally many nanoseconds.
            if seconds > 0 and seconds != before:
                self._counts[place] += 1
                self._writes[place].append(seconds)
        self._last = tuple(last_write_s)
        if len(self._counts) < 2 or min(self._counts) <= self._decided:
            return []
        self._decided = min(self._counts)
        return [] if self._decided < _WRITES else self._changes()

    def _changes(self) -> list[tuple[int, float]]:
        slowest = np.array([min(writes) for writes in self._writes])
        usual = np.array([float(np.median(writes)) for writes in self._writes])
        others = median_of_others(usual)
        found = []
        for place, (seconds, other) in enumerate(zip(slowest, others, strict=True)):
            if seconds < _NOT_SLOW * other:
                self._slow.discard(place)
            is_slow = seconds >= _SLOW * other and seconds - other >= _NOISE_S
            if is_slow and place not in self._slow:
                self._slow.add(place)
                found.append((place, float(seconds / other)))
        return found
