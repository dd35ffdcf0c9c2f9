"""Layouts for tests: all of a mesh, and random ones."""

import itertools
import math
from collections.abc import Mapping, Sequence

from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tests.redistribution.reference import sharding_axes
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout
from torchtitan_lite.distributed.torch_compat import is_strided_shard, strided_shard

OPS = ("sum", "product", "min", "max")


def all_layouts(mesh: HolderMesh, num_dims: int) -> list[Layout]:
    """Every layout of Replicate, Shard, Partial and strided shards, with every shard order.

    The factors of strided shards are products of mesh sizes.
    """
    sizes = range(1, len(mesh.shape) + 1)
    factors = {math.prod(c) for n in sizes for c in itertools.combinations(mesh.shape, n)} - {1}
    dims = range(num_dims)
    kinds: list[Placement] = [Replicate(), Partial(), *(Shard(dim) for dim in dims)]
    kinds += [strided_shard(dim, factor) for dim in dims for factor in sorted(factors)]
    found = []
    for placements in itertools.product(kinds, repeat=len(mesh.shape)):
        orders = [
            [(dim, order) for order in itertools.permutations(sharding_axes(placements, dim))]
            for dim in dims
            if _has_orders(placements, dim)
        ]
        found += [Layout(mesh, placements, dict(chosen)) for chosen in itertools.product(*orders)]
    return list(dict.fromkeys(found))


def _has_orders(placements: Sequence[Placement], dim: int) -> bool:
    axes = sharding_axes(placements, dim)
    return len(axes) > 1 and not any(is_strided_shard(placements[axis]) for axis in axes)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Shapes of 0 to 3 dims; uneven, even and empty."""
    lengths = st.one_of(st.integers(0, 13), st.sampled_from([8, 12, 16]))
    return tuple(draw(st.lists(lengths, max_size=3)))


@st.composite
def mesh_shapes(draw: st.DrawFn, max_holders: int = 16) -> tuple[int, ...]:
    """Mesh shapes of 0 to 4 axes."""
    found: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        remaining = max_holders // math.prod(found)
        found.append(draw(st.integers(1, min(4, remaining))))
    return tuple(found)


@st.composite
def layouts(draw: st.DrawFn, mesh: HolderMesh, num_dims: int, op: str, *, averages: bool) -> Layout:
    """A valid layout whose partial axes, if any, have the reduction `op`."""
    kinds: list[st.SearchStrategy[Placement]] = [st.just(Replicate()), st.just(Partial(op))]
    if averages and op == "sum":
        kinds.append(st.just(Partial("avg")))
    if num_dims:
        dims = st.integers(0, num_dims - 1)
        kinds += [
            st.builds(Shard, dims),
            st.builds(Shard, dims),
            st.builds(strided_shard, dims, st.integers(1, 6)),
        ]
    placements = [draw(st.one_of(kinds)) for _ in mesh.shape]
    orders: Mapping[int, Sequence[int]] = {
        dim: draw(st.permutations(sharding_axes(placements, dim)))
        for dim in range(num_dims)
        if _has_orders(placements, dim)
    }
    return Layout(mesh, placements, orders)


@st.composite
def meshes(draw: st.DrawFn, holders: Sequence[int]) -> HolderMesh:
    """Meshes of some of `holders`, in any order."""
    shape = draw(mesh_shapes(max_holders=min(16, len(holders))))
    chosen = draw(st.permutations(holders))[: math.prod(shape)]
    return HolderMesh(shape, tuple(chosen))
