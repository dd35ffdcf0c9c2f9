"""The exact exchange: who needs which elements from whom, and not one more.

Each holder's part is worked out from the two layouts alone, without a list of pairs of holders: its
pieces are what its part of one layout has in common with the parts of the other. Layer: above
common_parts, reduction, nodes and sharing.

Between nodes, what several holders of a node need may come to it once and be given on there, in one
round more.

Contributions that are reduced together go to an owner, a holder that contributes and is also a
destination if there is one (round "reduce"), and the result goes from there to the other
destinations (round "spread"). Without reductions there is one round, "move".

Invariant: what one holder's part sends to a peer is what the peer's part receives from it, in the
same order; each holder receives no element twice and none that it has.
"""

from functools import cached_property
from math import prod

import numpy as np

from torchtitan_lite.redistribute.common_parts import Common, CommonParts
from torchtitan_lite.redistribute.cuts import Segments, sizes
from torchtitan_lite.redistribute.holder_mesh import Holder
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.nodes import Nodes
from torchtitan_lite.redistribute.pieces import Part, Piece, RoundKind, block_size, row_size
from torchtitan_lite.redistribute.reduction import Group, Reductions, giver, kept_unit, owners
from torchtitan_lite.redistribute.sharing import Unit, by_node, given, taken


class Exchange:
    """All rounds from one layout to another for a tensor of one shape."""

    def __init__(
        self,
        src: Layout,
        dst: Layout,
        shape: tuple[int, ...],
        nodes: Nodes | None = None,
    ) -> None:
        """Without `nodes` all holders are equally near to each other."""
        common_parts = CommonParts(src, dst, shape)
        self.src, self.dst = common_parts.src, common_parts.dst
        self.shape, self.nodes = shape, nodes
        self._common_parts = common_parts
        self._reductions = Reductions(common_parts)
        self.rounds: tuple[RoundKind, ...] = ("move",)
        if self._reductions.largest_group > 1:
            self.rounds = ("reduce",) if self.dst.num_replicas == 1 else ("reduce", "spread")
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
        per_dim = zip(self.shape, roles.cuts, parts, strict=True)
        return tuple(int(sizes(length, cuts)[part]) for length, cuts, part in per_dim)

    def largest(self, kind: RoundKind) -> int:
        """Elements of the largest part that a holder sends from in a round."""
        roles = self.dst if kind == "spread" else self.src
        per_dim = zip(self.shape, roles.cuts, strict=True)
        return prod(int(sizes(length, cuts).max()) for length, cuts in per_dim)

    def most_moved(self, kind: RoundKind) -> int:
        """A bound of the elements that one holder sends and receives in a round, the same for all
        holders."""
        taken = self.largest("spread")
        copies, sources = self.dst.num_replicas, self.src.num_replicas
        if kind == "spread":
            return taken * copies + taken
        turns = copies if self.nodes is not None else -(-copies // sources)
        if kind == "reduce" and self.dst.num_contributions == 1:
            turns = 1
        return self.largest("move") * turns + taken * self._reductions.largest_group

    def part(self, holder: Holder) -> tuple[Part, ...]:
        """What `holder` does in each round."""
        parts = tuple(Part([], [], [], []) for _ in self.rounds)
        src, dst = self.src.place(holder), self.dst.place(holder)
        if dst is not None:
            self._receive(holder, dst, parts)
        if src is not None:
            self._send(holder, src, parts)
        return parts

    @cached_property
    def total_elements(self) -> int:
        """Elements that go from one holder to another, in all rounds."""
        if self.dst.num_contributions > 1:
            return self._reductions.moved_elements
        whole = prod(self.shape)
        across = self._common_parts.across
        places = np.flatnonzero(across >= 0)
        one, other = across[places], self.dst.part_of[places]
        common = self._common_parts.elements(one, other)
        if self.src.num_contributions == 1:
            return whole * self.dst.num_replicas - int(common.sum())
        # An owner that contributes itself saves one.
        _, index = np.unique(np.stack([one, other]), axis=1, return_index=True)
        rounds = self.src.num_contributions + self.dst.num_replicas - 1
        return whole * rounds - int(common[index].sum())

    def _receive(self, holder: Holder, place: int, parts: tuple[Part, ...]) -> None:
        copy = int(self.dst.contribution_of[place])
        for common in self._common_parts.of_destination(place):
            for group in self._reductions.groups(common.one, common.other):
                if group.target != copy:
                    continue
                if group.is_reduced:
                    self._reduce(holder, common, group, parts)
                elif self._has(holder, common.one, group.members[0]):
                    size = block_size(common.block)
                    parts[0].copies.append(Piece(holder, common.block, 0, size))
                else:
                    unit = kept_unit(self._common_parts, common, group)
                    self._deliver(unit, holder, common.block, parts)

    def _send(self, holder: Holder, place: int, parts: tuple[Part, ...]) -> None:
        own = int(self.src.contribution_of[place])
        for common in self._common_parts.of_source(place):
            for group in self._reductions.groups(common.one, common.other):
                if own not in group.members:
                    continue
                if group.is_reduced:
                    self._contribute(holder, own, common, group, parts[0])
                else:
                    unit = kept_unit(self._common_parts, common, group)
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

    def _has(self, holder: Holder, one: int, contribution: int) -> bool:
        place = self.src.place(holder)
        if place is None:
            return False
        return self.src.part_of[place] == one and self.src.contribution_of[place] == contribution

    def _contribute(
        self, holder: Holder, own: int, common: Common, group: Group, part: Part
    ) -> None:
        for number, owner in enumerate(owners(self._common_parts, common, group)):
            if owner.contribution == own:
                continue
            if giver(self.src, common.one, own, number) == holder:
                part.sends.append(Piece(owner.holder, common.block, owner.start, owner.stop))

    def _reduce(
        self, holder: Holder, common: Common, group: Group, parts: tuple[Part, ...]
    ) -> None:
        """What a replica of the group's target does: reduce what it owns and spread it, and receive
        the rest."""
        reduce, spread, block = parts[0], parts[1:], common.block
        takers = self.dst.holders(common.other, group.target)
        for number, owner in enumerate(owners(self._common_parts, common, group)):
            piece = Piece(owner.holder, block, owner.start, owner.stop)
            if owner.holder != holder and self.nodes is None:
                spread[0].receives.append(piece)
                continue
            if spread:
                unit = Unit([owner.holder], takers, owner.start, owner.stop, number)
                self._deliver(unit, holder, block, spread)
            if owner.holder != holder:
                continue
            begins = reduce.fills if owner.contribution is None else reduce.copies
            begins.append(piece)
            for member in group.members:
                if member != owner.contribution:
                    source = giver(self.src, common.one, member, number)
                    reduce.receives.append(piece._replace(peer=source))
