"""The target of each contribution of a source: the contribution of the destination that it is added
to, chosen so that few elements move.

Contributions are matched with targets by the number of common holders, and groups are merged while
that is cheaper; an exhaustive search would be exponential in the contributions.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

Targets = tuple[int, ...]
"""Contribution of the destination to which each contribution of the source is added."""


@lru_cache(maxsize=4096)
def cheapest_targets(overlaps_bytes: bytes, shape: tuple[int, int], replicas: int) -> Targets:
    """Choose targets that move few elements: match contributions with targets, those with the most
    common holders first, and merge groups while that is cheaper."""
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
