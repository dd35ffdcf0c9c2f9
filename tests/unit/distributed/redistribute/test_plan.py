"""Decisions of a plan: relays, shards that are kept, and reductions."""

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, Plan, plan
from torchtitan_lite.distributed.redistribute.planning.cost import CPU, Costs, Link

R, S0, P, AVG = Replicate(), Shard(0), Partial(), Partial("avg")
PAIR, SQUARE = HolderMesh.ranks(2), HolderMesh.ranks(2, 2)
EIGHT = HolderMesh.ranks(8)
# The second half of dim 0 on the first node, and the first half on the second one.
CROSSED = Layout(HolderMesh((2,), (4, 0)), [S0])
# Node 1 has three replicas of the second shard.
UNEVEN = Layout(HolderMesh((2, 3), (0, 1, 4, 5, 6, 7)), [S0, R])
# By shard, contribution and replica; node 1 has all replicas of contribution 1 to shard 1.
WITH_PARTIAL = Layout(HolderMesh((2, 2, 3), (0, 1, 8, 2, 9, 12, 3, 7, 10, 4, 5, 6)), [S0, P, R])


@pytest.mark.parametrize(
    ("src", "dst", "receivers", "lacking"),
    [
        (Layout(EIGHT, [S0]), Layout(EIGHT, [R]), 4, 4 * 6),
        (Layout(HolderMesh.ranks(4), [S0]), Layout(HolderMesh.ranks(4, first=4), [R]), 4, 8 * 6),
        (CROSSED, UNEVEN, 3, 4 * 6),
        (Layout(HolderMesh.ranks(2), [S0]), Layout(HolderMesh.ranks(2, first=4), [R]), 2, 8 * 6),
        (CROSSED, WITH_PARTIAL, 3, 4 * 6),
        # Of contribution 0 instead.
        (CROSSED, WITH_PARTIAL.with_holders((0, 1, 8, 2, 9, 12, 4, 5, 6, 3, 7, 10)), 3, 4 * 6),
        # Half of the owners of the sums are on the node.
        (Layout(EIGHT, [P]), Layout(EIGHT, [R]), 4, 4 * 6),
    ],
)
def test_relays_are_used_if_they_save_more_time_than_they_take(
    src: Layout, dst: Layout, receivers: int, lacking: int
) -> None:
    saved_bytes = lacking * 8 * (1 - 1 / receivers)
    # Saves 20 s between nodes; forwarding takes a second, 2 s per message, and a round.
    round_s = 20 - 1 - 2 * (receivers - 1)

    def rounds(round_s: float) -> int:
        costs = Costs(
            round_s=round_s,
            within=Link(latency_s=2.0, bytes_per_s=saved_bytes),
            between=Link(latency_s=0.0, bytes_per_s=saved_bytes / 20),
            ranks_per_node=4,
        )
        return len(plan(src, dst, (8, 6), torch.float64, costs=costs).rounds)

    direct = len(plan(src, dst, (8, 6), torch.float64).rounds)
    assert rounds(round_s - 1e-6) == direct + 1
    assert rounds(round_s + 1e-6) == direct
    if receivers != 3:
        assert rounds(round_s) == direct


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        # The node with most receivers has what they need.
        (Layout(HolderMesh((2,), (0, 4)), [S0]), UNEVEN),
        (Layout(HolderMesh.ranks(4), [R]), Layout(HolderMesh.ranks(8, first=4), [S0])),
        (Layout(HolderMesh.ranks(4), [S0]), Layout(HolderMesh.ranks(1, first=4), [R])),
        (Layout(HolderMesh.ranks(4), [S0]), Layout(HolderMesh((2,), (4, 8)), [R])),
    ],
)
def test_no_relays_where_a_node_would_get_no_less(src: Layout, dst: Layout) -> None:
    free = Link(latency_s=0.0, bytes_per_s=1e30)
    slow = Link(latency_s=0.0, bytes_per_s=1e-30)
    costs = Costs(round_s=0.0, within=free, between=slow, ranks_per_node=4)
    assert plan(src, dst, (8, 6), torch.int8, costs=costs).rounds == ("move",)


def test_ranks_of_one_node_exchange_as_without_nodes() -> None:
    src = Layout(HolderMesh.ranks(2, first=4), [R])
    for count in (1, 2):
        dst = Layout(HolderMesh.ranks(count, first=6), [R])
        on_nodes, without = (
            plan(src, dst, (8,), torch.int8, costs=CPU.with_ranks_per_node(n)) for n in (4, 0)
        )
        for rank in range(4, 8):
            assert on_nodes.transfers(rank) == without.transfers(rank)


def _plan(
    src: list[Placement],
    dst: list[Placement],
    mesh: HolderMesh = PAIR,
    shape: tuple[int, ...] = (4,),
) -> Plan:
    return plan(Layout(mesh, src), Layout(mesh, dst), shape, torch.float32)


def test_a_shard_is_kept_if_nothing_in_it_changes() -> None:
    def kept(found: Plan) -> list[bool]:
        return [found.keeps_shard(rank) for rank in (0, 1)]

    assert kept(_plan([S0], [S0])) == [True, True]
    assert kept(_plan([R], [AVG])) == [True, True]
    # Nothing is sent, but half of it, or another multiple, is needed, or nothing but zeros.
    assert kept(_plan([R], [S0])) == [False, False]
    assert kept(_plan([AVG], [P])) == [False, False]
    assert kept(_plan([R], [P])) == [True, False]
    # What is sent is not also a result.
    alone = Layout(HolderMesh.ranks(1), [R])
    assert kept(plan(alone, Layout(PAIR, [R]), (4,), torch.float32)) == [False, False]


def test_an_average_of_equal_values_is_not_scaled() -> None:
    found = _plan([R], [AVG], shape=(1,))
    assert (found.factor, found.moved_bytes, found.op) == (1.0, 0, "sum")
    assert all(len(found.transfers(rank)[0].copies) == 1 for rank in (0, 1))
    # A single element that would be sent: the first contribution is all of the sum instead.
    other = Layout(HolderMesh((2,), (0, 2)), [AVG])
    found = plan(Layout(PAIR, [R]), other, (1,), torch.float32)
    assert (found.factor, found.moved_bytes) == (2.0, 0)
    assert _plan([AVG, R], [R, AVG], SQUARE).factor == 1.0
    assert _plan([AVG], [P]).factor == 0.5


def test_no_replica_owns_nothing_of_a_sum() -> None:
    found = _plan([P], [R], HolderMesh.ranks(3), (2,))
    parts = [part for rank in range(3) for part in found.transfers(rank)]
    pieces = [piece for part in parts for some in part for piece in some]
    assert pieces and all(piece.start < piece.stop for piece in pieces)


def test_results_are_scaled_in_a_reduction_of_all_elements() -> None:
    assert _plan([AVG], [R]).is_scaled_in_reduction
    assert _plan([AVG], [S0]).is_scaled_in_reduction
    assert not _plan([S0], [R]).is_scaled_in_reduction
    assert not _plan([AVG, AVG], [AVG, R], SQUARE).is_scaled_in_reduction
    assert not _plan([R], [AVG]).is_scaled_in_reduction


@pytest.mark.parametrize(
    ("src", "dst", "dtype", "op"),
    [
        (P, R, torch.int64, "sum"),
        (P, R, torch.complex64, "sum"),
        (AVG, R, torch.complex64, "sum"),
        (R, P, torch.bool, "sum"),
        (R, S0, torch.bool, "sum"),
        (Partial("max"), R, torch.int64, "max"),
        (R, Partial("min"), torch.float16, "min"),
    ],
)
def test_reductions_of_a_dtype(src: Placement, dst: Placement, dtype: torch.dtype, op: str) -> None:
    assert plan(Layout(PAIR, [src]), Layout(PAIR, [dst]), (4,), dtype).op == op
