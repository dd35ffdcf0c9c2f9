"""Which elements a holder has, by lists of indices: nothing of the planner's arithmetic of boxes.

`torch.chunk` and DTensor's strided shard are done on a list of indices, as they are defined.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from torch.distributed.tensor import Partial, Placement, Replicate

from torchtitan_lite.redistribute import HolderMesh, Layout
from torchtitan_lite.redistribute.placements import Holder
from torchtitan_lite.torch_compat import is_strided_shard, split_factor


def chunk(indices: np.ndarray, count: int) -> list[np.ndarray]:
    """`count` pieces of ceil(length / count); the last ones may be shorter or empty."""
    size = -(-len(indices) // count)
    return [indices[number * size : (number + 1) * size] for number in range(count)]


def strided(indices: np.ndarray, count: int, index: int, factor: int) -> np.ndarray:
    """Part `index` of `count`: that of each of `factor` pieces, one after the other."""
    pieces = [chunk(piece, count)[index] for piece in chunk(indices, factor)]
    return np.concatenate(pieces)


def coordinates(mesh: HolderMesh) -> Iterator[tuple[Holder, tuple[int, ...]]]:
    """Every holder with its index on each axis."""
    every = itertools.product(*map(range, mesh.shape))
    return zip(mesh.holders, every, strict=True)


def dims_of(layout: Layout, shape: Sequence[int], at: Sequence[int]) -> list[np.ndarray]:
    """By dim, the indices that the holder at a coordinate has, in the order of its storage."""
    orders = dict(layout.shard_order)
    found = []
    for dim, length in enumerate(shape):
        indices = np.arange(length)
        for axis in orders.get(dim, cutting(layout.placements, dim)):
            placement = layout.placements[axis]
            factor = split_factor(placement) if is_strided_shard(placement) else 1
            indices = strided(indices, layout.mesh.shape[axis], at[axis], factor)
        found.append(indices)
    return found


def cutting(placements: Sequence[Placement], dim: int) -> list[int]:
    """The axes that cut a dim, by number."""
    return [
        axis
        for axis, placement in enumerate(placements)
        if not isinstance(placement, (Replicate, Partial)) and getattr(placement, "dim", -1) == dim
    ]


@lru_cache(maxsize=1 << 14)
def elements_of(layout: Layout, shape: tuple[int, ...], at: tuple[int, ...]) -> np.ndarray:
    """The numbers of the elements that the holder at a coordinate has, as its part lies: an int64
    array of the part's shape."""
    whole = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    if not shape:
        return whole
    return whole[np.ix_(*dims_of(layout, shape, at))]
