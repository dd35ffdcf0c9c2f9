"""Contributions (`Partial`) that are reduced together, and the holders that reduce them."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torchtitan_lite.distributed.redistribute.planning.intersections import (
    HolderIndex,
    Intersection,
    Intersections,
)
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.redistribute.planning.reduction_targets import (
    Targets,
    cheapest_targets,
    num_moved,
)
from torchtitan_lite.distributed.redistribute.planning.transfers import Multicast, stripes


class ReductionOwner(NamedTuple):
    """Reduces elements [start, stop) of a rectangle."""

    holder: Holder
    contribution: int | None
    """Its own contribution; None if it has none."""
    start: int
    stop: int


class ReductionGroup(NamedTuple):
    """Contributions of the source that are reduced to one of the destination, for one rectangle."""

    members: tuple[int, ...]
    target: int

    @property
    def is_reduced(self) -> bool:
        """Whether the group has several members."""
        return len(self.members) > 1


class ReductionGroups:
    """The reduction groups of all rectangles, chosen to move few elements: the fewest for the
    tested layouts, because groups are built greedily and not by an exhaustive search."""

    def __init__(self, parts: Intersections) -> None:
        self._parts = parts
        self.num_sources = parts.src.num_contributions
        self.num_targets = parts.dst.num_contributions

    def groups(self, one: int, other: int) -> list[ReductionGroup]:
        """Return the groups of the intersection of shard `one` of the source and shard `other` of
        the destination."""
        if self.num_targets == 1:
            return self._all_in_one
        target = self._targets.get((one, other))
        if target is None:
            target = self._target(one, other, np.zeros((self.num_sources, self.num_targets), int))
        members: dict[int, list[int]] = {}
        for contribution, to in enumerate(target):
            members.setdefault(to, []).append(contribution)
        return [ReductionGroup(tuple(found), to) for to, found in members.items()]

    @cached_property
    def _all_in_one(self) -> list[ReductionGroup]:
        return [ReductionGroup(tuple(range(self.num_sources)), 0)]

    @cached_property
    def largest_group(self) -> int:
        """Return the members of the largest group."""
        if self.num_sources == 1 or self.num_targets == 1:
            return self.num_sources
        found = {max(map(target.count, target)) for target in self._targets.values()}
        if self._elements_apart:
            found.add(max(len(group.members) for group in self.groups(-1, -1)))
        return max(found, default=1)

    @cached_property
    def moved_elements(self) -> int:
        """Elements sent between holders."""
        replicas, total = self._parts.dst.num_replicas, 0
        for (one, other), target in self._targets.items():
            overlaps = self._overlaps(one, other)
            total += self._elements[one, other] * num_moved(overlaps, replicas, target)
        apart = [len(group.members) for group in self.groups(-1, -1)]
        each = sum(size + replicas - 1 for size in apart)
        return total + self._elements_apart * each

    @cached_property
    def _elements(self) -> dict[tuple[int, int], int]:
        """Elements per rectangle of which a holder has both sides."""
        across, dst = self._parts.across, self._parts.dst
        positions = np.flatnonzero(across >= 0)
        one, other = np.unique(np.stack([across[positions], dst.part_of[positions]]), axis=1)
        common = self._parts.elements(one, other).tolist()
        keys = zip(one.tolist(), other.tolist(), strict=True)
        return {key: count for key, count in zip(keys, common, strict=True) if count}

    @cached_property
    def _elements_apart(self) -> int:
        """Elements of the other rectangles."""
        return int(np.prod(self._parts.shape, dtype=np.int64)) - sum(self._elements.values())

    @cached_property
    def _targets(self) -> dict[tuple[int, int], Targets]:
        if self.num_targets == 1:
            return {}
        return {key: self._target(*key, self._overlaps(*key)) for key in self._elements}

    def _target(self, one: int, other: int, overlaps: np.ndarray) -> Targets:
        if self.num_targets == 1:
            return (0,) * self.num_sources
        rotation = (one + other) % self.num_targets
        turned = np.roll(overlaps, -rotation, axis=1)
        found = cheapest_targets(turned.tobytes(), turned.shape, self._parts.dst.num_replicas)
        return tuple((to + rotation) % self.num_targets for to in found)

    def _overlaps(self, one: int, other: int) -> np.ndarray:
        """[contribution, target]: holders of both."""
        src, dst = self._parts.src, self._parts.dst
        positions = dst.positions[other]
        targets, replicas = np.nonzero(self._parts.across[positions] == one)
        held = src.contribution_of[self._parts.src_positions[positions[targets, replicas]]]
        overlaps = np.zeros((self.num_sources, self.num_targets), int)
        np.add.at(overlaps, (held, targets), 1)
        return overlaps


class ReductionOwners:
    """The holders that reduce a group for one rectangle: replicas of its target that hold a member
    if there are any, each with an equal share.

    Which replicas of a target hold a contribution to a shard of the source is looked up at once for
    all rectangles of a holder: `at_destination` for a holder of the target, `from_source` for one
    of the source. Both return the same owners.
    """

    def __init__(self, parts: Intersections) -> None:
        self._parts = parts
        self._holding: dict[tuple[bool, int, int], dict[int, list[tuple[Holder, int]]]] = {}

    def at_destination(
        self, common: Intersection, group: ReductionGroup
    ) -> Sequence[tuple[Holder, int]]:
        """Return the replicas of the target that hold a member of the group, and which one, for a
        holder of the target."""
        return self._members(group, self._at(False, common.other, group.target, common.one))

    def from_source(
        self, common: Intersection, group: ReductionGroup
    ) -> Sequence[tuple[Holder, int]]:
        """Return the same for a holder of the source."""
        return self._members(group, self._at(True, common.one, group.target, common.other))

    def owners(
        self,
        common: Intersection,
        group: ReductionGroup,
        holding: Sequence[tuple[Holder, int]],
    ) -> list[ReductionOwner]:
        """Return the owners for a rectangle, in the order of their shares, given the replicas that
        hold a member."""
        chosen: Sequence[tuple[Holder, int | None]] = holding
        if not chosen:
            chosen = [(one, None) for one in self._parts.dst.holders(common.other, group.target)]
        bounds = stripes(0, common.size, len(chosen), common.row)
        return [
            ReductionOwner(holder, contribution, start, stop)
            for (holder, contribution), (start, stop) in zip(chosen, bounds, strict=True)
            if start < stop
        ]

    def _members(
        self, group: ReductionGroup, holding: Sequence[tuple[Holder, int]]
    ) -> Sequence[tuple[Holder, int]]:
        if len(group.members) == self._parts.src.num_contributions:
            return holding
        return [one for one in holding if one[1] in group.members]

    def _at(self, of_src: bool, part: int, target: int, other: int) -> Sequence[tuple[Holder, int]]:
        """Return the replicas of a target that also hold a contribution to the source's shard, and
        which one; `part` is the shard of the source or of the destination, `other` the other
        one."""
        key = of_src, part, target
        if key not in self._holding:
            src, dst, across = self._parts.src, self._parts.dst, self._parts.across
            if of_src:
                positions = dst.positions[:, target].ravel()
                positions = positions[across[positions] == part]
                others = dst.part_of[positions]
            else:
                positions = dst.positions[part, target]
                positions = positions[across[positions] >= 0]
                others = across[positions]
            held = src.contribution_of[self._parts.src_positions[positions]]
            found: dict[int, list[tuple[Holder, int]]] = {}
            holders = dst.layout.mesh.holders
            for position, at, contribution in zip(
                positions.tolist(), others.tolist(), held.tolist(), strict=True
            ):
                found.setdefault(at, []).append((holders[position], contribution))
            self._holding[key] = found
        return self._holding[key].get(other, ())


def sender_of(src: HolderIndex, part: int, contribution: int, owner: int) -> Holder:
    """Return which replica of a contribution to a shard sends to the owner with this number."""
    replicas = src.holders(part, contribution)
    return replicas[(owner + contribution) % len(replicas)]


def owners_served_by(src: HolderIndex, part: int, contribution: int, sender: Holder) -> slice:
    """Return the numbers of the owners to which a replica sends; the inverse of `sender_of`."""
    replicas = src.holders(part, contribution)
    first = (replicas.index(sender) - contribution) % len(replicas)
    return slice(first, None, len(replicas))


def unreduced_multicast(
    parts: Intersections, common: Intersection, group: ReductionGroup
) -> Multicast:
    """Return the delivery of a group of one member: from its replicas to those of its target."""
    (member,) = group.members
    sources = parts.src.holders(common.one, member)
    receivers = parts.dst.holders(common.other, group.target)
    return Multicast(sources, receivers, 0, common.size, common.one + common.other + member)
