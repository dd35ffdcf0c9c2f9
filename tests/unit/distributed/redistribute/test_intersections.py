"""Roles of holders, and intersections of shards, compared with lists of elements."""

import itertools
from math import prod

import numpy as np
import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.redistribution.reference import (
    contribution_keys,
    coordinates,
    elements_of,
    key_of,
    sharding_axes,
)
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout
from torchtitan_lite.distributed.redistribute.planning.intersections import (
    Intersection,
    Intersections,
    holder_index,
    matching_positions,
)
from torchtitan_lite.distributed.torch_compat import strided_shard

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
CUBE = HolderMesh.ranks(2, 3, 2)
FILES = HolderMesh((3, 2), ("a", 1, "b", 0, "c", 2))
LAYOUTS = [
    Layout(CUBE, [S0, R, S1]),
    Layout(CUBE, [S1, P, S1], {1: (2, 0)}),
    Layout(CUBE, [P, S0, P]),
    Layout(CUBE, [R, R, R]),
    Layout(FILES, [strided_shard(0, 2), R]),
    Layout(FILES, [R, S1]),
]


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(CUBE, [Shard(2), S0, S1])], ids=str)
def test_a_holder_has_a_shard_a_contribution_and_replicas(layout: Layout) -> None:
    mesh, index, shape = layout.mesh, holder_index(layout, 3), (7, 12, 5)
    keys = contribution_keys(layout)
    roles = {}
    for position, (holder, at) in enumerate(coordinates(mesh)):
        assert index.position(holder) == position
        shard = []
        for dim in range(3):
            number = 0
            for axis in sharding_axes(layout.placements, dim):
                number = number * mesh.shape[axis] + at[axis]
            shard.append(number)
        part = int(np.ravel_multi_index(shard, index.counts))
        roles[holder] = part, keys[key_of(layout, at)]
        assert (index.part_of[position], index.contribution_of[position]) == roles[holder]
        assert index.per_dim(part) == shard
    assert index.position("z") is None
    for role in set(roles.values()):
        replicas = [holder for holder in mesh.holders if roles[holder] == role]
        assert list(index.holders(*role)) == replicas
        assert index.num_replicas == len(replicas)
        assert len({elements_of(layout, shape, _at(mesh, h)).tobytes() for h in replicas}) == 1
    assert index.num_contributions == len(keys)
    assert index.positions.shape == (prod(index.counts), len(keys), index.num_replicas)


@pytest.mark.parametrize("shape", [(7, 12), (1, 5), (4, 0)])
@pytest.mark.parametrize("src", LAYOUTS, ids=str)
def test_intersections_have_the_common_elements(src: Layout, shape: tuple[int, int]) -> None:
    for dst in LAYOUTS:
        found = Intersections(src, dst, shape)
        ours, theirs = (_shards(one, shape) for one in (src, dst))
        common = {
            (n, k): len(set(one.ravel()) & set(other.ravel()))
            for (n, one), (k, other) in itertools.product(ours.items(), theirs.items())
        }
        numbers = np.array(list(common))
        assert found.elements(*numbers.T).tolist() == list(common.values())
        largest = 0
        for position in range(len(src.mesh.holders)):
            pieces = list(found.of_source(position))
            largest = max(largest, len(pieces))
            part = found.src.part_of[position]
            assert {(p.src_part, p.dst_part) for p in pieces if p.size} == {
                pair for pair, count in common.items() if count and pair[0] == part
            }
            for piece in pieces:
                _check(piece, ours[piece.src_part], theirs[piece.dst_part])
        assert largest == found.max_of_source
        for position in range(len(dst.mesh.holders)):
            part = found.dst.part_of[position]
            pieces = list(found.of_destination(position))
            assert {p.src_part: p.size for p in pieces if p.size} == {
                n: count for (n, k), count in common.items() if count and k == part
            }
            for piece in pieces:
                _check(piece, ours[piece.src_part], theirs[piece.dst_part])


def _check(piece: Intersection, ours: np.ndarray, theirs: np.ndarray) -> None:
    """Its ranges are the same elements of both shards; a row is one index of the first long
    dim."""
    pairs = list(itertools.product(*piece.block))
    blocks = [
        tuple(shard[tuple(slice(d[side], d[side] + d[2]) for d in dims)] for dims in pairs)
        for side, shard in enumerate((ours, theirs))
    ]
    assert all(np.array_equal(one, other) for one, other in zip(*blocks, strict=True))
    assert piece.size == sum(block.size for block in blocks[0])
    lengths = [sum(length for _, _, length in dim) for dim in piece.block]
    long = [length for length in lengths[:-1] if length != 1] or [lengths[-1]]
    assert piece.row * long[0] == piece.size


def test_a_scalar_is_one_row() -> None:
    one, other = Layout(HolderMesh.ranks(2), [R]), Layout(HolderMesh.ranks(2), [P])
    (piece,) = Intersections(one, other, ()).of_source(0)
    assert piece == Intersection(0, 0, (), 1, 1)


def test_the_same_holders_are_found_in_another_mesh() -> None:
    files, ranks = FILES, HolderMesh.ranks(4)
    assert matching_positions(ranks, files).tolist() == [3, 1, 5, -1]
    assert matching_positions(files, files).tolist() == list(range(6))
    src, dst = Layout(files, [strided_shard(0, 2), R]), Layout(ranks, [S0])
    parts = Intersections(src, dst, (12,))
    assert parts.src_positions.tolist() == [3, 1, 5, -1]
    assert parts.across.tolist() == [1, 0, 2, -1]
    assert Intersections(dst, dst, (12,)).across.tolist() == [0, 1, 2, 3]


def _at(mesh: HolderMesh, holder: object) -> tuple[int, ...]:
    return dict(coordinates(mesh))[holder]  # pyright: ignore[reportArgumentType]


def _shards(layout: Layout, shape: tuple[int, ...]) -> dict[int, np.ndarray]:
    """Elements by shard number."""
    index = holder_index(layout, len(shape))
    return {
        int(index.part_of[position]): elements_of(layout, shape, at)
        for position, (_, at) in enumerate(coordinates(layout.mesh))
    }
