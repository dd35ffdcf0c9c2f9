"""The exact exchange: who needs which elements from whom, and not one more.

Each holder's part is worked out from the two layouts alone, dim by dim, without a list of pairs of
holders: the intervals of its part in one layout are met with the parts of the other, and the
product over the dims gives its pieces. Layer: above roles, cuts and sharing.

Between nodes, what several holders of a node need may come to it once and be given on there, in one
round more.

Where holders contribute to a sum, each element has a home, a holder that contributes and is also a
destination where there is one: all contributions go there (round "reduce"), and from there to the
other destinations (round "spread"). Without contributions there is one round, "move".

Invariant: what one holder's part sends to a peer is what the peer's part receives from it, in the
same order; each holder receives no element twice and none that it has.
"""

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from torchtitan_lite.redistribute.cuts import Segments, overlap, sizes
from torchtitan_lite.redistribute.holder_mesh import Holder
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.roles import Roles, kept_shape, places_across, roles_of
from torchtitan_lite.redistribute.sharing import Unit, by_node, given, stripes, taken

RoundKind = Literal["move", "reduce", "spread"]


class Piece(NamedTuple):
    """Elements that one holder sends to another, or copies for itself.

    The segments of all dims make up a block, whose elements are counted in row-major order; the
    piece is [start, stop) of them.
    """

    peer: Holder
    segments: tuple[Segments, ...]
    """Per dim: (start in the source's part, start in the destination's part, length)."""
    start: int
    stop: int


class Part(NamedTuple):
    """What one holder does in a round. Between two holders there is at most one piece a round and
    unit; pieces of one pair follow each other in the same order on both sides."""

    sends: list[Piece]
    receives: list[Piece]
    copies: list[Piece]
    """From this holder's source to its own destination."""
    fills: list[Piece]
    """What is only received in a "reduce" round: it begins as nothing."""


class Home(NamedTuple):
    """Where the contributions to elements [start, stop) of a piece are joined."""

    holder: Holder
    contribution: int | None
    """Its own; None where it has none."""
    copy: int
    """The contribution of the destination that will carry the result."""
    start: int
    stop: int


@dataclass(frozen=True)
class Kept:
    """Contribution axes of source and destination that stay apart, pair by pair."""

    src: tuple[int, ...] = ()
    dst: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nodes:
    """Where holders lie: ranks in equal numbers on each node, one node after the other."""

    ranks_per_node: int
    relay: bool = False
    """Let what several holders of a node need come to the node once."""

    def of(self, holder: Holder) -> Hashable:
        """The node of a holder; one that is no rank is a node of its own."""
        return holder // self.ranks_per_node if isinstance(holder, int) else holder


class Exchange:
    """All rounds from one layout to another for a tensor of one shape."""

    def __init__(
        self,
        src: Layout,
        dst: Layout,
        shape: tuple[int, ...],
        kept: Kept,
        nodes: Nodes | None = None,
    ) -> None:
        """Without `nodes` all holders are equally near to each other."""
        self.src = roles_of(src, kept.src, len(shape))
        self.dst = roles_of(dst, kept.dst, len(shape))
        self.lengths = kept_shape(src, kept.src) + shape
        self.num_kept = len(kept.src)
        self.kept, self.nodes = kept, nodes
        self.overlaps = [
            overlap(length, one, other)
            for length, one, other in zip(self.lengths, self.src.cuts, self.dst.cuts, strict=True)
        ]
        self.rounds: tuple[RoundKind, ...] = ("move",)
        if self.src.num_contributions > 1:
            alone = self.dst.num_contributions * self.dst.num_replicas == 1
            self.rounds = ("reduce",) if alone else ("reduce", "spread")
        if nodes is not None and nodes.relay and self.rounds != ("reduce",):
            self.rounds = (*self.rounds, "spread")

    def local_shape(self, holder: Holder, kind: RoundKind) -> tuple[int, ...] | None:
        """The shape of what a holder sends from in a round: its part of the source, or of the
        destination where results are spread. None where it has none."""
        roles = self.dst if kind == "spread" else self.src
        place = roles.place(holder)
        if place is None:
            return None
        parts = roles.per_dim(int(roles.part_of[place]))
        per_dim = zip(self.lengths, roles.cuts, parts, strict=True)
        shape = tuple(int(sizes(length, cuts)[part]) for length, cuts, part in per_dim)
        return shape[self.num_kept :]

    def largest(self, kind: RoundKind) -> int:
        """Elements of the largest part that a holder sends from in a round."""
        roles = self.dst if kind == "spread" else self.src
        per_dim = zip(self.lengths, roles.cuts, strict=True)
        return prod(int(sizes(length, cuts).max()) for length, cuts in per_dim)

    def most_moved(self, kind: RoundKind) -> int:
        """A bound of the elements that one holder sends and receives in a round, the same for all
        holders."""
        taken = self.largest("spread")
        copies, sources = self.dst.num_replicas, self.src.num_replicas
        if kind == "reduce":
            return self.largest("reduce") + taken * self.src.num_contributions
        if kind == "spread":
            return taken * copies + taken
        turns = copies if self.nodes is not None else -(-copies // sources)
        return self.largest("move") * turns + taken

    def part(self, holder: Holder) -> tuple[Part, ...]:
        """What `holder` does in each round."""
        parts = tuple(Part([], [], [], []) for _ in self.rounds)
        src, dst = self.src.place(holder), self.dst.place(holder)
        if self.rounds[0] == "move":
            if dst is not None:
                self._receive(holder, dst, parts)
            if src is not None:
                self._send(holder, src, parts)
            return parts
        if src is not None:
            self._contribute(holder, src, parts[0])
        if dst is not None:
            self._join(holder, dst, parts)
        return parts

    @property
    def least_elements(self) -> int:
        """A bound of `total_elements` that is had for nothing."""
        joins = self.src.num_contributions + self.dst.num_replicas - 2
        return prod(self.lengths) * joins if self.src.num_contributions > 1 else 0

    @cached_property
    def total_elements(self) -> int:
        """Elements that go from one holder to another, in all rounds."""
        whole = prod(self.lengths)
        places = np.flatnonzero(self._across >= 0)
        one, other = self._across[places], self.dst.part_of[places]
        common = self.common(one, other)
        if self.rounds[0] == "move":
            if self.dst.num_contributions == 1:
                return whole * self.dst.num_replicas - int(common.sum())
            # Of each piece, the holders of the copy that has most of it already need nothing.
            copy = self.dst.contribution_of[places]
            keys = np.stack([one, other, copy])
            (one, other, copy), index, count = np.unique(
                keys, axis=1, return_index=True, return_counts=True
            )
            piece = one * len(self.dst.places) + other
            most = np.zeros(int(piece.max(initial=-1)) + 1, np.int64)
            np.maximum.at(most, piece, count * common[index])
            return whole * self.dst.num_replicas - int(most.sum())
        # A home that contributes itself saves one.
        _, index = np.unique(np.stack([one, other]), axis=1, return_index=True)
        rounds = self.src.num_contributions + self.dst.num_replicas - 1
        return whole * rounds - int(common[index].sum())

    def common(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Elements that parts of the source have in common with parts of the destination."""
        common = np.ones(len(one), np.int64)
        for dim, met in enumerate(self.overlaps):
            common *= met.common(
                one // self.src.strides[dim] % self.src.counts[dim],
                other // self.dst.strides[dim] % self.dst.counts[dim],
            )
        return common

    def _pieces(
        self, roles: Roles, place: int, of_one: bool
    ) -> Iterator[tuple[int, int, tuple[Segments, ...]]]:
        """This holder's part against every part of the other layout that it meets: the numbers of
        the source's and the destination's part, and what they have in common."""
        mine = int(roles.part_of[place])
        strides = (self.dst if of_one else self.src).strides
        rows: list[list[tuple[int, Segments]]] = []
        for dim, (part, met) in enumerate(zip(roles.per_dim(mine), self.overlaps, strict=True)):
            row = met.of_one(part) if of_one else met.of_other(part)
            rows.append([(other * strides[dim], segments) for other, segments in row.items()])
        for combination in itertools.product(*rows):
            other = sum(number for number, _ in combination)
            segments = tuple(segments for _, segments in combination)
            yield (mine, other, segments) if of_one else (other, mine, segments)

    # One round: every source has the value.

    def _receive(self, holder: Holder, place: int, parts: tuple[Part, ...]) -> None:
        copy = int(self.dst.contribution_of[place])
        for one, other, segments in self._pieces(self.dst, place, of_one=False):
            if self._carrier(one, other) != copy:
                continue
            block = segments[self.num_kept :]
            if self._has(holder, one):
                parts[0].copies.append(Piece(holder, block, 0, _size(block)))
                continue
            self._deliver(self._move_unit(one, other, copy, block), holder, block, parts)

    def _send(self, holder: Holder, place: int, parts: tuple[Part, ...]) -> None:
        for one, other, segments in self._pieces(self.src, place, of_one=True):
            block = segments[self.num_kept :]
            unit = self._move_unit(one, other, self._carrier(one, other), block)
            self._deliver(unit, holder, block, parts)

    def _deliver(
        self, unit: Unit, holder: Holder, block: tuple[Segments, ...], parts: tuple[Part, ...]
    ) -> None:
        """A holder's part of bringing a unit from its sources to its takers, of which it is one:
        of the first round, and of the second where there are relays."""
        row = _row(block)
        if self.nodes is None:
            if holder in unit.sources:
                sent, received = given(unit, holder, row), []
            else:
                sent, received = [], taken(unit, holder, row)
            deliveries = [(parts[0], sent + received)]
        else:
            rounds = by_node(unit, row, self.nodes.of, self.nodes.relay)
            deliveries = list(zip(parts, rounds, strict=False))
        for part, some in deliveries:
            for source, taker, start, stop in some:
                if source == holder:
                    part.sends.append(Piece(taker, block, start, stop))
                elif taker == holder:
                    part.receives.append(Piece(source, block, start, stop))

    def _move_unit(self, one: int, other: int, copy: int, block: tuple[Segments, ...]) -> Unit:
        sources, takers = self.src.holders(one), self.dst.holders(other, copy)
        return Unit(sources, takers, 0, _size(block), one + other)

    def _has(self, holder: Holder, one: int) -> bool:
        place = self.src.place(holder)
        return place is not None and self.src.part_of[place] == one

    def _carrier(self, one: int, other: int) -> int:
        """Which contribution of the destination carries a piece, where the others stay empty: the
        one that has the most of it already."""
        if self.dst.num_contributions == 1:
            return 0
        has = (self._across[self.dst.places[other]] == one).sum(axis=1)
        best = np.flatnonzero(has == has.max())
        return int(best[(one + other) % len(best)])

    @cached_property
    def _src_places(self) -> np.ndarray:
        """For each place of the destination, that of the same holder in the source, or -1."""
        return places_across(self.dst.layout.mesh, self.src.layout.mesh)

    @cached_property
    def _across(self) -> np.ndarray:
        """For each place of the destination, the same holder's part of the source, or -1."""
        if self.dst.layout.mesh.holders == self.src.layout.mesh.holders:
            return self.src.part_of
        return np.where(self._src_places < 0, -1, self.src.part_of[self._src_places])

    # Two rounds: the value comes about at a home.

    def _homes(self, one: int, other: int, block: tuple[Segments, ...]) -> list[Home]:
        """Where a piece's contributions are joined: each candidate joins an equal part of it."""
        places = self.dst.places[other]
        copies, replicas = np.nonzero(self._across[places] == one)
        contributions: list[int | None]
        if len(copies):
            found = places[copies, replicas]
            contributions = self.src.contribution_of[self._src_places[found]].tolist()
        else:
            copy = (one + other) % len(places)
            found, copies = places[copy], np.full(len(places[copy]), copy)
            contributions = [None] * len(found)
        holders = self.dst.layout.mesh.holders
        candidates = zip(found.tolist(), contributions, copies.tolist(), strict=True)
        bounds = stripes(0, _size(block), len(found), _row(block))
        return [
            Home(holders[place], contribution, copy, start, stop)
            for (place, contribution, copy), (start, stop) in zip(candidates, bounds, strict=True)
            if start < stop
        ]

    def _giver(self, one: int, contribution: int, home: int) -> Holder:
        """Which replica of a contribution goes to the home with number `home`."""
        replicas = self.src.holders(one, contribution)
        return replicas[(home + contribution) % len(replicas)]

    def _contribute(self, holder: Holder, place: int, part: Part) -> None:
        own = int(self.src.contribution_of[place])
        for one, other, segments in self._pieces(self.src, place, of_one=True):
            block = segments[self.num_kept :]
            for number, home in enumerate(self._homes(one, other, block)):
                if home.contribution != own and self._giver(one, own, number) == holder:
                    part.sends.append(Piece(home.holder, block, home.start, home.stop))

    def _join(self, holder: Holder, place: int, parts: tuple[Part, ...]) -> None:
        copy = int(self.dst.contribution_of[place])
        reduce, spread = parts[0], parts[1:]
        for one, other, segments in self._pieces(self.dst, place, of_one=False):
            block = segments[self.num_kept :]
            for number, home in enumerate(self._homes(one, other, block)):
                if home.holder != holder and self.nodes is None:
                    if home.copy == copy:
                        spread[0].receives.append(Piece(home.holder, block, home.start, home.stop))
                    continue
                if home.copy == copy and spread:
                    takers = self.dst.holders(other, copy)
                    unit = Unit([home.holder], takers, home.start, home.stop, number)
                    self._deliver(unit, holder, block, spread)
                if home.holder != holder:
                    continue
                begins = reduce.fills if home.contribution is None else reduce.copies
                begins.append(Piece(holder, block, home.start, home.stop))
                for contribution in range(self.src.num_contributions):
                    if contribution != home.contribution:
                        giver = self._giver(one, contribution, number)
                        reduce.receives.append(Piece(giver, block, home.start, home.stop))


def _size(block: tuple[Segments, ...]) -> int:
    """Elements of a block."""
    size = 1
    for segments in block:
        size *= segments[0][2] if len(segments) == 1 else sum(s[2] for s in segments)
    return size


def _row(block: tuple[Segments, ...]) -> int:
    """Elements of a row: all dims but the first that is longer than one."""
    lengths = [sum(s[2] for s in segments) for segments in block]
    while len(lengths) > 1 and lengths[0] == 1:
        lengths = lengths[1:]
    return prod(lengths[1:])
