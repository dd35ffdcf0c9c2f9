"""Transfers between holders in a round of an exchange, and their assignment among replicas.

Every holder computes its own part of an exchange alone, so a sender and its receiver must reach the
same result: both call the functions here, whose results do not depend on the caller.

Invariant: the amounts that sources of a multicast send differ by at most one in twenty, or by
`SMALLEST` elements times the number of sources.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from torchtitan_lite.distributed.redistribute.planning.partition import SharedRanges
from torchtitan_lite.distributed.redistribute.planning.placements import Holder

RoundKind = Literal["move", "reduce", "broadcast"]


class Transfer(NamedTuple):
    """Elements that one holder sends to another, or copies for itself.

    The ranges of all dims form a rectangle, whose elements are counted in row-major order; the
    transfer is [start, stop) of them.
    """

    peer: Holder
    ranges: tuple[SharedRanges, ...]
    """Per dim: (start in the source's shard, start in the destination's shard, length)."""
    start: int
    stop: int


class RoundTransfers(NamedTuple):
    """The transfers of one holder in a round.

    Between two holders there is at most one transfer per round and multicast; transfers of a pair
    are in the same order on both sides.
    """

    sends: list[Transfer]
    receives: list[Transfer]
    copies: list[Transfer]
    """Local copies from this holder's source to its destination."""
    fills: list[Transfer]
    """Elements only received in a "reduce" round: initialized with the identity."""


SMALLEST = 256
"""Minimum elements of a transfer that is split among sources: messages cost more than balance."""

_TURNS = 4
"""Minimum multicasts per receiver of a node for forwarding whole ones in turn."""

_FEW_ROWS = 20
"""Minimum rows per source for stripes of whole rows: 1 in 20 is balanced enough."""


class Multicast(NamedTuple):
    """Elements [start, stop) that all `sources` have and all `receivers` need."""

    sources: Sequence[Holder]
    receivers: Sequence[Holder]
    """Receivers; a source among them needs nothing."""
    start: int
    stop: int
    rotation: int
    """First source, so that small transfers are spread over the sources."""


class NodeReceivers(NamedTuple):
    """Nodes of the sources and the receivers of a multicast."""

    node: Callable[[Holder], Hashable]
    sources: Mapping[Hashable, Sequence[Holder]]
    """Sources by node."""
    receivers: Mapping[Hashable, Sequence[Holder]]
    """Receivers by node; sources among them need nothing."""
    shard_elements: int
    """Elements of the largest shard that receivers need, of which a multicast is a part."""


class Delivery(NamedTuple):
    """A transfer of elements [start, stop) from one holder to another."""

    source: Holder
    receiver: Holder
    start: int
    stop: int


def stripes(start: int, stop: int, count: int, row: int) -> list[tuple[int, int]]:
    """Split [start, stop) into `count` parts as equal as possible; of whole rows of `row` elements
    if these are balanced enough."""
    return list(itertools.pairwise(_ends(start, stop, count, row, range(count + 1))))


def _ends(start: int, stop: int, count: int, row: int, indices: Iterable[int]) -> list[int]:
    """Return the starts of stripes with these indices."""
    size = stop - start
    unit = row if start % row == 0 and size >= _FEW_ROWS * count * row else 1
    rows = -(-size // unit)
    return [start + min(rows * index // count * unit, size) for index in indices]


def deliveries_to(multicast: Multicast, receiver: Holder, row: int) -> list[Delivery]:
    """Return the deliveries to one receiver that is not a source."""
    count = len(multicast.sources)
    if count == 1:
        return [Delivery(multicast.sources[0], receiver, multicast.start, multicast.stop)]
    needers = _needers(multicast)
    return _to(multicast, needers.index(receiver), receiver, len(needers), row)


def deliveries_from(multicast: Multicast, source: Holder, row: int) -> list[Delivery]:
    """Return the deliveries from one source."""
    count = len(multicast.sources)
    needers = _needers(multicast)
    if count == 1:
        return [Delivery(source, receiver, multicast.start, multicast.stop) for receiver in needers]
    mine = multicast.sources.index(source)
    whole = len(needers) - len(needers) % count
    first = (mine - multicast.rotation) % count
    deliveries = [
        Delivery(source, needers[index], multicast.start, multicast.stop)
        for index in range(first, whole, count)
    ]
    # What is left over, as `_to` has it, looked at from this source alone: there may be hundreds.
    left = range(whole, len(needers))
    if _is_divided(multicast):
        start, stop = _ends(multicast.start, multicast.stop, count, row, (mine, mine + 1))
        return deliveries + [Delivery(source, needers[index], start, stop) for index in left]
    return deliveries + [
        Delivery(source, needers[index], multicast.start, multicast.stop)
        for index in left
        if (index + multicast.rotation) % count == mine
    ]


def node_deliveries_to(
    multicast: Multicast, receiver: Holder, row: int, nodes: NodeReceivers, relay: bool
) -> tuple[list[Delivery], list[Delivery]]:
    """Return the deliveries of a first and of a second round from and to a receiver that is not a
    source, if holders are on nodes: data that a node has comes from its own holders. With `relay`,
    other data is sent to a node once, and forwarded to its other receivers in the second round."""
    here, has_source = _on_node(multicast, nodes, nodes.node(receiver))
    if has_source or not relay or len(here.receivers) == 1:
        return deliveries_to(here, receiver, row), []
    first: list[Delivery] = []
    second: list[Delivery] = []
    for source, carrier, start, stop in _carried(here, row, nodes.shard_elements):
        if carrier != receiver:
            second.append(Delivery(carrier, receiver, start, stop))
            continue
        first.append(Delivery(source, receiver, start, stop))
        peers = (peer for peer in here.receivers if peer != receiver)
        second += [Delivery(receiver, peer, start, stop) for peer in peers]
    return first, second


def node_deliveries_from(
    multicast: Multicast, source: Holder, row: int, nodes: NodeReceivers, relay: bool
) -> list[Delivery]:
    """Return the deliveries from a source in the first round; see `node_deliveries_to`."""
    deliveries: list[Delivery] = []
    own = nodes.node(source)
    for place in nodes.receivers:
        here, has_source = _on_node(multicast, nodes, place)
        if has_source and place != own:
            continue
        if has_source or not relay or len(here.receivers) == 1:
            deliveries += deliveries_from(here, source, row)
        else:
            carried = _carried(here, row, nodes.shard_elements)
            deliveries += [delivery for delivery in carried if delivery.source == source]
    return deliveries


def _on_node(multicast: Multicast, nodes: NodeReceivers, place: Hashable) -> tuple[Multicast, bool]:
    """Return the part of a multicast to the receivers of a node, and whether it has a source."""
    near = nodes.sources.get(place)
    # Nodes begin at different sources.
    rotation = multicast.rotation + (place if isinstance(place, int) else 0)
    receivers = nodes.receivers[place]
    return Multicast(
        near or multicast.sources, receivers, multicast.start, multicast.stop, rotation
    ), bool(near)


def _carried(multicast: Multicast, row: int, shard_elements: int) -> list[Delivery]:
    """Return the deliveries to a node whose receivers forward what they get: a stripe each. They
    take whole multicasts in turn if the shard of a receiver has so many that this is balanced,
    because the number of stripes would grow with the number of ranks."""
    sources, receivers, start, stop, rotation = multicast
    count = len(receivers)
    if (stop - start) * _TURNS * count <= shard_elements:
        source = sources[rotation % len(sources)]
        return [Delivery(source, receivers[rotation % count], start, stop)]
    return [
        Delivery(sources[(index + rotation) % len(sources)], receiver, first, last)
        for index, (receiver, (first, last)) in enumerate(
            zip(receivers, stripes(start, stop, count, row), strict=True)
        )
        if first < last
    ]


def _needers(multicast: Multicast) -> list[Holder]:
    sources = set(multicast.sources)
    return [receiver for receiver in multicast.receivers if receiver not in sources]


def _is_divided(multicast: Multicast) -> bool:
    """Whether the remainder after the last full turn is split among the sources."""
    return multicast.stop - multicast.start >= SMALLEST * len(multicast.sources)


def _to(
    multicast: Multicast, index: int, receiver: Holder, num_needers: int, row: int
) -> list[Delivery]:
    """Return the deliveries to the `index`-th receiver: all from one source, in turn; those that
    remain after the last full turn get a stripe from each."""
    count = len(multicast.sources)
    whole = num_needers - num_needers % count
    if index < whole or not _is_divided(multicast):
        source = multicast.sources[(index + multicast.rotation) % count]
        return [Delivery(source, receiver, multicast.start, multicast.stop)]
    parts = stripes(multicast.start, multicast.stop, count, row)
    return [
        Delivery(source, receiver, start, stop)
        for source, (start, stop) in zip(multicast.sources, parts, strict=True)
    ]
