"""Which contributions stay apart where source and destination both have some. Layer: above
exchange."""

import itertools
from collections.abc import Iterator

from torchtitan_lite.redistribute.exchange import Kept
from torchtitan_lite.redistribute.layout import Layout


def choices(src: Layout, dst: Layout) -> Iterator[Kept]:
    """All ways to let pairs of contribution axes stay apart, from all to none."""
    pairs = _pairs(src, dst)
    for count in range(len(pairs), -1, -1):
        for chosen in itertools.combinations(pairs, count):
            yield Kept(tuple(one for one, _ in chosen), tuple(other for _, other in chosen))


def _pairs(src: Layout, dst: Layout) -> list[tuple[int, int]]:
    """Contribution axes of equal size: those of one name first, then in the order of the mesh."""
    free = [axis for axis in dst.partial_axes if dst.mesh.shape[axis] > 1]
    pairs = []
    for by_name in (True, False):
        for axis in src.partial_axes:
            if any(axis == one for one, _ in pairs):
                continue
            for other in free:
                named = src.mesh.axes[axis] == dst.mesh.axes[other]
                if src.mesh.shape[axis] == dst.mesh.shape[other] and (named or not by_name):
                    pairs.append((axis, other))
                    free.remove(other)
                    break
    return pairs
