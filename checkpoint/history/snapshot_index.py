"""The choice of the snapshot that a run resumes from, given those that its machines hold: of their
own ranks, and copies of those of ranks on other machines.

Invariant: all ranks choose the same one, whose parts are all of one generation and step.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Position(NamedTuple):
    """Position of a snapshot in the run's history. A later segment (see `lineage`) counts more than
    a higher step, because the steps of an earlier one may have been abandoned."""

    segment: int
    step: int


_NO_POSITION = Position(-1, -1)


class HeldPart(NamedTuple):
    """One rank's part of a snapshot, in its own region or as a copy."""

    saver: int
    is_copy: bool
    position: Position


@dataclass(frozen=True)
class HeldRegion:
    """What one rank reports of a region on its machine."""

    saver: int
    """Rank that took the snapshots."""
    is_copy: bool
    generation_ids: Sequence[str]
    """Generations that the region belongs to: two while some ranks have taken their regions over
    and others have not."""
    world_size: int
    positions: Sequence[Position]

    def to_json(self) -> list[Any]:
        """Return the report as JSON values."""
        return [self.saver, self.is_copy, self.generation_ids, self.world_size, self.positions]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> "HeldRegion":
        """Parse the form of `to_json`."""
        saver, is_copy, generation_ids, world_size, positions = values
        return cls(
            saver,
            is_copy,
            generation_ids,
            world_size,
            [Position(*position) for position in positions],
        )


@dataclass(frozen=True)
class SnapshotIndex:
    """The newest step of which all parts exist, and the ranks that can read each."""

    generation_id: str
    position: Position
    reach: Mapping[int, Sequence[int]]
    """Ranks that can open the region of each saving rank."""
    copies: frozenset[int] = frozenset()
    """Saving ranks whose part is read from a copy."""
    copied_position: Position | None = None
    """Newest position, of any generation, of which each part exists twice: with its own rank and as
    a copy."""
    copied_generation_id: str | None = None
    """Generation of `copied_position`."""

    def reporter(self, saver: int) -> int:
        """Return the rank that reports a region: its own rank if possible."""
        able = self.reach[saver]
        return saver if saver in able else able[saver % len(able)]


def newest_common(
    seen: Sequence[Sequence[HeldRegion]],
    machines: Sequence[int],
    at_most: int | None = None,
    permitted: Mapping[int, int | None] | None = None,
    before: Position | None = None,
    excluded: Collection[HeldPart] = (),
) -> SnapshotIndex | None:
    """Return the newest step, at most `at_most` and earlier than `before`, of the regions `seen` on
    the ranks' `machines`; one rank reports per machine. A machine that was reassigned to other
    ranks may still hold regions of an earlier generation. `permitted`, as returned by
    `SnapshotLineage.permitted`, excludes abandoned steps; `excluded` are parts that are damaged."""
    seen = [[_without(region, excluded) for region in held] for held in seen]
    generation_ids = sorted({s for held in seen for region in held for s in region.generation_ids})

    def is_usable(position: Position) -> bool:
        if permitted is not None:
            last = permitted.get(position.segment, -1)
            if last is not None and position.step > last:
                return False
        if before is not None and position >= before:
            return False
        return at_most is None or position.step <= at_most

    known = [
        newest_of_it
        for generation_id in generation_ids
        if (newest_of_it := _newest_of_generation(generation_id, seen, machines, is_usable))
    ]
    if not known:
        return None

    def copied(index: SnapshotIndex) -> Position:
        return index.copied_position or _NO_POSITION

    # Of two generations of a region that is being taken over, the one that the copies belong to.
    newest = max(known, key=lambda index: (index.position, copied(index)))
    safest = max((newest, *known), key=copied)
    return replace(
        newest,
        copied_position=safest.copied_position,
        copied_generation_id=safest.copied_generation_id,
    )


def _without(region: HeldRegion, excluded: Collection[HeldPart]) -> HeldRegion:
    def is_excluded(position: Position) -> bool:
        return HeldPart(region.saver, region.is_copy, position) in excluded

    return replace(region, positions=[p for p in region.positions if not is_excluded(p)])


def _newest_of_generation(
    generation_id: str,
    seen: Sequence[Sequence[HeldRegion]],
    machines: Sequence[int],
    is_usable: Any,
) -> SnapshotIndex | None:
    """Return the newest step of one generation, and its newest copied one. None if a rank of the
    generation is missing, its ranks disagree on the world size, or have no common step."""
    holders: dict[int, list[tuple[HeldRegion, int]]] = {}
    for held, machine in zip(seen, machines, strict=True):
        for region in held:
            if generation_id in region.generation_ids:
                holders.setdefault(region.saver, []).append((region, machine))
    if {region.world_size for held in holders.values() for region, _ in held} != {len(holders)}:
        return None
    own, copied = (
        {
            saver: {p for region, _ in held if region.is_copy == is_copy for p in region.positions}
            for saver, held in holders.items()
        }
        for is_copy in (False, True)
    )

    def newest(of_savers: Iterable[set[Position]]) -> Position | None:
        return max(filter(is_usable, set.intersection(*of_savers)), default=None)

    position = newest(own[saver] | copied[saver] for saver in holders)
    if position is None:
        return None
    reach: dict[int, Sequence[int]] = {}
    copies = set()
    for saver, held in holders.items():
        able = [(region, machine) for region, machine in held if position in region.positions]
        # A rank's own snapshot costs no network.
        region, where = min(able, key=lambda pair: pair[0].is_copy)
        reach[saver] = [rank for rank, machine in enumerate(machines) if machine == where]
        if region.is_copy:
            copies.add(saver)
    copied_position = newest(own[saver] & copied[saver] for saver in holders)
    copied_generation_id = None if copied_position is None else generation_id
    return SnapshotIndex(
        generation_id, position, reach, frozenset(copies), copied_position, copied_generation_id
    )
