"""Redistribution on real processes, checked to the bit: results of moves, edge cases."""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.harness.ranks import WorkerPool
from tests.redistribution.layouts import all_layouts
from tests.redistribution.processes import (
    Move,
    all_at_once,
    assert_arrived,
    device_mesh,
    moved,
    one_by_one,
    source,
)
from torchtitan_lite.core.errors import LayoutError, RedistributionError
from torchtitan_lite.distributed.redistribute import (
    ExchangeOptions,
    HolderMesh,
    Layout,
    align_gradient,
    redistribute_state_dict,
)
from torchtitan_lite.distributed.redistribute.planning.cost import CPU, CUDA, default_costs
from torchtitan_lite.distributed.torch_compat import is_strided_shard

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
# Small enough that (33, 65) of a dtype of several bytes takes several buckets.
OPTIONS = [
    SHARED_MEMORY,
    COLLECTIVE,
    ExchangeOptions(bucket_bytes=1 << 14),
    ExchangeOptions(bucket_bytes=1 << 14, transport="collective"),
]
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
FOUR = HolderMesh.ranks(4)
SHARDED, WHOLE = Layout(FOUR, [S0]), Layout(FOUR, [R])
WRONG_OUTS = {
    "another dtype": torch.empty(5, 3, dtype=torch.bfloat16),
    "another shape": torch.empty(3, 5),
    "not contiguous": torch.empty(3, 5).t(),
}


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_a_sample_of_pairs_on_four_ranks(mesh_shape: tuple[int, ...], pools: Pools) -> None:
    moves = _sample(HolderMesh.ranks(*mesh_shape), 30)
    pools(4).run(one_by_one, moves[:10], [SHARED_MEMORY, COLLECTIVE])
    pools(4).run(all_at_once, moves, OPTIONS)


def test_a_sample_of_pairs_on_three_ranks(pools: Pools) -> None:
    pools(3).run(all_at_once, _sample(HolderMesh.ranks(3), 20), [SHARED_MEMORY, COLLECTIVE])


@pytest.mark.matrix
def test_a_sample_of_pairs_on_eight_ranks(pools: Pools) -> None:
    moves = _sample(HolderMesh.ranks(2, 2, 2), 40)
    pools(8).run(all_at_once, moves, [SHARED_MEMORY, COLLECTIVE])


@pytest.mark.matrix
def test_relays_on_four_ranks(pools: Pools) -> None:
    """With costs of other machines: relays, and ranks of which only some share memory."""
    mesh = HolderMesh.ranks(2, 2)
    layouts = [Layout(mesh, pair) for pair in itertools.product([R, S0, S1, P], repeat=2)]
    moves = _moves(_cases(layouts, layouts, 16))
    costs = [CUDA, CUDA.with_ranks_per_node(2), CPU.with_ranks_per_node(2)]
    pools(4).run(one_by_one, moves, [ExchangeOptions(costs=some) for some in costs])
    nodes = ExchangeOptions(costs=CPU.with_ranks_per_node(2), bucket_bytes=1 << 14)
    pools(4).run(all_at_once, moves, [nodes])


def test_avg_product_min_and_max(pools: Pools) -> None:
    mesh = HolderMesh.ranks(2, 2)
    moves = []
    for op in ("avg", "product", "min", "max"):
        reduced = Partial(op)
        pairs = [
            ([reduced, reduced], [R, R]),
            ([reduced, S0], [S1, S0]),
            ([R, reduced], [S1, S1]),
            ([S0, R], [reduced, reduced]),
            ([reduced, R], [R, reduced]),
            ([R, R], [reduced, S0]),
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
    pools(4).run(all_at_once, moves, OPTIONS)
    pools(4).run(one_by_one, moves[::5], OPTIONS[:2])


OTHER_MESHES = {
    "shrinks from 4 to 2": (HolderMesh.ranks(4), HolderMesh.ranks(2)),
    "grows from 2 to 4": (HolderMesh.ranks(2), HolderMesh.ranks(2, 2)),
    "moves to other ranks": (HolderMesh.ranks(2), HolderMesh.ranks(2, first=2)),
    "moves to partly other ranks": (HolderMesh.ranks(3), HolderMesh.ranks(3, first=1)),
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


@pytest.mark.matrix
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
    """Moves with alternating shapes and dtypes.

    Sources with both a shard order and a strided shard are omitted: a DTensor cannot have both.
    """
    kinds = itertools.cycle(itertools.product(SHAPES, DTYPES))
    return [
        Move(src, dst, *next(kinds))
        for src, dst in pairs
        if not (src.shard_order and any(map(is_strided_shard, src.placements)))
    ]


def _fills_out() -> None:
    """`out` is returned and holds the result in its own memory."""
    move = Move(SHARDED, WHOLE, (5, 3))
    tensor = source(move, 0)
    mesh = device_mesh(FOUR)
    out = DTensor.from_local(torch.full((5, 3), -1.0), mesh, [Replicate()], run_check=False)
    address = out.to_local().data_ptr()
    assert moved(tensor, WHOLE, out=out) is out
    assert out.to_local().data_ptr() == address
    assert_arrived(move, 0, out)
    # Without transfers there is still a copy.
    again = DTensor.from_local(torch.zeros(5, 3), mesh, [Replicate()], run_check=False)
    assert moved(out, WHOLE, out=again) is again
    assert_arrived(move, 0, again)


def _rejects_an_unsuitable_out() -> None:
    """All ranks raise before any transfer."""
    tensor = source(Move(SHARDED, WHOLE, (5, 3)), 0)
    for local in WRONG_OUTS.values():
        out = DTensor.from_local(local, device_mesh(FOUR), [Replicate()], run_check=False)
        with pytest.raises(RedistributionError, match="out (has a part of shape|is )"):
            moved(tensor, WHOLE, out=out)


def _returns_the_source_of_an_equal_layout() -> None:
    """One rank alone succeeds: a collective would hang."""
    tensors = {"weight": source(Move(SHARDED, WHOLE, (5, 3)), 0)}
    if dist.get_rank() == 1:
        results = redistribute_state_dict(tensors, {"weight": SHARDED})
        assert results["weight"] is tensors["weight"]
        unlisted = redistribute_state_dict(tensors, {})
        assert unlisted["weight"] is tensors["weight"]
    dist.barrier()


def _shards_a_replicated_tensor_locally() -> None:
    """One rank alone succeeds: a collective would hang."""
    move = Move(WHOLE, SHARDED, (5, 3))
    tensor = source(move, 0)
    if dist.get_rank() == 2:
        result = moved(tensor, SHARDED)
        assert result.to_local().shape == (1, 3)
    dist.barrier()


def _needs_no_rank_outside_of_both_meshes() -> None:
    """Ranks 2 and 3 finish before ranks 0 and 1 begin."""
    one, other = HolderMesh.ranks(2), HolderMesh((2,), (1, 0))
    move = Move(Layout(one, [Shard(0)]), Layout(other, [Shard(0)]), (5, 3))
    tensor, mesh, rank = source(move, 0), device_mesh(other), dist.get_rank()
    token = torch.zeros(1)
    if rank < 2:
        dist.recv(token, src=rank + 2)
    result = moved(tensor, move.dst, mesh=mesh)
    if rank >= 2:
        dist.send(token, dst=rank - 2)
        assert result.to_local().numel() == 0
    assert_arrived(move, 0, result)


def _requires_the_mesh_of_the_destination() -> None:
    """The error names what is missing."""
    other = HolderMesh.ranks(2)
    device_mesh(other)
    tensor = source(Move(WHOLE, WHOLE, (5, 3)), 0)
    layouts = {"weight": Layout(other, [Shard(0)])}
    if dist.get_rank() < 2:
        with pytest.raises(LayoutError, match="weight goes to .*no DeviceMesh of these ranks"):
            redistribute_state_dict({"weight": tensor}, layouts)
    else:
        assert not redistribute_state_dict({"weight": tensor}, layouts)
    with pytest.raises(LayoutError, match="neither a tensor of this rank nor described"):
        redistribute_state_dict({}, {"weight": WHOLE})


def _aligns_no_gradient_if_there_is_none() -> None:
    """No rank waits for another if no gradient flows."""
    parameter = nn.Parameter(source(Move(SHARDED, WHOLE, (5, 3)), 0))
    if dist.get_rank() == 0:
        assert align_gradient(parameter) is None and parameter.grad is None
    dist.barrier()


def _moves_a_scalar_to_another_mesh_and_back() -> None:
    """A scalar keeps its value and shape."""
    here, there = HolderMesh.ranks(2), HolderMesh((2,), (2, 3))
    tensor = source(Move(Layout(here, [Replicate()]), WHOLE, ()), 0)
    other = moved(tensor, Layout(there, [Replicate()]), mesh=device_mesh(there))
    back = moved(other, Layout(here, [Replicate()]), mesh=device_mesh(here))
    assert tensor.shape == other.shape == back.shape == ()
    if dist.get_rank() < 2:
        assert torch.equal(back.to_local(), tensor.to_local())


def _rejects_a_wrong_local_shape() -> None:
    """A shard that is larger than in its layout is an error on every rank."""
    mesh = device_mesh(FOUR)
    local = torch.ones(2, 4)
    tensor = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=local.shape, stride=local.stride()
    )
    # With collectives of the backend as well.
    options = ExchangeOptions(costs=default_costs("cuda"))
    summed = DTensor.from_local(
        local, mesh, [Partial()], run_check=False, shape=torch.Size((4, 4)), stride=(4, 1)
    )
    for move in (
        lambda: moved(tensor, WHOLE),
        lambda: moved(tensor, WHOLE, options=options),
        lambda: moved(summed, WHOLE, options=options),
    ):
        with pytest.raises(LayoutError, match=r"has a part of shape \(2, 4\), and .* gives it"):
            move()
    dist.barrier()


def _supports_negative_dims() -> None:
    """Shard(-1) is the last dim, and Partial("prod") a product."""
    tensor = source(Move(SHARDED, WHOLE, (5, 8)), 0)
    result = moved(tensor, Layout(FOUR, [Shard(-1)]))
    assert result.placements == (Shard(1),) and result.to_local().shape == (5, 2)
    with pytest.raises(LayoutError, match="-3.* of a tensor of 2 dims. Use -2 to 1"):
        moved(tensor, Layout(FOUR, [Shard(-3)]))
    rank = dist.get_rank()
    factors = DTensor.from_local(
        torch.full((3,), float(rank + 1)), device_mesh(FOUR), [Partial("prod")], run_check=False
    )
    assert moved(factors, WHOLE).to_local().tolist() == [24.0] * 3


def _supports_any_strides() -> None:
    """Shards may be transposed, strided or conjugated."""
    for dtype in (torch.float32, torch.float16, torch.complex64):
        wide = torch.arange(24 * 20).reshape(24, 20).to(dtype) + dist.get_rank()
        wide = wide * (1 + 2j) if dtype.is_complex else wide
        for local in (wide.t(), wide[::2], wide[:, ::3], wide[:, 5:].t(), wide.conj()):
            dense = local.resolve_conj().clone(memory_format=torch.contiguous_format)
            for transport in ("shared_memory", "collective"):
                options = ExchangeOptions(transport=transport)
                expected = moved(_stacked(dense), WHOLE, options=options).to_local()
                assert torch.equal(expected.chunk(4)[dist.get_rank()], dense)
                result = moved(_stacked(local), WHOLE, options=options)
                assert torch.equal(result.to_local(), expected)
                # With a tensor of bytes in the same exchange, an element is several words.
                tensors = {"part": _stacked(local), "bytes": _stacked(torch.zeros(8).byte())}
                layouts = dict.fromkeys(tensors, WHOLE)
                both = redistribute_state_dict(tensors, layouts, options=options)
                assert torch.equal(both["part"].to_local(), expected)


def _averages_16_bit_floats() -> None:
    """An average neither overflows nor is rounded more than once."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for transport in ("shared_memory", "collective"):
        for dtype, scale in ((torch.float16, 6e4), (torch.bfloat16, 1.0)):
            local = (torch.rand(1000, 70, generator=generator) * scale).to(dtype)
            exact = local.double()
            dist.all_reduce(exact)
            tensor = DTensor.from_local(local, device_mesh(FOUR), [Partial("avg")])
            for dst in (WHOLE, SHARDED):
                result = moved(tensor, dst, options=ExchangeOptions(transport=transport))
                whole = moved(result, WHOLE).to_local()
                assert torch.equal(whole, (exact.float() / 4).to(dtype)), (dtype, dst)
    # A partial destination is summed and scaled afterwards.
    tensor = DTensor.from_local(torch.full((4,), 2.0), device_mesh(FOUR), [Partial("avg")])
    half = HolderMesh.ranks(2)
    result = moved(tensor, Layout(half, [Partial()]), mesh=device_mesh(half))
    total = result.to_local().clone() if rank < 2 else torch.zeros(4)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 4


def _stacked(local: torch.Tensor) -> DTensor:
    """The shards of all ranks, stacked."""
    shape = torch.Size((local.shape[0] * 4, *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, device_mesh(FOUR), [Shard(0)], run_check=False, shape=shape, stride=stride
    )


@pytest.mark.parametrize(
    "case",
    [
        _fills_out,
        _rejects_an_unsuitable_out,
        _returns_the_source_of_an_equal_layout,
        _shards_a_replicated_tensor_locally,
        _needs_no_rank_outside_of_both_meshes,
        _requires_the_mesh_of_the_destination,
        _aligns_no_gradient_if_there_is_none,
        _moves_a_scalar_to_another_mesh_and_back,
        _rejects_a_wrong_local_shape,
        _supports_negative_dims,
        _supports_any_strides,
        _averages_16_bit_floats,
    ],
    ids=lambda case: case.__name__[1:],
)
def test_redistribute(case: Callable[[], None], pools: Pools) -> None:
    pools(4).run(case)
