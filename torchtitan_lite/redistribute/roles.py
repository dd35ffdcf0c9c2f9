"""What each holder of a layout is good for: its part, its contribution, its replica.

Layer: above layout.
"""

import math
from functools import cached_property, lru_cache

import numpy as np

from torchtitan_lite.redistribute.cuts import Cut
from torchtitan_lite.redistribute.holder_mesh import Holder, HolderMesh
from torchtitan_lite.redistribute.layout import Layout


class Roles:
    """A layout as an array of parts x contributions x replicas. Made by `roles_of`.

    Each axis of the mesh is in one of the three: it shards a dim, or its holders contribute to a
    sum, or they hold the same.
    """

    def __init__(self, layout: Layout, ndim: int) -> None:
        self.layout = layout
        mesh = layout.mesh
        self.cuts: list[tuple[Cut, ...]] = [layout.cuts.get(dim, ()) for dim in range(ndim)]
        self.counts = tuple(math.prod(cut.size for cut in cuts) for cuts in self.cuts)
        """Parts of each dim."""
        strides = [1]
        for count in reversed(self.counts[1:]):
            strides.append(strides[-1] * count)
        self.strides = tuple(reversed(strides)) if self.counts else ()
        """How far apart a dim's parts are in the number of a whole part."""
        cutting = [cut.axis for cuts in self.cuts for cut in sorted(cuts)]
        partial = layout.partial_axes
        same = [a for a in range(len(mesh.shape)) if a not in (*cutting, *partial)]
        self.num_contributions = math.prod(mesh.shape[axis] for axis in partial)
        self.num_replicas = math.prod(mesh.shape[axis] for axis in same)
        self._order = (*cutting, *partial, *same)

    @cached_property
    def places(self) -> np.ndarray:
        """[part, contribution, replica] -> place in `layout.mesh.holders`."""
        mesh = self.layout.mesh
        places = np.arange(len(mesh.holders)).reshape(mesh.shape).transpose(self._order)
        return places.reshape(-1, self.num_contributions, self.num_replicas)

    @cached_property
    def part_of(self) -> np.ndarray:
        """Place -> the number of its part."""
        return self._inverse // (self.num_contributions * self.num_replicas)

    @cached_property
    def contribution_of(self) -> np.ndarray:
        """Place -> the number of its contribution."""
        return self._inverse // self.num_replicas % self.num_contributions

    @cached_property
    def _inverse(self) -> np.ndarray:
        inverse = np.empty(self.places.size, np.int64)
        inverse[self.places.ravel()] = np.arange(self.places.size)
        return inverse

    def per_dim(self, part: int) -> list[int]:
        """The parts of the single dims that make up a whole part."""
        return [
            part // stride % count for stride, count in zip(self.strides, self.counts, strict=True)
        ]

    def holders(self, part: int, contribution: int = 0) -> list[Holder]:
        """The replicas of one contribution to one part."""
        holders = self.layout.mesh.holders
        return [holders[place] for place in self.places[part, contribution].tolist()]

    def place(self, holder: Holder) -> int | None:
        """A holder's place in the mesh; None where it has none."""
        return self.layout.mesh.place(holder)


@lru_cache(maxsize=4096)
def roles_of(layout: Layout, ndim: int) -> Roles:
    """The roles of a layout's holders for a tensor of `ndim` dims."""
    return Roles(layout, ndim)


@lru_cache(maxsize=256)
def places_across(mine: HolderMesh, other: HolderMesh) -> np.ndarray:
    """For each place of the one mesh, the place that the same holder has in the other; -1 where it
    has none."""
    if mine.holders == other.holders:
        return np.arange(len(mine.holders))
    places = (other.place(holder) for holder in mine.holders)
    return np.array([-1 if place is None else place for place in places])
