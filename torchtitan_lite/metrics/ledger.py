"""Time by what it was spent on and by the step that it was spent for. Layer: imports nothing of
the project.

Invariant: time only changes its kind. Whatever is added stays in the sum, to the nanosecond.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOST = "lost"
WORK = ("compute", "communication", "data")
"""Kinds of time that come to nothing where their step is not kept."""
_KEPT_APART = 32
"""Newest entries, which stay as they are."""
_MOST_ENTRIES = 128


@dataclass
class Entry:
    """Time of the steps `first` to `last`, in nanoseconds by kind."""

    first: int
    last: int
    ns: Counter[str]


class Ledger:
    """All time of a run up to the last step that was booked.

    The newest steps have an entry each, and the older the entry the more steps it may hold. A run
    that goes back into such an entry loses its share of it, as if all its steps had taken alike.
    """

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self._entries = list(entries)
        self.totals: Counter[str] = sum((one.ns for one in entries), Counter())
        """Nanoseconds by kind."""

    @property
    def highest(self) -> int:
        """The last step that has time of its own."""
        return self._entries[-1].last if self._entries else 0

    def add(self, step: int, ns: Mapping[str, int]) -> None:
        """Book time for `step`, the highest or the one after it; a lower one counts as that."""
        step = max(step, self.highest)
        if not self._entries or self._entries[-1].first != step:
            self._entries.append(Entry(step, step, Counter()))
        entry, totals = self._entries[-1].ns, self.totals
        for kind, taken in ns.items():
            entry[kind] += taken
            totals[kind] += taken
        if len(self._entries) > _MOST_ENTRIES:
            self._merge()

    def lose_after(self, step: int) -> None:
        """The steps after `step` are taken again: what they took is lost work."""
        while self._entries and self._entries[-1].first > step:
            entry = self._entries.pop()
            self._lose(entry.ns, 1, 1)
            if self._entries:
                self._entries[-1].ns.update(entry.ns)
            else:
                self._entries.append(Entry(step, step, entry.ns))
        if self._entries and self._entries[-1].last > step:
            entry = self._entries[-1]
            self._lose(entry.ns, entry.last - step, entry.last - entry.first + 1)
            entry.last = step

    def _lose(self, ns: Counter[str], share: int, of: int) -> None:
        before = Counter(ns)
        lose_work(ns, share, of)
        self.totals.update(ns)
        self.totals.subtract(before)

    def _merge(self) -> None:
        """Join neighbours, all but the newest."""
        old, new = self._entries[:-_KEPT_APART], self._entries[-_KEPT_APART:]
        joined = []
        for place in range(0, len(old), 2):
            pair = old[place : place + 2]
            joined.append(
                Entry(pair[0].first, pair[-1].last, sum((one.ns for one in pair), Counter()))
            )
        self._entries = joined + new

    def to_json(self) -> list[list[Any]]:
        """The entries, each [first, last, {kind: nanoseconds}]."""
        return [[one.first, one.last, dict(one.ns)] for one in self._entries]

    @staticmethod
    def from_json(entries: Any) -> "Ledger":
        """What `to_json` gave. Raises ValueError for anything else."""
        if not isinstance(entries, list):
            raise ValueError("the entries are no list")
        made: list[Entry] = []
        for entry in entries:
            match entry:
                case [int(first), int(last), dict(ns)] if (
                    made[-1].last if made else 0
                ) <= first <= last and all(type(one) is int and one >= 0 for one in ns.values()):
                    made.append(Entry(first, last, Counter(ns)))
                case _:
                    raise ValueError(f"{entry!r:.80} is no entry")
        return Ledger(made)


def lose_work(ns: Counter[str], share: int = 1, of: int = 1) -> None:
    """Make `share` parts of `of` of the work among `ns` lost."""
    for kind in WORK:
        lost = ns[kind] * share // of
        if lost:
            ns[kind] -= lost
            ns[LOST] += lost
