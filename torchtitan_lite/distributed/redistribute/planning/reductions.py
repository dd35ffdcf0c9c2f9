"""Contributions (`Partial`) that are reduced together, and the holders that reduce them."""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from torchtitan_lite.distributed.redistribute.planning.intersections import (
    HolderIndex,
    Intersection,
    Intersections,
)
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.redistribute.planning.transfers import Multicast, stripes

Targets = tuple[int, ...]
"""Contribution of the destination to which each contribution of the source is added."""


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

    def groups(self, src_part: int, dst_part: int) -> list[ReductionGroup]:
        """Return the groups of the intersection of shard `src_part` of the source and shard
        `dst_part` of the destination."""
        if self.num_targets == 1:
            return self._all_in_one
        target = self._targets.get((src_part, dst_part))
        if target is None:
            target = self._target(
                src_part, dst_part, np.zeros((self.num_sources, self.num_targets), int)
            )
        members: dict[int, list[int]] = {}
        for contribution, to in enumerate(target):
            members.setdefault(to, []).append(contribution)
        return [ReductionGroup(tuple(contributions), to) for to, contributions in members.items()]

    @cached_property
    def _all_in_one(self) -> list[ReductionGroup]:
        return [ReductionGroup(tuple(range(self.num_sources)), 0)]

    @cached_property
    def largest_group(self) -> int:
        """Return the members of the largest group."""
        if self.num_sources == 1 or self.num_targets == 1:
            return self.num_sources
        sizes = {max(map(target.count, target)) for target in self._targets.values()}
        if self._elements_apart:
            sizes.add(max(len(group.members) for group in self.groups(-1, -1)))
        return max(sizes, default=1)

    @cached_property
    def moved_elements(self) -> int:
        """Elements sent between holders."""
        replicas, total = self._parts.dst.num_replicas, 0
        for (src_part, dst_part), target in self._targets.items():
            overlaps = self._overlaps(src_part, dst_part)
            total += self._elements[src_part, dst_part] * num_moved(overlaps, replicas, target)
        apart = [len(group.members) for group in self.groups(-1, -1)]
        each = sum(size + replicas - 1 for size in apart)
        return total + self._elements_apart * each

    @cached_property
    def _elements(self) -> dict[tuple[int, int], int]:
        """Elements per rectangle of which a holder has both sides."""
        across, dst = self._parts.across, self._parts.dst
        positions = np.flatnonzero(across >= 0)
        src_parts, dst_parts = np.unique(
            np.stack([across[positions], dst.part_of[positions]]), axis=1
        )
        common = self._parts.elements(src_parts, dst_parts).tolist()
        keys = zip(src_parts.tolist(), dst_parts.tolist(), strict=True)
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

    def _target(self, src_part: int, dst_part: int, overlaps: np.ndarray) -> Targets:
        if self.num_targets == 1:
            return (0,) * self.num_sources
        rotation = (src_part + dst_part) % self.num_targets
        turned = np.roll(overlaps, -rotation, axis=1)
        targets = cheapest_targets(turned.tobytes(), turned.shape, self._parts.dst.num_replicas)
        return tuple((to + rotation) % self.num_targets for to in targets)

    def _overlaps(self, src_part: int, dst_part: int) -> np.ndarray:
        """[contribution, target]: holders of both."""
        src, dst = self._parts.src, self._parts.dst
        positions = dst.positions[dst_part]
        targets, replicas = np.nonzero(self._parts.across[positions] == src_part)
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
        return self._members(group, self._at(False, common.dst_part, group.target, common.src_part))

    def from_source(
        self, common: Intersection, group: ReductionGroup
    ) -> Sequence[tuple[Holder, int]]:
        """Return the same for a holder of the source."""
        return self._members(group, self._at(True, common.src_part, group.target, common.dst_part))

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
            chosen = [
                (holder, None) for holder in self._parts.dst.holders(common.dst_part, group.target)
            ]
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
        return [replica for replica in holding if replica[1] in group.members]

    def _at(
        self, of_src: bool, part: int, target: int, peer_part: int
    ) -> Sequence[tuple[Holder, int]]:
        """Return the replicas of a target that also hold a contribution to the source's shard, and
        which one; `part` is the shard of the source or of the destination, `peer_part` that of
        the other."""
        key = of_src, part, target
        if key not in self._holding:
            src, dst, across = self._parts.src, self._parts.dst, self._parts.across
            if of_src:
                positions = dst.positions[:, target].ravel()
                positions = positions[across[positions] == part]
                peer_parts = dst.part_of[positions]
            else:
                positions = dst.positions[part, target]
                positions = positions[across[positions] >= 0]
                peer_parts = across[positions]
            held = src.contribution_of[self._parts.src_positions[positions]]
            by_peer: dict[int, list[tuple[Holder, int]]] = {}
            holders = dst.layout.mesh.holders
            for position, at, contribution in zip(
                positions.tolist(), peer_parts.tolist(), held.tolist(), strict=True
            ):
                by_peer.setdefault(at, []).append((holders[position], contribution))
            self._holding[key] = by_peer
        return self._holding[key].get(peer_part, ())


def sender_of(src: HolderIndex, part: int, contribution: int, owner: int) -> Holder:
    """Return which replica of a contribution to a shard sends to the owner with this index."""
    replicas = src.holders(part, contribution)
    return replicas[(owner + contribution) % len(replicas)]


def owners_served_by(src: HolderIndex, part: int, contribution: int, sender: Holder) -> slice:
    """Return the indices of the owners to which a replica sends; the inverse of `sender_of`."""
    replicas = src.holders(part, contribution)
    first = (replicas.index(sender) - contribution) % len(replicas)
    return slice(first, None, len(replicas))


def unreduced_multicast(
    parts: Intersections, common: Intersection, group: ReductionGroup
) -> Multicast:
    """Return the delivery of a group of one member: from its replicas to those of its target."""
    (member,) = group.members
    sources = parts.src.holders(common.src_part, member)
    receivers = parts.dst.holders(common.dst_part, group.target)
    return Multicast(sources, receivers, 0, common.size, common.src_part + common.dst_part + member)


@lru_cache(maxsize=4096)
def cheapest_targets(overlaps_bytes: bytes, shape: tuple[int, int], replicas: int) -> Targets:
    """Choose targets that move few elements: match contributions with targets, those with the most
    common holders first, and merge groups while that is cheaper. An exhaustive search would be
    exponential in the contributions."""
    overlaps = np.frombuffer(overlaps_bytes, int).reshape(shape)
    candidates = [
        _merged(overlaps, replicas, target)
        for matched in _matchings(overlaps)
        for target in _completions(overlaps, matched)
    ]
    return min(candidates, key=lambda target: num_moved(overlaps, replicas, target))


def _matchings(overlaps: np.ndarray) -> Iterator[dict[int, int]]:
    """Yield maximum matchings {contribution: target} whose pairs have at least so many common
    holders, for each such number."""
    of_target: dict[int, int] = {}

    def is_matched(contribution: int, least: int, seen: set[int]) -> bool:
        for to in np.flatnonzero(overlaps[contribution] >= least).tolist():
            if to in seen:
                continue
            seen.add(to)
            if to not in of_target or is_matched(of_target[to], least, seen):
                of_target[to] = contribution
                return True
        return False

    yield {}
    for least in sorted(set(overlaps[overlaps > 0].tolist()), reverse=True):
        for contribution in range(len(overlaps)):
            if contribution not in of_target.values():
                is_matched(contribution, least, set())
        yield {contribution: to for to, contribution in of_target.items()}


def _completions(overlaps: np.ndarray, matched: dict[int, int]) -> Iterator[list[int]]:
    """Yield complete assignments: unmatched contributions get free targets, then join the smallest
    groups; or all of them join one group."""
    free = [contribution for contribution in range(len(overlaps)) if contribution not in matched]
    sizes = dict.fromkeys(range(overlaps.shape[1]), 0)
    for to in matched.values():
        sizes[to] += 1
    assigned = dict(matched)
    for contribution in free:
        held = overlaps[contribution]
        to = min(sizes, key=lambda to, held=held: (sizes[to], -held[to]))
        sizes[to] += 1
        assigned[contribution] = to
    yield [assigned[contribution] for contribution in range(len(overlaps))]
    for to in sorted(set(matched.values())) if free else []:
        yield [matched.get(contribution, to) for contribution in range(len(overlaps))]


def _merged(overlaps: np.ndarray, replicas: int, target: Sequence[int]) -> Targets:
    """Merge the two groups that save the most, if any merge saves something."""
    if replicas == 1:
        # Whatever is joined moves as much.
        return tuple(target)
    targets = np.array(sorted(set(target)))
    sizes = np.array([sum(to == group for group in target) for to in targets])
    members = np.array(target)[:, None] == targets[None, :]
    # [group, target of a group]: holders in common.
    common = members.T.astype(int) @ overlaps[:, targets]
    into = np.arange(len(targets))
    while True:
        own = np.diagonal(common)
        alone = np.where(sizes == 1, replicas - own, sizes - (own > 0) + replicas - 1)
        together = sizes[:, None] + sizes[None, :] - ((common + own[None, :]) > 0) + replicas - 1
        saved = alone[:, None] + alone[None, :] - together
        np.fill_diagonal(saved, 0)
        gone, kept = np.unravel_index(int(saved.argmax()), saved.shape) if saved.size else (0, 0)
        if not saved.size or saved[gone, kept] <= 0:
            break
        sizes[kept] += sizes[gone]
        common[kept] += common[gone]
        into[into == gone] = kept
        rest = np.arange(len(sizes)) != gone
        # Numbers of groups that are left.
        into[into > gone] -= 1
        sizes, common, targets = sizes[rest], common[rest][:, rest], targets[rest]
    first = sorted(set(target))
    return tuple(int(targets[into[first.index(to)]]) for to in target)


def num_moved(overlaps: np.ndarray, replicas: int, target: Sequence[int]) -> int:
    """Return the elements moved per element of a rectangle. A group of one member is sent to the
    replicas that lack it; of a larger one all members but the owner's are sent to an owner, and the
    result to the other replicas."""
    cost = 0
    for to in set(target):
        members = [contribution for contribution, its in enumerate(target) if its == to]
        if len(members) == 1:
            cost += replicas - int(overlaps[members[0], to])
        else:
            cost += len(members) - bool(overlaps[members, to].any()) + replicas - 1
    return cost
