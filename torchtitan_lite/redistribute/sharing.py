"""Who gives what to whom, where several hold the same. Layer: above layout.

Every holder works out its own part of an exchange alone, so a sender and its receiver must come to
the same answer: both ask the functions here, which know nothing of who asks.

Invariant: what the sources give away differs by no more than one in twenty, or by `_SMALLEST`
elements for each piece.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from torchtitan_lite.redistribute.holder_mesh import Holder

_SMALLEST = 256
"""Elements below which a piece is not divided among sources: messages cost more than balance."""

_FEW_ROWS = 20
"""From this many rows a source on, stripes end at whole rows: 1 in 20 is balance enough."""


class Unit(NamedTuple):
    """Elements [start, stop) of a piece that all `sources` have and all `takers` shall have."""

    sources: Sequence[Holder]
    takers: Sequence[Holder]
    """Those that are sources too need nothing."""
    start: int
    stop: int
    rotation: int
    """Where to begin among the sources, so that pieces that cannot be divided are spread."""


class Delivery(NamedTuple):
    """Elements [start, stop) of a piece go from one holder to another."""

    source: Holder
    taker: Holder
    start: int
    stop: int


def stripes(start: int, stop: int, count: int, row: int) -> list[tuple[int, int]]:
    """The elements [start, stop) in `count` parts, as equal as can be; of whole rows of `row`
    elements where that leaves them equal enough."""
    return list(itertools.pairwise(_ends(start, stop, count, row, range(count + 1))))


def _ends(start: int, stop: int, count: int, row: int, numbers: Iterable[int]) -> list[int]:
    """Where stripes of these numbers begin; the last ends where the next would begin."""
    size = stop - start
    unit = row if start % row == 0 and size >= _FEW_ROWS * count * row else 1
    rows = -(-size // unit)
    return [start + min(rows * number // count * unit, size) for number in numbers]


def taken(unit: Unit, taker: Holder, row: int) -> list[Delivery]:
    """The deliveries to one taker that is no source."""
    count = len(unit.sources)
    if count == 1:
        return [Delivery(unit.sources[0], taker, unit.start, unit.stop)]
    needers = _needers(unit)
    return _to(unit, needers.index(taker), taker, len(needers), row)


def given(unit: Unit, source: Holder, row: int) -> list[Delivery]:
    """The deliveries from one source."""
    count = len(unit.sources)
    needers = _needers(unit)
    if count == 1:
        return [Delivery(source, taker, unit.start, unit.stop) for taker in needers]
    mine = unit.sources.index(source)
    whole = len(needers) - len(needers) % count
    first = (mine - unit.rotation) % count
    found = [
        Delivery(source, needers[index], unit.start, unit.stop)
        for index in range(first, whole, count)
    ]
    # What is left over, as `_to` has it, looked at from this source alone: there may be hundreds.
    left = range(whole, len(needers))
    if _is_divided(unit):
        start, stop = _ends(unit.start, unit.stop, count, row, (mine, mine + 1))
        found += [Delivery(source, needers[index], start, stop) for index in left if start < stop]
        return found
    return found + [
        Delivery(source, needers[index], unit.start, unit.stop)
        for index in left
        if (index + unit.rotation) % count == mine
    ]


def by_node(
    unit: Unit, row: int, node: Callable[[Holder], Hashable], relay: bool
) -> tuple[list[Delivery], list[Delivery]]:
    """All deliveries of a unit, those of a first and of a second round, where holders lie on nodes:
    what a node has comes from its own. With `relay`, what it has not comes to it once: each of its
    takers gets a stripe, and gives it to the others in the second round."""
    first: list[Delivery] = []
    second: list[Delivery] = []
    needers: dict[Hashable, list[Holder]] = {}
    for taker in _needers(unit):
        needers.setdefault(node(taker), []).append(taker)
    for number, (place, takers) in enumerate(needers.items()):
        near = [source for source in unit.sources if node(source) == place]
        here = unit._replace(
            sources=near or unit.sources, takers=takers, rotation=unit.rotation + number
        )
        if near or not relay or len(takers) == 1:
            for index, taker in enumerate(takers):
                first += _to(here, index, taker, len(takers), row)
            continue
        parts = stripes(unit.start, unit.stop, len(takers), row)
        for index, (taker, (start, stop)) in enumerate(zip(takers, parts, strict=True)):
            if start < stop:
                source = unit.sources[(index + here.rotation) % len(unit.sources)]
                first.append(Delivery(source, taker, start, stop))
                second += [Delivery(taker, o, start, stop) for o in takers if o != taker]
    return first, second


def _needers(unit: Unit) -> list[Holder]:
    sources = set(unit.sources)
    return [taker for taker in unit.takers if taker not in sources]


def _is_divided(unit: Unit) -> bool:
    """Whether what is left over after the last full round is divided among the sources."""
    return unit.stop - unit.start >= _SMALLEST * len(unit.sources)


def _to(unit: Unit, index: int, taker: Holder, num_needers: int, row: int) -> list[Delivery]:
    """The deliveries to the `index`-th needer: whole from one source, in turn; those that are left
    over after the last full round get a stripe from each."""
    count = len(unit.sources)
    whole = num_needers - num_needers % count
    if index < whole or not _is_divided(unit):
        source = unit.sources[(index + unit.rotation) % count]
        return [Delivery(source, taker, unit.start, unit.stop)]
    found = []
    for source, (start, stop) in zip(
        unit.sources, stripes(unit.start, unit.stop, count, row), strict=True
    ):
        if start < stop:
            found.append(Delivery(source, taker, start, stop))
    return found
