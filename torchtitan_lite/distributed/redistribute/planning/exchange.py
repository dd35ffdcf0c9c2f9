"""The exchange from one layout to another: exactly the elements that each holder lacks.

The transfers of each holder are computed from the two layouts alone, without a list of pairs of
holders: they are the intersections of its shard of one layout with the shards of the other. Between
nodes, elements that several holders of a node need can be sent to the node once and forwarded
there, in one more round.

Contributions (`Partial`) that are reduced together are sent to a reduction owner, a holder that
contributes and is also a destination if there is one (round "reduce"), and the owner sends the
result to the other destinations (round "broadcast"). Without reductions there is one round, "move".
Where source and destination both have contributions, each contribution of the source is added to
one of the destination; one that is alone in its target stays unreduced.

Invariant: what a holder sends to a peer equals what the peer receives from it, in the same order;
each holder receives no element twice and none that it has.
"""

import copy
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from torchtitan_lite.distributed.redistribute.planning.intersections import (
    HolderIndex,
    Intersection,
    Intersections,
)
from torchtitan_lite.distributed.redistribute.planning.layout import Layout
from torchtitan_lite.distributed.redistribute.planning.partition import shard_sizes
from torchtitan_lite.distributed.redistribute.planning.placements import Holder, Nodes
from torchtitan_lite.distributed.redistribute.planning.reductions import (
    ReductionGroup,
    ReductionGroups,
    ReductionOwner,
    ReductionOwners,
    owners_served_by,
    sender_of,
    unreduced_multicast,
)
from torchtitan_lite.distributed.redistribute.planning.transfers import (
    SMALLEST,
    Delivery,
    Multicast,
    NodeReceivers,
    RoundKind,
    RoundTransfers,
    Transfer,
    deliveries_from,
    deliveries_to,
    node_deliveries_from,
    node_deliveries_to,
)


class Exchange:
    """All rounds from one layout to another for a tensor of one shape."""

    def __init__(
        self,
        src: Layout,
        dst: Layout,
        shape: tuple[int, ...],
        nodes: Nodes | None = None,
    ) -> None:
        """Without `nodes` all holders are equally distant."""
        intersections = Intersections(src, dst, shape)
        self.src, self.dst = intersections.src, intersections.dst
        self.shape, self.nodes = shape, nodes
        self._intersections = intersections
        self._reductions = ReductionGroups(intersections)
        self._owners = ReductionOwners(intersections)
        self._holders_by_node: dict[tuple[bool, int, int], dict[Hashable, list[Holder]]] = {}

    @cached_property
    def rounds(self) -> tuple[RoundKind, ...]:
        """The rounds in order."""
        rounds: tuple[RoundKind, ...] = ("move",)
        if self._reductions.largest_group > 1:
            rounds = ("reduce",) if self.dst.num_replicas == 1 else ("reduce", "broadcast")
        if self.nodes is not None and self.nodes.relay and rounds != ("reduce",):
            rounds = (*rounds, "broadcast")
        return rounds

    def on_nodes(self, nodes: Nodes | None) -> "Exchange":
        """Return the same exchange between holders on `nodes`."""
        exchange = copy.copy(self)
        exchange.nodes, exchange._holders_by_node = nodes, {}
        exchange.__dict__.pop("rounds", None)
        return exchange

    def elements_beyond(self, is_near: np.ndarray, part: int, num_near: int) -> int:
        """Return about how many elements of a shard of the destination none of the source's
        positions `is_near` have, or, if they are reduced first, none of `num_near` owners."""
        size = prod(self._shard_shape(self.dst, part))
        if self.rounds[0] == "reduce":
            return size * (self.dst.num_replicas - num_near) // self.dst.num_replicas
        near_parts = np.unique(self.src.part_of[is_near])
        return size - int(
            self._intersections.elements(near_parts, np.full(len(near_parts), part)).sum()
        )

    def local_shape(self, holder: Holder, kind: RoundKind) -> tuple[int, ...] | None:
        """Return the shape from which a holder sends in a round: its shard of the source, or of the
        destination if results are broadcast. None if it has none."""
        index = self.dst if kind == "broadcast" else self.src
        position = index.position(holder)
        if position is None:
            return None
        return self._shard_shape(index, int(index.part_of[position]))

    def _shard_shape(self, index: HolderIndex, part: int) -> tuple[int, ...]:
        per_dim = zip(self.shape, index.splits, index.per_dim(part), strict=True)
        return tuple(int(shard_sizes(length, splits)[part]) for length, splits, part in per_dim)

    def max_local_numel(self, kind: RoundKind) -> int:
        """Return the elements of the largest shard from which a holder sends in a round."""
        return self._largest_destination if kind == "broadcast" else _largest(self.src, self.shape)

    @cached_property
    def _largest_destination(self) -> int:
        return _largest(self.dst, self.shape)

    def max_moved(self, kind: RoundKind) -> int:
        """Return a bound on the elements that one holder sends and receives in a round, equal for
        all holders."""
        dst_numel, src_numel = self.max_local_numel("broadcast"), self.max_local_numel("move")
        copies, sources = self.dst.num_replicas, self.src.num_replicas
        if kind == "broadcast":
            return dst_numel * copies + dst_numel
        received = dst_numel * self._reductions.largest_group
        if kind == "reduce" and self.dst.num_contributions == 1:
            return src_numel + received
        if self.nodes is not None:
            return src_numel * copies + received
        # Sources share what they send, as far as the invariant of `transfers` states.
        shared = src_numel * copies
        uneven = shared // 20 + self._intersections.max_of_source * SMALLEST * sources**2
        shared = -(-(shared + uneven) // sources)
        if kind == "reduce":
            # Contributions to a reduction are sent by replicas in turn; see `sender_of`.
            shared = max(src_numel, shared)
        return min(src_numel * -(-copies // sources), shared) + received

    def transfers(self, holder: Holder) -> tuple[RoundTransfers, ...]:
        """Return the transfers of `holder` in each round."""
        parts = tuple(RoundTransfers([], [], [], []) for _ in self.rounds)
        src, dst = self.src.position(holder), self.dst.position(holder)
        if dst is not None:
            self._receive(holder, dst, parts)
        if src is not None:
            self._send(holder, src, parts)
        return parts

    @cached_property
    def total_elements(self) -> int:
        """Return the elements sent between holders, in all rounds."""
        if self.dst.num_contributions > 1:
            return self._reductions.moved_elements
        whole = prod(self.shape)
        across = self._intersections.across
        positions = np.flatnonzero(across >= 0)
        src_parts, dst_parts = across[positions], self.dst.part_of[positions]
        common = self._intersections.elements(src_parts, dst_parts)
        if self.src.num_contributions == 1:
            return whole * self.dst.num_replicas - int(common.sum())
        # An owner that contributes itself saves one.
        _, index = np.unique(np.stack([src_parts, dst_parts]), axis=1, return_index=True)
        rounds = self.src.num_contributions + self.dst.num_replicas - 1
        return whole * rounds - int(common[index].sum())

    def _receive(self, holder: Holder, position: int, parts: tuple[RoundTransfers, ...]) -> None:
        contribution = int(self.dst.contribution_of[position])
        results: dict[tuple[int, int], _BroadcastTransfers] = {}
        for common in self._intersections.of_destination(position):
            for group in self._reductions.groups(common.src_part, common.dst_part):
                if group.target != contribution:
                    continue
                if group.is_reduced:
                    self._reduce(holder, common, group, parts, results)
                elif self._has(holder, common.src_part, group.members[0]):
                    parts[0].copies.append(Transfer(holder, common.block, 0, common.size))
                else:
                    self._move(holder, common, group, parts)

    def _send(self, holder: Holder, position: int, parts: tuple[RoundTransfers, ...]) -> None:
        own = int(self.src.contribution_of[position])
        for common in self._intersections.of_source(position):
            for group in self._reductions.groups(common.src_part, common.dst_part):
                if own not in group.members:
                    continue
                if group.is_reduced:
                    self._contribute(holder, own, common, group, parts[0])
                else:
                    self._move(holder, common, group, parts)

    def _move(
        self,
        holder: Holder,
        common: Intersection,
        group: ReductionGroup,
        parts: tuple[RoundTransfers, ...],
    ) -> None:
        """Return the transfers of a group of one member, which is not reduced."""
        multicast = unreduced_multicast(self._intersections, common, group)
        sources = {}
        if self.nodes is not None:
            sources = self._by_node(False, common.src_part, group.members[0])
        receivers = common.dst_part, group.target
        self._deliver(multicast, holder, common, parts, sources, receivers)

    def _by_node(self, is_dst: bool, part: int, contribution: int) -> dict[Hashable, list[Holder]]:
        """Return the replicas of one contribution to one shard, by node."""
        key = is_dst, part, contribution
        if key not in self._holders_by_node:
            assert self.nodes is not None
            by_node = self._holders_by_node[key] = {}
            for holder in (self.dst if is_dst else self.src).holders(part, contribution):
                by_node.setdefault(self.nodes.of(holder), []).append(holder)
        return self._holders_by_node[key]

    def _deliver(
        self,
        multicast: Multicast,
        holder: Holder,
        common: Intersection,
        parts: tuple[RoundTransfers, ...],
        sources: Mapping[Hashable, Sequence[Holder]],
        shard: tuple[int, int],
    ) -> None:
        """Return a holder's transfers of a multicast: in the first round, and in the second if
        there are relays. `sources` are by node, if there are nodes; `shard` is that of the
        receivers, and the contribution to it."""
        is_source, row, block = holder in multicast.sources, common.row, common.block
        rounds: tuple[list[Delivery], ...]
        if self.nodes is None:
            deliveries = deliveries_from if is_source else deliveries_to
            rounds = (deliveries(multicast, holder, row),)
        else:
            where = NodeReceivers(
                self.nodes.of, sources, self._by_node(True, *shard), self._largest_destination
            )
            if is_source:
                relay = self.nodes.relay
                rounds = (node_deliveries_from(multicast, holder, row, where, relay),)
            else:
                rounds = node_deliveries_to(multicast, holder, row, where, self.nodes.relay)
        for part, some in zip(parts, rounds, strict=False):
            for source, receiver, start, stop in some:
                if source == holder:
                    part.sends.append(Transfer(receiver, block, start, stop))
                elif receiver == holder:
                    part.receives.append(Transfer(source, block, start, stop))

    def _has(self, holder: Holder, src_part: int, contribution: int) -> bool:
        position = self.src.position(holder)
        if position is None:
            return False
        return (
            self.src.part_of[position] == src_part
            and self.src.contribution_of[position] == contribution
        )

    def _contribute(
        self,
        holder: Holder,
        own: int,
        common: Intersection,
        group: ReductionGroup,
        part: RoundTransfers,
    ) -> None:
        owners = self._owners.owners(common, group, self._owners.from_source(common, group))
        for owner in owners[owners_served_by(self.src, common.src_part, own, holder)]:
            if owner.contribution != own:
                part.sends.append(Transfer(owner.holder, common.block, owner.start, owner.stop))

    def _reduce(
        self,
        holder: Holder,
        common: Intersection,
        group: ReductionGroup,
        parts: tuple[RoundTransfers, ...],
        results: dict[tuple[int, int], "_BroadcastTransfers"],
    ) -> None:
        """Return the transfers of a replica of the group's target: it reduces and broadcasts
        what it owns, and receives the rest. `results` caches the transfers of rectangles of the
        same shard, by size and row."""
        holding = self._owners.at_destination(common, group)
        # Owners of rectangles of which no replica has a contribution differ by size only.
        transfers = None if holding else results.get((common.size, common.row))
        if transfers is None:
            owners = self._owners.owners(common, group, holding)
            transfers = self._results(holder, common, group, owners, parts[1:])
            if not holding:
                results[common.size, common.row] = transfers
        for part, result in zip(parts[1:], transfers.rounds, strict=True):
            part.sends.extend(_in_block(result.sends, common))
            part.receives.extend(_in_block(result.receives, common))
        if transfers.own is None:
            return
        index, owner = transfers.own
        piece = Transfer(holder, common.block, owner.start, owner.stop)
        begins = parts[0].fills if owner.contribution is None else parts[0].copies
        begins.append(piece)
        for member in group.members:
            if member != owner.contribution:
                source = sender_of(self.src, common.src_part, member, index)
                parts[0].receives.append(piece._replace(peer=source))

    def _results(
        self,
        holder: Holder,
        common: Intersection,
        group: ReductionGroup,
        owners: Sequence[ReductionOwner],
        rounds: Sequence[RoundTransfers],
    ) -> "_BroadcastTransfers":
        """Return what a holder owns, and its transfers of results in the rounds after the
        reduction."""
        transfers = _BroadcastTransfers(None, tuple(RoundTransfers([], [], [], []) for _ in rounds))
        shard = common.dst_part, group.target
        receivers = self.dst.holders(*shard)
        for index, owner in enumerate(owners):
            if owner.holder == holder:
                transfers = transfers._replace(own=(index, owner))
            if not rounds:
                continue
            if self.nodes is None and owner.holder != holder:
                piece = Transfer(owner.holder, common.block, owner.start, owner.stop)
                transfers.rounds[0].receives.append(piece)
                continue
            multicast = Multicast([owner.holder], receivers, owner.start, owner.stop, index)
            sources = {}
            if self.nodes is not None:
                sources = {self.nodes.of(owner.holder): multicast.sources}
            self._deliver(multicast, holder, common, transfers.rounds, sources, shard)
        return transfers


class _BroadcastTransfers(NamedTuple):
    """Transfers of a holder that broadcast the result of one rectangle."""

    own: tuple[int, ReductionOwner] | None
    """The part that it reduces, with its index among the owners."""
    rounds: tuple[RoundTransfers, ...]
    """Transfers in the rounds after the reduction."""


def _in_block(pieces: Sequence[Transfer], common: Intersection) -> list[Transfer]:
    """Return the same transfers of another rectangle of the same size."""
    # There may be tens of thousands; the constructor of a named tuple takes twice as long.
    block, new = common.block, tuple.__new__
    return [new(Transfer, (peer, block, start, stop)) for peer, _, start, stop in pieces]


def _largest(index: HolderIndex, shape: tuple[int, ...]) -> int:
    """Return the elements of the largest shard of a layout."""
    per_dim = zip(shape, index.splits, strict=True)
    return prod(int(shard_sizes(length, splits).max()) for length, splits in per_dim)
