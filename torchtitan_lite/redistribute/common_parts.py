"""What the parts of a source have in common with the parts of a destination.

It is worked out dim by dim: the intervals of a part in one layout are met with the parts of the
other, and the product over the dims gives what whole parts have in common. Layer: above roles
and cuts.
"""

import itertools
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torchtitan_lite.redistribute.cuts import Segments, overlap
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.roles import Roles, places_across, roles_of


class Common(NamedTuple):
    """What a part of the source and one of the destination have in common."""

    one: int
    """The number of the source's part."""
    other: int
    """The number of the destination's."""
    block: tuple[Segments, ...]
    """By dim of the tensor."""


class CommonParts:
    """What all parts of two layouts have in common, for a tensor of one shape."""

    def __init__(self, src: Layout, dst: Layout, shape: tuple[int, ...]) -> None:
        self.src = roles_of(src, len(shape))
        self.dst = roles_of(dst, len(shape))
        self.shape = shape
        self._overlaps = [
            overlap(length, one, other)
            for length, one, other in zip(shape, self.src.cuts, self.dst.cuts, strict=True)
        ]

    def elements(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Elements that parts of the source have in common with parts of the destination."""
        common = np.ones(len(one), np.int64)
        for dim, met in enumerate(self._overlaps):
            common *= met.common(
                one // self.src.strides[dim] % self.src.counts[dim],
                other // self.dst.strides[dim] % self.dst.counts[dim],
            )
        return common

    def of_source(self, place: int) -> Iterator[Common]:
        """What the part of the source at a place has in common with each of the destination."""
        return self._of(self.src, place, True)

    def of_destination(self, place: int) -> Iterator[Common]:
        """What the part of the destination at a place has in common with each of the source."""
        return self._of(self.dst, place, False)

    def _of(self, roles: Roles, place: int, of_one: bool) -> Iterator[Common]:
        mine = int(roles.part_of[place])
        strides = (self.dst if of_one else self.src).strides
        rows: list[list[tuple[int, Segments]]] = []
        for dim, (part, met) in enumerate(zip(roles.per_dim(mine), self._overlaps, strict=True)):
            row = met.of_one(part) if of_one else met.of_other(part)
            rows.append([(other * strides[dim], segments) for other, segments in row.items()])
        for combination in itertools.product(*rows):
            other = sum(number for number, _ in combination)
            block = tuple(segments for _, segments in combination)
            yield Common(mine, other, block) if of_one else Common(other, mine, block)

    @cached_property
    def src_places(self) -> np.ndarray:
        """For each place of the destination, that of the same holder in the source, or -1."""
        return places_across(self.dst.layout.mesh, self.src.layout.mesh)

    @cached_property
    def across(self) -> np.ndarray:
        """For each place of the destination, the same holder's part of the source, or -1."""
        if self.dst.layout.mesh.holders == self.src.layout.mesh.holders:
            return self.src.part_of
        return np.where(self.src_places < 0, -1, self.src.part_of[self.src_places])
