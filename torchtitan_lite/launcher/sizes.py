"""How many ranks each replica has: as many as all of them can give. Pure: it is told the time and
what happened. Layer: above errors.

All replicas have the same number, since each rank adds its part of the gradients up with the same
part of the others. A rank that dies again and again is taken for a place where no rank can live; it
is tried again later, each time after twice as long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan_lite.errors import ConfigError

_DEATHS = 3
"""Of one rank, in a row, after which its place counts as lost."""
_ROW_S = 120.0
"""Between two deaths of a row, at most: a start, some steps, and the delay of a restart."""


def parse_ranks(text: str) -> tuple[int, ...]:
    """The numbers of ranks that a replica may have, ascending: "2", "1:4" (from 1 to 4) or "1,2,4".
    Raises ConfigError."""
    low, is_range, high = text.partition(":")
    try:
        numbers = range(int(low), int(high) + 1) if is_range else map(int, text.split(","))
        found = set(numbers)
    except ValueError:
        found = set()
    if not found or min(found) < 1:
        raise ConfigError(
            f"--nproc-per-replica is {text}, and has to be a number of ranks such as 2, or those "
            "that a replica may have: 1:4 for 1 to 4, or 1,2,4."
        )
    return tuple(sorted(found))


@dataclass
class _Row:
    """Deaths of one rank, one after the other."""

    rank: int
    count: int
    last_s: float


@dataclass
class _Loss:
    """Of the last places of a replica."""

    left: int
    """How many it can still give."""
    back_at_s: float
    """When they are tried again."""
    times: int


class Sizes:
    """What the replicas can give."""

    def __init__(self, allowed: Sequence[int], num_replicas: int, *, trial_s: float) -> None:
        """`allowed` numbers of ranks, ascending. After `trial_s` a place that was lost is tried
        again."""
        self._allowed, self._num_replicas, self._trial_s = allowed, num_replicas, trial_s
        self._rows: dict[int, _Row] = {}
        self._losses: dict[int, _Loss] = {}

    def died(self, replica: int, rank: int, num_ranks: int, now_s: float) -> None:
        """A rank of a replica with `num_ranks` of them has died."""
        row = self._rows.get(replica)
        is_in_row = row is not None and row.rank == rank and now_s - row.last_s <= _ROW_S
        count = 1 + (row.count if is_in_row and row is not None else 0)
        self._rows[replica] = _Row(rank, count, now_s)
        if count >= _DEATHS and num_ranks > self._allowed[0]:
            before = self._losses.get(replica)
            times = 1 if before is None else before.times + 1
            back_at_s = now_s + self._trial_s * 2 ** (times - 1)
            self._losses[replica] = _Loss(num_ranks - 1, back_at_s, times)
            del self._rows[replica]

    def wanted(self, slots: Mapping[int, int], now_s: float) -> tuple[int, str]:
        """The number of ranks that each replica should have, and why not more. `slots` are how many
        a replica has place for, where that is known."""
        most = self._allowed[-1]
        given, reasons = most, []
        for replica in range(self._num_replicas):
            loss = self._losses.get(replica)
            if slots.get(replica, most) < most:
                reasons.append(f"replica {replica} has place for {slots[replica]}")
                given = min(given, slots[replica])
            if loss is not None and now_s < loss.back_at_s:
                reasons.append(f"a rank of replica {replica} died {_DEATHS} times in a row")
                given = min(given, loss.left)
        fitting = [number for number in self._allowed if number <= given]
        return (fitting or self._allowed)[-1 if fitting else 0], "; ".join(reasons)
