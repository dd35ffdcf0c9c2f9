"""The choice of the snapshot that a run resumes from, given those that its machines hold: of their
own ranks, and copies of those of ranks on other machines.

Invariant: all ranks choose the same one, whose parts are all of one session and step. Layer: pure
functions of plain values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Position(NamedTuple):
    """Position of a snapshot in the run's history. A later segment (see `lineage`) counts more than
    a higher step, because the steps of an earlier one may have been abandoned."""

    segment: int
    step: int


@dataclass(frozen=True)
class HeldRegion:
    """What one rank reports of a region on its machine."""

    saver: int
    """Rank that took the snapshots."""
    is_copy: bool
    sessions: Sequence[str]
    """Sessions that the region belongs to: two while some ranks have taken their regions over and
    others have not."""
    world_size: int
    positions: Sequence[Position]

    def to_json(self) -> list[Any]:
        """Return the report as JSON values."""
        return [self.saver, self.is_copy, self.sessions, self.world_size, self.positions]

    @classmethod
    def from_json(cls, given: Sequence[Any]) -> "HeldRegion":
        """Parse the form of `to_json`."""
        saver, is_copy, sessions, world_size, positions = given
        return cls(saver, is_copy, sessions, world_size, [Position(*one) for one in positions])


@dataclass(frozen=True)
class SnapshotIndex:
    """The newest step of which all parts exist, and the ranks that can read each."""

    session: str
    position: Position
    reach: Mapping[int, Sequence[int]]
    """Ranks that can open the region of each saving rank."""
    copies: frozenset[int] = frozenset()
    """Saving ranks whose part is read from a copy."""

    def reporter(self, saver: int) -> int:
        """Return the rank that reports a region: its own rank if possible."""
        able = self.reach[saver]
        return saver if saver in able else able[saver % len(able)]


def newest_common(
    seen: Sequence[Sequence[HeldRegion]],
    machines: Sequence[int],
    at_most: int | None = None,
    permitted: Mapping[int, int | None] | None = None,
) -> SnapshotIndex | None:
    """Return the newest step, at most `at_most`, of the regions `seen` on the ranks' `machines`;
    one rank reports per machine. A machine that was reassigned to other ranks may still hold
    regions of an earlier session. `permitted`, as returned by `SnapshotLineage.permitted`, excludes
    abandoned steps."""
    sessions = sorted({s for held in seen for one in held for s in one.sessions})

    def is_usable(position: Position) -> bool:
        if permitted is not None:
            last = permitted.get(position.segment, -1)
            if last is not None and position.step > last:
                return False
        return at_most is None or position.step <= at_most

    known = [
        found
        for session in sessions
        if (found := _newest_of_session(session, seen, machines, is_usable))
    ]
    return max(known, key=lambda one: one.position, default=None)


def _newest_of_session(
    session: str,
    seen: Sequence[Sequence[HeldRegion]],
    machines: Sequence[int],
    is_usable: Any,
) -> SnapshotIndex | None:
    """Return None if a rank of the session is missing, its ranks disagree on the world size, or
    have no common step."""
    holders: dict[int, list[tuple[HeldRegion, int]]] = {}
    for held, machine in zip(seen, machines, strict=True):
        for one in held:
            if session in one.sessions:
                holders.setdefault(one.saver, []).append((one, machine))
    if {one.world_size for held in holders.values() for one, _ in held} != {len(holders)}:
        return None
    of_savers = (
        {position for one, _ in held for position in one.positions if is_usable(position)}
        for held in holders.values()
    )
    position = max(set.intersection(*of_savers), default=None)
    if position is None:
        return None
    reach: dict[int, Sequence[int]] = {}
    copies = set()
    for saver, held in holders.items():
        able = [(one, machine) for one, machine in held if position in one.positions]
        # A rank's own snapshot costs no network.
        one, where = min(able, key=lambda one: one[0].is_copy)
        reach[saver] = [rank for rank, machine in enumerate(machines) if machine == where]
        if one.is_copy:
            copies.add(saver)
    return SnapshotIndex(session, position, reach, frozenset(copies))
