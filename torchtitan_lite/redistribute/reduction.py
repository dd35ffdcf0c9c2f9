"""Which contributions are reduced together, and which holders own the reductions.

Where source and destination both have contributions, each contribution of the source becomes part
of one of the destination's. Those that alone become one stay as they are; others are reduced by an
owner. Layer: above common_parts, pieces and sharing.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from torchtitan_lite.redistribute.common_parts import Common, CommonParts
from torchtitan_lite.redistribute.holder_mesh import Holder
from torchtitan_lite.redistribute.pieces import block_size, row_size
from torchtitan_lite.redistribute.roles import Roles
from torchtitan_lite.redistribute.sharing import Unit, stripes

_Target = tuple[int, ...]
"""For each contribution of the source, the contribution of the destination that it becomes part
of."""


class Owner(NamedTuple):
    """Reduces elements [start, stop) of a block."""

    holder: Holder
    contribution: int | None
    """Its own; None where it has none."""
    start: int
    stop: int


class Group(NamedTuple):
    """Contributions of the source that become one of the destination, for one block."""

    members: tuple[int, ...]
    target: int

    @property
    def is_reduced(self) -> bool:
        """Whether it has several members."""
        return len(self.members) > 1


class Reductions:
    """The groups of all blocks, such that few elements move: the fewest for the layouts that are
    tested, since groups are found step by step and not by a search over all of them."""

    def __init__(self, parts: CommonParts) -> None:
        self._parts = parts
        self.num_sources = parts.src.num_contributions
        self.num_targets = parts.dst.num_contributions

    def groups(self, one: int, other: int) -> list[Group]:
        """The groups for what part `one` of the source and part `other` of the destination have in
        common."""
        if self.num_sources == 1 and self.num_targets == 1:
            return [Group((0,), 0)]
        target = self._targets.get((one, other))
        if target is None:
            target = self._target(one, other, np.zeros((self.num_sources, self.num_targets), int))
        members: dict[int, list[int]] = {}
        for contribution, to in enumerate(target):
            members.setdefault(to, []).append(contribution)
        return [Group(tuple(found), to) for to, found in members.items()]

    @cached_property
    def largest_group(self) -> int:
        """Members of the largest group of any block."""
        if self.num_sources == 1 or self.num_targets == 1:
            return self.num_sources
        found = {max(map(target.count, target)) for target in self._targets.values()}
        if self._elements_apart:
            found.add(max(len(group.members) for group in self.groups(-1, -1)))
        return max(found, default=1)

    @cached_property
    def moved_elements(self) -> int:
        """Elements that go from one holder to another."""
        replicas, total = self._parts.dst.num_replicas, 0
        for (one, other), target in self._targets.items():
            overlaps = self._overlaps(one, other)
            total += self._elements[one, other] * _cost(overlaps, replicas, target)
        apart = [len(group.members) for group in self.groups(-1, -1)]
        each = sum(size + replicas - 1 for size in apart)
        return total + self._elements_apart * each

    @cached_property
    def _elements(self) -> dict[tuple[int, int], int]:
        """Elements of each block of which a holder has both sides."""
        across, dst = self._parts.across, self._parts.dst
        places = np.flatnonzero(across >= 0)
        one, other = np.unique(np.stack([across[places], dst.part_of[places]]), axis=1)
        common = self._parts.elements(one, other).tolist()
        keys = zip(one.tolist(), other.tolist(), strict=True)
        return {key: count for key, count in zip(keys, common, strict=True) if count}

    @cached_property
    def _elements_apart(self) -> int:
        """Elements of the other blocks."""
        return int(np.prod(self._parts.shape, dtype=np.int64)) - sum(self._elements.values())

    @cached_property
    def _targets(self) -> dict[tuple[int, int], _Target]:
        if self.num_targets == 1:
            return {}
        return {key: self._target(*key, self._overlaps(*key)) for key in self._elements}

    def _target(self, one: int, other: int, overlaps: np.ndarray) -> _Target:
        if self.num_targets == 1:
            return (0,) * self.num_sources
        rotation = (one + other) % self.num_targets
        turned = np.roll(overlaps, -rotation, axis=1)
        found = _cheapest(turned.tobytes(), turned.shape, self._parts.dst.num_replicas)
        return tuple((to + rotation) % self.num_targets for to in found)

    def _overlaps(self, one: int, other: int) -> np.ndarray:
        """[contribution, target]: holders that have the one and shall have the other."""
        src, dst = self._parts.src, self._parts.dst
        places = dst.places[other]
        targets, replicas = np.nonzero(self._parts.across[places] == one)
        held = src.contribution_of[self._parts.src_places[places[targets, replicas]]]
        overlaps = np.zeros((self.num_sources, self.num_targets), int)
        np.add.at(overlaps, (held, targets), 1)
        return overlaps


@lru_cache(maxsize=4096)
def _cheapest(overlaps_bytes: bytes, shape: tuple[int, int], replicas: int) -> _Target:
    """Targets for which few elements move: match contributions with targets, those with the most
    holders in common first, and merge groups while that is cheaper."""
    overlaps = np.frombuffer(overlaps_bytes, int).reshape(shape)
    candidates = [
        _merged(overlaps, replicas, target)
        for matched in _matchings(overlaps)
        for target in _completions(overlaps, matched)
    ]
    return min(candidates, key=lambda target: _cost(overlaps, replicas, target))


def _matchings(overlaps: np.ndarray) -> Iterator[dict[int, int]]:
    """Matchings {contribution: target} of as many pairs as can be, whose members have at least so
    many holders in common, for each such number."""
    of_target: dict[int, int] = {}

    def is_matched(one: int, least: int, seen: set[int]) -> bool:
        for to in np.flatnonzero(overlaps[one] >= least).tolist():
            if to in seen:
                continue
            seen.add(to)
            if to not in of_target or is_matched(of_target[to], least, seen):
                of_target[to] = one
                return True
        return False

    yield {}
    for least in sorted(set(overlaps[overlaps > 0].tolist()), reverse=True):
        for one in range(len(overlaps)):
            if one not in of_target.values():
                is_matched(one, least, set())
        yield {one: to for to, one in of_target.items()}


def _completions(overlaps: np.ndarray, matched: dict[int, int]) -> Iterator[list[int]]:
    """Targets for all contributions: those that are not matched get one of their own while there
    are any, then join the smallest groups; or all of them join one group."""
    free = [one for one in range(len(overlaps)) if one not in matched]
    sizes = dict.fromkeys(range(overlaps.shape[1]), 0)
    for to in matched.values():
        sizes[to] += 1
    spread = dict(matched)
    for one in free:
        to = min(sizes, key=lambda to, one=one: (sizes[to], -overlaps[one, to]))
        sizes[to] += 1
        spread[one] = to
    yield [spread[one] for one in range(len(overlaps))]
    for to in sorted(set(matched.values())) if free else []:
        yield [matched.get(one, to) for one in range(len(overlaps))]


def _merged(overlaps: np.ndarray, replicas: int, target: Sequence[int]) -> _Target:
    """Merge the two groups that save most, as long as that saves any."""
    if replicas == 1:
        # Whatever is joined moves as much.
        return tuple(target)
    targets = np.array(sorted(set(target)))
    sizes = np.array([sum(to == one for one in target) for to in targets])
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


def _cost(overlaps: np.ndarray, replicas: int, target: Sequence[int]) -> int:
    """Elements that move per element of a block. A group of one member goes to the replicas that
    lack it; of a larger one all members go to an owner, but its own, and the result to the other
    replicas."""
    cost = 0
    for to in set(target):
        members = [one for one, its in enumerate(target) if its == to]
        if len(members) == 1:
            cost += replicas - int(overlaps[members[0], to])
        else:
            cost += len(members) - bool(overlaps[members, to].any()) + replicas - 1
    return cost


def owners(parts: CommonParts, common: Common, group: Group) -> list[Owner]:
    """The holders that reduce a group for one block: replicas of its target that hold a member if
    there are any, each of which reduces an equal share."""
    src, dst = parts.src, parts.dst
    places = dst.places[common.other, group.target]
    contributions: list[int | None] = [None] * len(places)
    held = np.flatnonzero(parts.across[places] == common.one)
    own = src.contribution_of[parts.src_places[places[held]]]
    is_member = np.isin(own, group.members)
    if is_member.any():
        places, contributions = places[held[is_member]], own[is_member].tolist()
    holders = dst.layout.mesh.holders
    bounds = stripes(0, block_size(common.block), len(places), row_size(common.block))
    return [
        Owner(holders[place], contribution, start, stop)
        for place, contribution, (start, stop) in zip(
            places.tolist(), contributions, bounds, strict=True
        )
        if start < stop
    ]


def giver(src: Roles, part: int, contribution: int, owner: int) -> Holder:
    """Which replica of a contribution to a part goes to the owner with this number."""
    replicas = src.holders(part, contribution)
    return replicas[(owner + contribution) % len(replicas)]


def kept_unit(parts: CommonParts, common: Common, group: Group) -> Unit:
    """The delivery of a group of one member: from the replicas that have it to those of its
    target."""
    one, other, block = common
    (member,) = group.members
    sources, takers = parts.src.holders(one, member), parts.dst.holders(other, group.target)
    return Unit(sources, takers, 0, block_size(block), one + other + member)
