"""Tensors moved between layouts on real processes are what they should be, to the bit."""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.pool import WorkerPool
from tests.redistribution.layouts import all_layouts
from tests.redistribution.moves import all_at_once, one_by_one
from tests.redistribution.processes import Move
from torchtitan_lite.redistribute import ExchangeOptions, HolderMesh, Layout
from torchtitan_lite.redistribute.cost import CPU, CUDA
from torchtitan_lite.torch_compat import is_strided_shard

Pools = Callable[[int], WorkerPool]

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
SHAPES = [(8, 6), (5, 7), (1, 3), (0, 4), (33, 65)]
SHARED_MEMORY, COLLECTIVE = ExchangeOptions(), ExchangeOptions(transport="collective")
# Small enough that (33, 65) of any dtype of several bytes travels in several buckets.
MEANS = [
    SHARED_MEMORY,
    COLLECTIVE,
    ExchangeOptions(bucket_bytes=1 << 14),
    ExchangeOptions(bucket_bytes=1 << 14, transport="collective"),
]
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_a_sample_of_pairs_on_four_ranks(mesh_shape: tuple[int, ...], pools: Pools) -> None:
    moves = _sample(HolderMesh.ranks(*mesh_shape), 60)
    pools(4).run(one_by_one, moves[:10], [SHARED_MEMORY, COLLECTIVE])
    pools(4).run(all_at_once, moves, MEANS)


def test_a_sample_of_pairs_on_three_ranks(pools: Pools) -> None:
    pools(3).run(all_at_once, _sample(HolderMesh.ranks(3), 30), [SHARED_MEMORY, COLLECTIVE])


def test_a_sample_of_pairs_on_eight_ranks(pools: Pools) -> None:
    moves = _sample(HolderMesh.ranks(2, 2, 2), 40)
    pools(8).run(all_at_once, moves, [SHARED_MEMORY, COLLECTIVE])


def test_collectives_and_relays_on_four_ranks(pools: Pools) -> None:
    """With costs of other machines: single collectives, several legs, relays, and ranks of which
    only some share memory."""
    mesh = HolderMesh.ranks(2, 2)
    layouts = [Layout(mesh, pair) for pair in itertools.product([R, S0, S1, P], repeat=2)]
    moves = _moves(_cases(layouts, layouts, 40))
    costs = [CUDA, CUDA.with_ranks_per_node(2), CPU.with_ranks_per_node(2)]
    pools(4).run(one_by_one, moves, [ExchangeOptions(costs=some) for some in costs])
    nodes = ExchangeOptions(costs=CPU.with_ranks_per_node(2), bucket_bytes=1 << 14)
    pools(4).run(all_at_once, moves, [nodes])


def test_averages_products_and_extremes(pools: Pools) -> None:
    mesh = HolderMesh.ranks(2, 2)
    moves = []
    for op in ("avg", "product", "min", "max"):
        joined = Partial(op)
        pairs = [
            ([joined, joined], [R, R]),
            ([joined, S0], [S1, S0]),
            ([R, joined], [S1, S1]),
            ([S0, R], [joined, joined]),
            ([joined, R], [R, joined]),
            ([R, R], [joined, S0]),
        ]
        dtypes = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
        if op in ("min", "max"):
            dtypes.append(torch.int64)
        moves += [
            Move(Layout(mesh, src), Layout(mesh, dst), (5, 7), dtype)
            for (src, dst), dtype in itertools.product(pairs, dtypes)
        ]
    pools(4).run(all_at_once, moves, [SHARED_MEMORY, COLLECTIVE])


def test_scalars(pools: Pools) -> None:
    mesh, other = HolderMesh.ranks(4), HolderMesh.ranks(2)
    pairs = [
        (Layout(mesh, [P]), Layout(mesh, [R])),
        (Layout(mesh, [R]), Layout(mesh, [P])),
        (Layout(other, [R]), Layout(mesh, [R])),
        (Layout(mesh, [P]), Layout(other, [R])),
    ]
    moves = [Move(src, dst, (), dtype) for (src, dst), dtype in itertools.product(pairs, DTYPES)]
    pools(4).run(all_at_once, moves, MEANS)
    pools(4).run(one_by_one, moves[::5], MEANS[:2])


OTHER_MESHES = {
    "shrinks from 4 to 2": (HolderMesh.ranks(4), HolderMesh.ranks(2)),
    "grows from 2 to 4": (HolderMesh.ranks(2), HolderMesh.ranks(2, 2)),
    "moves elsewhere": (HolderMesh.ranks(2), HolderMesh.ranks(2, first=2)),
    "moves half elsewhere": (HolderMesh.ranks(3), HolderMesh.ranks(3, first=1)),
    "is in another order": (HolderMesh.ranks(2, 2), HolderMesh((2, 2), (3, 1, 0, 2))),
}


@pytest.mark.parametrize("change", OTHER_MESHES)
def test_when_the_mesh(change: str, pools: Pools) -> None:
    before, after = OTHER_MESHES[change]
    moves = _moves(_cases(all_layouts(before, 2), all_layouts(after, 2), 16))
    pools(4).run(all_at_once, moves, [SHARED_MEMORY, COLLECTIVE])
    pools(4).run(one_by_one, moves[:2], [SHARED_MEMORY, COLLECTIVE])


def test_when_the_mesh_grows_from_two_to_three(pools: Pools) -> None:
    pools(3).run(all_at_once, _two_to_three(), [SHARED_MEMORY, COLLECTIVE])


def test_when_the_mesh_grows_from_two_to_three_of_four_ranks(pools: Pools) -> None:
    pools(4).run(all_at_once, _two_to_three(), [SHARED_MEMORY, COLLECTIVE])


def _two_to_three() -> list[Move]:
    before, after = HolderMesh.ranks(2), HolderMesh.ranks(3)
    return _moves(_cases(all_layouts(before, 2), all_layouts(after, 2), 16))


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(10))
def test_all_pairs_on_two_by_two_ranks(part: int, pools: Pools) -> None:
    layouts = all_layouts(HolderMesh.ranks(2, 2), 2)
    moves = _moves(list(itertools.product(layouts, layouts))[part::10])
    for first in range(0, len(moves), 50):
        some = moves[first : first + 50]
        pools(4).run(all_at_once, some, [SHARED_MEMORY, COLLECTIVE])


def _sample(mesh: HolderMesh, count: int) -> list[Move]:
    layouts = all_layouts(mesh, 2)
    return _moves(_cases(layouts, layouts, count))


def _cases(src: Sequence[Layout], dst: Sequence[Layout], count: int) -> list[tuple[Layout, Layout]]:
    chosen = random.Random(0)
    return [(chosen.choice(src), chosen.choice(dst)) for _ in range(count)]


def _moves(pairs: Sequence[tuple[Layout, Layout]]) -> list[Move]:
    """Shapes and dtypes in turn. A source that has both an order and a strided shard is left out:
    a DTensor cannot say both."""
    kinds = itertools.cycle(itertools.product(SHAPES, DTYPES))
    return [
        Move(src, dst, *next(kinds))
        for src, dst in pairs
        if not (src.shard_order and any(map(is_strided_shard, src.placements)))
    ]
