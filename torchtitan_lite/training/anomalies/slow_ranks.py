"""Slow-rank detection: ranks that are persistently slower than others with the same work.

Each rank reports its work time before it waited for others; all ranks see all times in the
reduction of a step, and decide alike.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_lite.training.anomalies.detector import median_and_deviation

_WINDOWS = (64, 256)
"""Steps per decision: few detect fast, many detect small differences."""
_EVERY = 16
"""Steps between decisions."""
_SLOW, _NOT_SLOW = math.log(1.10), math.log(1.05)
"""Relative slowness, as logarithms: a rank is slow beyond the first, and no longer below the
second."""
_MOST, _LITTLE, _MUCH = 0.5, 0.25, 0.75
"""Fractions of a difference: that which is most of it, and those below and above which a slow rank
has another cause than it had."""
_CERTAINTY = 6.0
"""Standard errors beyond the first limit. Ten thousand steps of 64 ranks are 40,000 decisions, and
correlated noise makes steps dependent."""
_MIN_ROW_S = 0.1
"""Work that a row covers at least. Steps of milliseconds are added up: within a few of them, the
scheduler of the operating system does not give all processes the same time."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median relative to that of a mean, for normal noise."""


@dataclass(frozen=True)
class RankWork:
    """The work of one rank in a step."""

    replica: int
    rank: int
    """Rank in its replica."""
    stage: int
    """Pipeline stage."""
    microbatches: int
    seconds: float
    data_s: float = 0.0
    """Part of these in which the rank waited for data."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that became slow, or is no longer slow."""

    replica: int
    rank: int
    times_slower: float
    """Factor relative to the median of the others."""
    is_slow: bool
    """False: no longer slow."""
    waits_for_data: bool = False
    """Whether most of the difference is waiting for data."""


class SlowRankDetector:
    """Observes every step and reports a rank once when it becomes slow, once when the cause is
    another, and once when it no longer is.

    Only ranks with the same stage and as many microbatches are compared. A change of ranks or work
    restarts the detection.
    """

    def __init__(self) -> None:
        self._work: tuple[tuple[int, int, int, int], ...] = ()
        self._rows: deque[np.ndarray] = deque(maxlen=_WINDOWS[-1])
        """Logarithm of each rank's time relative to that of the others, per row of steps."""
        self._data_rows: deque[np.ndarray] = deque(maxlen=_WINDOWS[0])
        """Seconds that each rank waited for data, as multiples of the others' time."""
        self._sum = np.zeros((2, 0))
        """Seconds and seconds of waiting for data in the steps of the next row, by rank."""
        self._groups: list[list[int]] = []
        self._slow: dict[int, bool] = {}
        """Places of slow ranks, and whether they wait for data."""
        self._steps = 0

    def step(self, work: Sequence[RankWork]) -> list[SlowRank]:
        """Observe a step: `work` of all ranks of all replicas, in a fixed order."""
        signature = tuple(
            (rank_work.replica, rank_work.rank, rank_work.stage, rank_work.microbatches)
            for rank_work in work
        )
        if signature != self._work:
            self._begin(signature)
        if not all(rank_work.seconds > 0 for rank_work in work if rank_work.microbatches):
            return []
        self._sum += np.array([[rank_work.seconds, rank_work.data_s] for rank_work in work]).T
        if self._sum[0].max() < _MIN_ROW_S:
            return []
        slower, data = self._slower(*self._sum)
        self._rows.append(slower)
        self._data_rows.append(data)
        self._sum[:] = 0
        self._steps += 1
        if len(self._rows) < _WINDOWS[0] or self._steps % _EVERY:
            return []
        return self._changes(np.array(self._rows))

    def _slower(self, seconds: np.ndarray, data_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        slower, data = np.zeros(len(seconds)), np.zeros(len(seconds))
        for group in self._groups:
            medians_s = median_of_others(seconds[group])
            slower[group] = np.log(seconds[group] / medians_s)
            data[group] = (data_s[group] - median_of_others(data_s[group])) / medians_s
        return slower, data

    def _begin(self, signature: tuple[tuple[int, int, int, int], ...]) -> None:
        groups: dict[tuple[int, int], list[int]] = {}
        for place, (_, _, stage, microbatches) in enumerate(signature):
            if microbatches:
                groups.setdefault((stage, microbatches), []).append(place)
        self._groups = [group for group in groups.values() if len(group) > 1]
        self._work, self._steps = signature, 0
        self._sum = np.zeros((2, len(signature)))
        self._rows.clear()
        self._data_rows.clear()
        self._slow.clear()

    def _changes(self, slower: np.ndarray) -> list[SlowRank]:
        """Return the ranks whose classification changes. `slower` is [steps, ranks]."""
        recent = np.median(slower[-_WINDOWS[0] :], axis=0)
        windows = [window for window in _WINDOWS if len(slower) >= window]
        certain = np.max([_lower_bound(slower[-window:]) for window in windows], axis=0)
        data = np.median(np.array(self._data_rows), axis=0)
        changes = []
        for place, (replica, rank, _, _) in enumerate(self._work):
            times = math.exp(recent[place])
            is_slow = min(recent[place], certain[place]) > _SLOW
            data_share = data[place] / (times - 1) if is_slow else 0.0
            waited = self._slow.get(place)
            if waited is None and is_slow:
                waits = self._slow[place] = bool(data_share > _MOST)
            elif waited is not None and recent[place] < _NOT_SLOW:
                del self._slow[place]
                waits = False
            elif is_slow and (data_share < _LITTLE if waited else data_share > _MUCH):
                waits = self._slow[place] = not waited
            else:
                continue
            changes.append(SlowRank(replica, rank, times, place in self._slow, waits))
        return changes


def _lower_bound(slower: np.ndarray) -> np.ndarray:
    """Return a lower confidence bound of the median over the steps, per rank."""
    median, deviation = median_and_deviation(slower)
    return median - _CERTAINTY * _MEDIAN_ERROR * deviation / math.sqrt(len(slower))


def median_of_others(times: np.ndarray) -> np.ndarray:
    """Return, for each rank of `times` [ranks], two or more, the median of the others."""
    order = np.argsort(times, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(times))
    ordered, num_others = times[order], len(times) - 1
    # Skip the rank itself in the order.
    low, high = (num_others - 1) // 2, num_others // 2
    return (ordered[low + (place <= low)] + ordered[high + (place <= high)]) / 2
