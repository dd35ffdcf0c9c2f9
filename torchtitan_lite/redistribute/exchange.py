"""The exact exchange: who needs which elements from whom, and not one more.

Each holder's part is worked out from the two layouts alone, without a list of pairs of holders: its
pieces are what its part of one layout has in common with the parts of the other. Layer: above
common_parts, homes, nodes and sharing.

Between nodes, what several holders of a node need may come to it once and be given on there, in one
round more.

Where holders contribute to a sum, each element has a home, a holder that contributes and is also a
destination where there is one: all contributions go there (round "reduce"), and from there to the
other destinations (round "spread"). Without contributions there is one round, "move".

Invariant: what one holder's part sends to a peer is what the peer's part receives from it, in the
same order; each holder receives no element twice and none that it has.
"""

from functools import cached_property
from math import prod

import numpy as np

from torchtitan_lite.redistribute.common_parts import Common, CommonParts
from torchtitan_lite.redistribute.cuts import Segments, sizes
from torchtitan_lite.redistribute.holder_mesh import Holder
from torchtitan_lite.redistribute.homes import giver, homes_of
from torchtitan_lite.redistribute.kept import Kept
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.nodes import Nodes
from torchtitan_lite.redistribute.pieces import Part, Piece, RoundKind, block_size, row_size
from torchtitan_lite.redistribute.sharing import Unit, by_node, given, taken


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
        common_parts = CommonParts(src, dst, shape, kept)
        self.src, self.dst = common_parts.src, common_parts.dst
        self.lengths, self.num_kept = common_parts.lengths, common_parts.num_kept
        self._common_parts = common_parts
        self.kept, self.nodes = kept, nodes
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
        across = self._common_parts.across
        places = np.flatnonzero(across >= 0)
        one, other = across[places], self.dst.part_of[places]
        common = self._common_parts.elements(one, other)
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

    # One round: every source has the value.

    def _receive(self, holder: Holder, place: int, parts: tuple[Part, ...]) -> None:
        copy = int(self.dst.contribution_of[place])
        for common in self._common_parts.of_destination(place):
            if self._carrier(common) != copy:
                continue
            block = common.block
            if self._has(holder, common.one):
                parts[0].copies.append(Piece(holder, block, 0, block_size(block)))
                continue
            self._deliver(self._move_unit(common, copy), holder, block, parts)

    def _send(self, holder: Holder, place: int, parts: tuple[Part, ...]) -> None:
        for common in self._common_parts.of_source(place):
            unit = self._move_unit(common, self._carrier(common))
            self._deliver(unit, holder, common.block, parts)

    def _deliver(
        self, unit: Unit, holder: Holder, block: tuple[Segments, ...], parts: tuple[Part, ...]
    ) -> None:
        """A holder's part of bringing a unit from its sources to its takers, of which it is one:
        of the first round, and of the second where there are relays."""
        row = row_size(block)
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

    def _move_unit(self, common: Common, copy: int) -> Unit:
        one, other, block = common
        sources, takers = self.src.holders(one), self.dst.holders(other, copy)
        return Unit(sources, takers, 0, block_size(block), one + other)

    def _has(self, holder: Holder, one: int) -> bool:
        place = self.src.place(holder)
        return place is not None and self.src.part_of[place] == one

    def _carrier(self, common: Common) -> int:
        """Which contribution of the destination carries a piece, where the others stay empty: the
        one that has the most of it already."""
        if self.dst.num_contributions == 1:
            return 0
        has = (self._common_parts.across[self.dst.places[common.other]] == common.one).sum(axis=1)
        best = np.flatnonzero(has == has.max())
        return int(best[(common.one + common.other) % len(best)])

    # Two rounds: the value comes about at a home.

    def _contribute(self, holder: Holder, place: int, part: Part) -> None:
        own = int(self.src.contribution_of[place])
        for common in self._common_parts.of_source(place):
            for number, home in enumerate(homes_of(self._common_parts, common)):
                if home.contribution == own:
                    continue
                if giver(self.src, common.one, own, number) == holder:
                    part.sends.append(Piece(home.holder, common.block, home.start, home.stop))

    def _join(self, holder: Holder, place: int, parts: tuple[Part, ...]) -> None:
        copy = int(self.dst.contribution_of[place])
        reduce, spread = parts[0], parts[1:]
        for common in self._common_parts.of_destination(place):
            block = common.block
            for number, home in enumerate(homes_of(self._common_parts, common)):
                if home.holder != holder and self.nodes is None:
                    if home.copy == copy:
                        spread[0].receives.append(Piece(home.holder, block, home.start, home.stop))
                    continue
                if home.copy == copy and spread:
                    takers = self.dst.holders(common.other, copy)
                    unit = Unit([home.holder], takers, home.start, home.stop, number)
                    self._deliver(unit, holder, block, spread)
                if home.holder != holder:
                    continue
                begins = reduce.fills if home.contribution is None else reduce.copies
                begins.append(Piece(holder, block, home.start, home.stop))
                for contribution in range(self.src.num_contributions):
                    if contribution != home.contribution:
                        source = giver(self.src, common.one, contribution, number)
                        reduce.receives.append(Piece(source, block, home.start, home.stop))
