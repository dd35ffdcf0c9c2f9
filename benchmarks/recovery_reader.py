"""What the replicas of a disturbed run have told, and when: one clock for all sides.

A step counts as committed when its line can be read, which is looked for every few milliseconds.
"""

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan_lite.launcher.logs import Tail

_LOOK_S = 0.004


@dataclass(frozen=True, kw_only=True)
class Told:
    """A line of a metrics.jsonl."""

    seen_s: float
    """Since the epoch."""
    replica: int
    values: dict[str, Any]

    @property
    def is_step(self) -> bool:
        return "event" not in self.values and not self.values.get("skipped", False)

    @property
    def step(self) -> int:
        return self.values["step"]

    @property
    def num_replicas(self) -> int:
        return self.values["num_replicas"]


@dataclass(frozen=True)
class Gap:
    """Between two commits that one replica tells of."""

    start: Told
    end: Told

    @property
    def seconds(self) -> float:
        return self.end.seen_s - self.start.seen_s


class Reader:
    """Reads along in a thread. A context manager."""

    def __init__(self, metrics: Sequence[Path]) -> None:
        self._tails = [Tail(path) for path in metrics]
        self.told: list[Told] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="reader")

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def num_replicas(self) -> int:
        return len(self._tails)

    def steps(self, replica: int | None = None, *, since_s: float = 0.0) -> list[Told]:
        """The committed ones, of one replica or all, as they came."""
        return [
            one
            for one in list(self.told)
            if one.is_step and one.seen_s >= since_s and replica in (None, one.replica)
        ]

    def events(self, name: str, replica: int, *, since_s: float) -> list[Told]:
        return [
            one
            for one in list(self.told)
            if one.values.get("event") == name and one.seen_s >= since_s and one.replica == replica
        ]

    def gaps(self, replica: int, *, since_s: float) -> list[Gap]:
        """Those that end after `since_s`."""
        steps = self.steps(replica)
        return [Gap(*pair) for pair in pairwise(steps) if pair[1].seen_s >= since_s]

    def median_gap_s(self, num_replicas: int) -> float:
        """Between two steps one after the other, both taken by so many replicas. A survivor of ours
        takes the samples of all, so a step alone is longer than one with others."""
        found = [
            gap.seconds
            for replica in range(self.num_replicas)
            for gap in self.gaps(replica, since_s=0.0)
            if gap.start.num_replicas == gap.end.num_replicas == num_replicas
            and gap.end.step == gap.start.step + 1
        ]
        return median(found) if found else float("nan")

    def stall_s(self, gap: Gap) -> float:
        """What a gap is longer than a step like the one that ends it."""
        return gap.seconds - self.median_gap_s(gap.end.num_replicas)

    def progress(self) -> list[Told]:
        """Each step once, as it was told of first: one that is taken again is none."""
        found, highest = [], 0
        for one in self.steps():
            if one.step > highest:
                highest = one.step
                found.append(one)
        return found

    def _read(self) -> None:
        while not self._ended.wait(_LOOK_S):
            for replica, tail in enumerate(self._tails):
                lines, now_s = tail.lines(), time.time()
                for line in lines:
                    with suppress(ValueError):
                        values = json.loads(line)
                        self.told.append(Told(seen_s=now_s, replica=replica, values=values))
