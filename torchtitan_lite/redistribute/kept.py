"""Which contributions stay apart where source and destination both have some.

Layer: above layout.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan_lite.redistribute.layout import Layout

_MOST_CHOICES = 48
"""Looked at where meshes differ and many axes contribute: each costs as much as a plan."""


@dataclass(frozen=True)
class Kept:
    """Contribution axes of source and destination that stay apart, pair by pair."""

    src: tuple[int, ...] = ()
    dst: tuple[int, ...] = ()


def choices(src: Layout, dst: Layout) -> list[Kept]:
    """Ways to let pairs of contribution axes of equal size stay apart: from as many as can be to
    none, and those of axes of one name before others. On one mesh an axis is paired with itself
    only, since its holders already have what they shall keep."""
    found = sorted(_pairings(src, dst), key=lambda kept: (-len(kept.src), _renamed(src, dst, kept)))
    return found if len(found) <= _MOST_CHOICES else [*found[: _MOST_CHOICES - 1], Kept()]


def _pairings(src: Layout, dst: Layout) -> Iterator[Kept]:
    ones, others = (
        [axis for axis in layout.partial_axes if layout.mesh.shape[axis] > 1]
        for layout in (src, dst)
    )
    if src.mesh == dst.mesh:
        ones = others = [axis for axis in ones if axis in others]
    for count in range(min(len(ones), len(others)) + 1):
        for mine in itertools.combinations(ones, count):
            if src.mesh == dst.mesh:
                yield Kept(mine, mine)
                continue
            for theirs in itertools.permutations(others, count):
                if all(
                    src.mesh.shape[one] == dst.mesh.shape[other]
                    for one, other in zip(mine, theirs, strict=True)
                ):
                    yield Kept(mine, theirs)


def _renamed(src: Layout, dst: Layout, kept: Kept) -> int:
    """Pairs of axes of different names."""
    pairs = zip(kept.src, kept.dst, strict=True)
    return sum(src.mesh.axes[one] != dst.mesh.axes[other] for one, other in pairs)
