"""Transfers between holders in a round of an exchange, and their assignment among replicas.

Every holder computes its own part of an exchange alone, so a sender and its receiver must reach the
same result: both call the functions here, whose results do not depend on the caller.

Invariant: the amounts that sources send differ by at most one in twenty, or by `_SMALLEST` elements
per piece.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import prod
from typing import Literal, NamedTuple

from torchtitan_lite.redistribute.partition import Segments
from torchtitan_lite.redistribute.placements import Holder

RoundKind = Literal["move", "reduce", "spread"]


class Transfer(NamedTuple):
    """Elements that one holder sends to another, or copies for itself.

    The segments of all dims form a rectangle, whose elements are counted in row-major order; the
    transfer is [start, stop) of them.
    """

    peer: Holder
    segments: tuple[Segments, ...]
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


def block_size(block: tuple[Segments, ...]) -> int:
    """Number of elements of the rectangle."""
    size = 1
    for segments in block:
        size *= segments[0][2] if len(segments) == 1 else sum(s[2] for s in segments)
    return size


def row_size(block: tuple[Segments, ...]) -> int:
    """Elements of a row: all dims but the first longer than one."""
    lengths = [sum(s[2] for s in segments) for segments in block]
    while len(lengths) > 1 and lengths[0] == 1:
        lengths = lengths[1:]
    return prod(lengths[1:])


_SMALLEST = 256
"""Minimum elements of a transfer that is split among sources: messages cost more than balance."""

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


def _ends(start: int, stop: int, count: int, row: int, numbers: Iterable[int]) -> list[int]:
    """Return the starts of stripes with these numbers."""
    size = stop - start
    unit = row if start % row == 0 and size >= _FEW_ROWS * count * row else 1
    rows = -(-size // unit)
    return [start + min(rows * number // count * unit, size) for number in numbers]


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
    found = [
        Delivery(source, needers[index], multicast.start, multicast.stop)
        for index in range(first, whole, count)
    ]
    # What is left over, as `_to` has it, looked at from this source alone: there may be hundreds.
    left = range(whole, len(needers))
    if _is_divided(multicast):
        start, stop = _ends(multicast.start, multicast.stop, count, row, (mine, mine + 1))
        found += [Delivery(source, needers[index], start, stop) for index in left if start < stop]
        return found
    return found + [
        Delivery(source, needers[index], multicast.start, multicast.stop)
        for index in left
        if (index + multicast.rotation) % count == mine
    ]


def deliveries_by_node(
    multicast: Multicast, row: int, node: Callable[[Holder], Hashable], relay: bool
) -> tuple[list[Delivery], list[Delivery]]:
    """Return all deliveries of a multicast, those of a first and of a second round, if holders are
    on nodes: data that a node has comes from its own holders. With `relay`, other data is sent to a
    node once: each of its receivers gets a stripe, and forwards it to the others in the second
    round."""
    first: list[Delivery] = []
    second: list[Delivery] = []
    needers: dict[Hashable, list[Holder]] = {}
    for receiver in _needers(multicast):
        needers.setdefault(node(receiver), []).append(receiver)
    for number, (place, receivers) in enumerate(needers.items()):
        near = [source for source in multicast.sources if node(source) == place]
        here = multicast._replace(
            sources=near or multicast.sources,
            receivers=receivers,
            rotation=multicast.rotation + number,
        )
        if near or not relay or len(receivers) == 1:
            for index, receiver in enumerate(receivers):
                first += _to(here, index, receiver, len(receivers), row)
            continue
        parts = stripes(multicast.start, multicast.stop, len(receivers), row)
        for index, (receiver, (start, stop)) in enumerate(zip(receivers, parts, strict=True)):
            if start < stop:
                source = multicast.sources[(index + here.rotation) % len(multicast.sources)]
                first.append(Delivery(source, receiver, start, stop))
                second += [Delivery(receiver, o, start, stop) for o in receivers if o != receiver]
    return first, second


def _needers(multicast: Multicast) -> list[Holder]:
    sources = set(multicast.sources)
    return [receiver for receiver in multicast.receivers if receiver not in sources]


def _is_divided(multicast: Multicast) -> bool:
    """Whether the remainder after the last full turn is split among the sources."""
    return multicast.stop - multicast.start >= _SMALLEST * len(multicast.sources)


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
    found = []
    for source, (start, stop) in zip(
        multicast.sources, stripes(multicast.start, multicast.stop, count, row), strict=True
    ):
        if start < stop:
            found.append(Delivery(source, receiver, start, stop))
    return found
