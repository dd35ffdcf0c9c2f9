"""Positions of a plan's boxes in the plane of a tensor's first two dims, to be drawn.

A 1-D tensor is one row. Boxes that differ only in further dims overlap.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torchtitan_lite.distributed.redistribute import Layout, Plan
from torchtitan_lite.distributed.redistribute.execution.program import rectangles
from torchtitan_lite.distributed.redistribute.planning.partition import intervals
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.redistribute.planning.transfers import Transfer

Intervals = list[tuple[int, int]]
"""(start, length) of each, in order."""


class Area(NamedTuple):
    """A rectangle in the plane, in elements."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Patch:
    """An area of a holder's part of the destination, and its sources."""

    area: Area
    sources: tuple[tuple[Holder, int], ...]
    """With the number of elements from each. Several if areas of further dims overlap, or
    partial values are reduced."""
    is_joined: bool


def plane(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a tensor."""
    return plane_of(shape, 1)


def areas(layout: Layout, shape: tuple[int, ...]) -> dict[Area, list[Holder]]:
    """Return the areas into which a layout splits the plane, and their holders."""
    by_area: dict[Area, list[Holder]] = {}
    for holder in layout.mesh.holders:
        for box in layout.boxes(shape, holder):
            area = Area(*plane_of(box.offset, 0), *plane_of(box.size, 1))
            holders = by_area.setdefault(area, [])
            if holder not in holders:
                holders.append(holder)
    return by_area


def plane_of(numbers: tuple[int, ...], missing: int) -> tuple[int, int]:
    """Return the entries of `numbers`, one per dim, that belong to the plane's rows and columns."""
    padded = (missing,) * (2 - len(numbers)) + numbers
    return padded[0], padded[1]


def patches(plan: Plan, holder: Holder) -> list[Patch]:
    """Return the patches of a holder's part of the destination, in the order of the rounds."""
    result: list[Patch] = []
    for kind, part in zip(plan.rounds, plan.transfers(holder), strict=True):
        by_area: dict[Area, dict[Holder, int]] = {}
        for piece in (*part.copies, *part.receives):
            for area, count in _landing(plan, holder, piece):
                sources = by_area.setdefault(area, {})
                sources[piece.peer] = sources.get(piece.peer, 0) + count
        result += [
            Patch(area, tuple(sources.items()), kind == "reduce")
            for area, sources in by_area.items()
        ]
    return result


def _landing(plan: Plan, holder: Holder, piece: Transfer) -> Iterator[tuple[Area, int]]:
    """Return the destination areas of a piece, with the number of elements in each."""
    coordinate = plan.dst.mesh.coordinate(holder)
    assert coordinate is not None
    held = [
        intervals(length, plan.dst.splits.get(dim, ()), plan.dst.shard_index(dim, coordinate))
        for dim, length in enumerate(plan.shape)
    ]
    for block in rectangles(piece.ranges, piece.start, piece.stop):
        further = prod(block.shape[2:])
        spans = [
            list(_in_tensor(held_intervals, start, length))
            for held_intervals, start, length in zip(held, block.dst, block.shape, strict=True)
        ]
        rows, columns = ([[(0, 1)]] * (2 - len(spans)) + spans)[:2]
        for top, height in rows:
            for left, width in columns:
                yield Area(top, left, height, width), height * width * further


def _in_tensor(held: Intervals, start: int, length: int) -> Iterator[tuple[int, int]]:
    """Return the position in the tensor of the elements [start, start + length) of a part."""
    for first, size in held:
        if start < size and length > 0:
            count = min(length, size - start)
            yield first + start, count
            start, length = 0, length - count
        else:
            start -= size
