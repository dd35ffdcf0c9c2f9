"""What happens to the machines of a cluster, in the order of time.

Invariant: events at the same time are delivered together, so that a loss of several machines at
once is one interruption.
"""

import heapq
import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True, kw_only=True)
class ClusterEvents:
    """All that happens at one time."""

    at_s: float
    rank_lost: frozenset[int] = frozenset()
    """Machines on which a rank dies, and which stay."""
    lost: frozenset[int] = frozenset()
    """Machines that are lost with their memory."""
    arrived: frozenset[int] = frozenset()
    """Machines that arrive or return."""


@dataclass(order=True)
class _Planned:
    at_s: float
    order: int
    kind: str = field(compare=False)
    machine: int = field(compare=False)


class EventStream:
    """Planned events, random failures, and the return of lost machines."""

    def __init__(
        self,
        planned: Iterable[ClusterEvents] = (),
        *,
        failures: "Iterable[RandomFailures]" = (),
        replacement_s: float = math.inf,
    ) -> None:
        """A machine that is lost returns after `replacement_s`."""
        self._planned: list[_Planned] = []
        self._count = 0
        self._failures = [failure for failure in failures if failure.is_possible]
        self._replacement_s = replacement_s
        for events in planned:
            for kind in ("rank_lost", "lost", "arrived"):
                for machine in sorted(getattr(events, kind)):
                    self._plan(events.at_s, kind, machine)
        for source, failure in enumerate(self._failures):
            self._plan(failure.next_s(0.0), "failure", source)

    @property
    def next_s(self) -> float:
        """Time of the next events, infinite if there are none."""
        return self._planned[0].at_s if self._planned else math.inf

    def pop(self, present: Set[int]) -> ClusterEvents:
        """Return the next events, all that happen at the same time, and plan the return of those
        of the `present` machines that are lost."""
        at_s = self.next_s
        happened: dict[str, set[int]] = {"rank_lost": set(), "lost": set(), "arrived": set()}
        while self._planned and self._planned[0].at_s == at_s:
            event = heapq.heappop(self._planned)
            if event.kind == "failure":
                source = self._failures[event.machine]
                kind, machine = source.draw()
                self._plan(source.next_s(at_s), "failure", event.machine)
                happened[kind].add(machine)
            else:
                happened[event.kind].add(event.machine)
        if math.isfinite(self._replacement_s):
            for machine in happened["lost"] & present:
                self._plan(at_s + self._replacement_s, "arrived", machine)
        return ClusterEvents(
            at_s=at_s, **{key: frozenset(value) for key, value in happened.items()}
        )

    def _plan(self, at_s: float, kind: str, machine: int) -> None:
        heapq.heappush(self._planned, _Planned(at_s, self._count, kind, machine))
        self._count += 1


class RandomFailures:
    """Failures of a range of machines: a renewal process with gamma-distributed times between
    failures, each of the machines with the same probability. Failures of machines that are absent
    have no effect."""

    def __init__(
        self,
        machines: range,
        *,
        machine_mtbf_s: float,
        machine_share: float,
        seed: str,
        shape: float = 1.0,
    ) -> None:
        """`shape` is that of the gamma distribution: 1 for exponential times, infinite for equal
        ones; the coefficient of variation is 1 / sqrt(shape)."""
        self._machines, self._mtbf_s, self._shape = machines, machine_mtbf_s, shape
        self._machine_share, self._random = machine_share, Random(seed)

    @property
    def is_possible(self) -> bool:
        """Whether any failure can happen."""
        return bool(self._machines) and math.isfinite(self._mtbf_s)

    def next_s(self, now_s: float) -> float:
        """Draw the time of the next failure."""
        mean_s = self._mtbf_s / len(self._machines)
        if self._shape == 1:
            return now_s + self._random.expovariate(1 / mean_s)
        if math.isinf(self._shape):
            return now_s + mean_s
        return now_s + self._random.gammavariate(self._shape, mean_s / self._shape)

    def draw(self) -> tuple[str, int]:
        """Draw the kind of a failure and its machine."""
        kind = "lost" if self._random.random() < self._machine_share else "rank_lost"
        return kind, self._machines[self._random.randrange(len(self._machines))]
