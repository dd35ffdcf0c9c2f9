"""Links between replicas: reports of broken ones, and the smallest set of replicas without which
all others can reach each other, a minimum vertex cover of the broken links.

Invariants: no clock and no I/O; equal reports give equal sets.
"""

from collections.abc import Collection, Mapping
from functools import lru_cache

Link = frozenset[str]
"""Two replicas, by id."""

_MAX_EXACT = 16
"""Number of replicas with broken links up to which the smallest set is found by exhaustive search.
With more, the replica with the most broken links is left out first."""


class LinkReports:
    """The replicas that each replica could not reach."""

    def __init__(self) -> None:
        self._unreachable: dict[str, frozenset[str]] = {}

    def replace(self, replica_id: str, unreachable: Collection[str]) -> None:
        """Replace the report of a replica; an empty one withdraws it."""
        peers = frozenset(unreachable) - {replica_id}
        if peers:
            self._unreachable[replica_id] = peers
        else:
            self.withdraw(replica_id)

    def withdraw(self, replica_id: str) -> None:
        """Forget the report of a replica."""
        self._unreachable.pop(replica_id, None)

    def forget(self, replica_id: str) -> None:
        """Forget the report of a replica, and the reports about it."""
        self.withdraw(replica_id)
        for reporter, peers in list(self._unreachable.items()):
            self.replace(reporter, peers - {replica_id})

    def reporters(self) -> list[str]:
        """Return the ids of all replicas with a report."""
        return list(self._unreachable)

    def broken(self, among: Collection[str]) -> frozenset[Link]:
        """Return the links between these replicas that at least one of their ends reports."""
        ids = frozenset(among)
        return frozenset(
            frozenset((reporter, peer))
            for reporter, peers in self._unreachable.items()
            if reporter in ids
            for peer in peers & ids
        )


@lru_cache(maxsize=32)
def replicas_to_leave_out(
    broken: frozenset[Link], steps: tuple[tuple[str, int], ...]
) -> frozenset[str]:
    """Return the smallest set of replicas such that no broken link is between two others. `steps`
    has at least the steps of the ends of all broken links, by id.

    Among sets of equal size, the remaining replicas have the longest history: their steps, in
    descending order, are the greatest; then their ids come first. With more than 16 replicas with
    broken links the set may not be the smallest.
    """
    neighbors: dict[str, set[str]] = {}
    for first, second in (sorted(link) for link in broken):
        neighbors.setdefault(first, set()).add(second)
        neighbors.setdefault(second, set()).add(first)
    step_of = dict(steps)
    # The longest history first.
    order = sorted(neighbors, key=lambda replica_id: (-step_of[replica_id], replica_id))
    rank = {replica_id: place for place, replica_id in enumerate(order)}
    if len(order) > _MAX_EXACT:
        return _greedy_cover(neighbors, rank)
    covers = _covers(neighbors, frozenset(), len(order))
    smallest = min(map(len, covers))
    return min(
        (cover for cover in covers if len(cover) == smallest),
        key=lambda cover: [
            (-step_of[replica_id], replica_id)
            for replica_id in sorted(neighbors.keys() - cover, key=rank.__getitem__)
        ],
    )


def _covers(
    neighbors: Mapping[str, set[str]], chosen: frozenset[str], bound: int
) -> list[frozenset[str]]:
    """Return vertex covers of at most `bound` vertices that contain `chosen`, all of the smallest
    ones among them."""
    if len(chosen) > bound:
        return []
    degrees = {
        candidate: len(adjacent - chosen)
        for candidate, adjacent in neighbors.items()
        if candidate not in chosen
    }
    vertex = max(sorted(degrees), key=degrees.__getitem__, default=None)
    if vertex is None or degrees[vertex] == 0:
        return [chosen]
    # A cover contains the vertex, or else all of its neighbors.
    covers = _covers(neighbors, chosen | {vertex}, bound)
    bound = min([bound, *map(len, covers)])
    covers += _covers(neighbors, chosen | neighbors[vertex], bound)
    return covers


def _greedy_cover(neighbors: Mapping[str, set[str]], rank: Mapping[str, int]) -> frozenset[str]:
    cover: set[str] = set()
    while True:
        degrees = {
            candidate: len(neighbors[candidate] - cover) for candidate in neighbors.keys() - cover
        }
        worst = max(degrees, key=lambda candidate: (degrees[candidate], rank[candidate]))
        if degrees[worst] == 0:
            break
        cover.add(worst)
    for member in sorted(cover, key=rank.__getitem__):
        if neighbors[member] <= cover:
            cover.remove(member)
    return frozenset(cover)
