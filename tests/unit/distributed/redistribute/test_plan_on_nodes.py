"""Plans for ranks on several nodes: exact with relays, and each element enters a node once."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tests.redistribution.reference import replay
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, Plan, plan
from torchtitan_lite.distributed.redistribute.planning.cost import CPU, CUDA, Costs, Link
from torchtitan_lite.distributed.redistribute.planning.placements import Nodes

_PLACEMENTS: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial()]


@pytest.mark.parametrize(
    "ranks_per_node", [*(pytest.param(n, marks=pytest.mark.matrix) for n in (1, 2, 4)), 3]
)
def test_every_pair_is_exact_with_relays(ranks_per_node: int) -> None:
    rng = np.random.default_rng(ranks_per_node)
    mesh = HolderMesh.ranks(2, 4)
    pairs = itertools.product(itertools.product(_PLACEMENTS, repeat=2), repeat=2)
    for source, expected in pairs:
        actual = _on_nodes(Layout(mesh, source), Layout(mesh, expected), (7, 9), ranks_per_node)
        assert replay(actual, rng) * 4 == actual.moved_bytes


def test_shards_forwarded_in_turn_are_exact() -> None:
    rng = np.random.default_rng(0)
    mesh = HolderMesh.ranks(4, 8)
    for source, expected in (
        ([Shard(0), Shard(0)], [Replicate(), Replicate()]),
        ([Shard(0), Shard(1)], [Replicate(), Replicate()]),
        ([Partial(), Partial()], [Replicate(), Replicate()]),
        ([Partial(), Shard(0)], [Shard(1), Replicate()]),
    ):
        actual = _on_nodes(Layout(mesh, source), Layout(mesh, expected), (130, 70), 4)
        assert replay(actual, rng) * 4 == actual.moved_bytes


def test_other_meshes_are_exact_with_relays() -> None:
    rng = np.random.default_rng(0)
    src = Layout(HolderMesh.ranks(3), [Shard(0)])
    dst = Layout(HolderMesh.ranks(2, 4, first=2), [Shard(1), Replicate()])
    actual = _on_nodes(src, dst, (50, 30), 4)
    assert replay(actual, rng) * 4 == actual.moved_bytes


def test_nodes_of_ranks_and_of_files() -> None:
    nodes, ranks = Nodes(4), HolderMesh.ranks(8, first=4)
    of_ranks, of_others = nodes.node_indices(ranks, HolderMesh.ranks(5))
    assert of_ranks.tolist() == [1] * 4 + [2] * 4
    assert of_others.tolist() == [0] * 4 + [1]
    files = HolderMesh((2,), ("a", "b"), ("dp_shard",))
    for pair in ((ranks, files), (files, ranks)):
        numbers = dict(zip(pair, nodes.node_indices(*pair), strict=True))
        assert len(set(numbers[ranks].tolist())) == 2
        assert len({*numbers[files].tolist(), *numbers[ranks].tolist()}) == 4


def test_each_element_enters_a_node_once() -> None:
    mesh = HolderMesh.ranks(8)
    shape = (4096, 64)
    gathered = _on_nodes(Layout(mesh, [Shard(0)]), Layout(mesh, [Replicate()]), shape, 4)
    # Each node lacks the half that the other has.
    assert _elements_between_nodes(gathered) == 4096 * 64
    direct = plan(gathered.src, gathered.dst, shape, torch.float32)
    assert _elements_between_nodes(direct) == 4 * 4096 * 64
    assert direct.moved_bytes == gathered.moved_bytes


def test_elements_on_a_node_come_from_it() -> None:
    mesh = HolderMesh.ranks(2, 4)
    src, dst = Layout(mesh, [Replicate(), Shard(0)]), Layout(mesh, [Replicate(), Shard(1)])
    assert _elements_between_nodes(_on_nodes(src, dst, (64, 64), 4)) == 0


@pytest.mark.parametrize("costs", [CPU, CUDA])
@pytest.mark.parametrize("shape", [(32, 32), (4096, 4096)])
def test_relays_are_used_where_they_save_more_than_a_round(
    costs: Costs, shape: tuple[int, ...]
) -> None:
    costs, mesh = costs.with_ranks_per_node(4), HolderMesh.ranks(8)
    src, dst = Layout(mesh, [Shard(0)]), Layout(mesh, [Replicate()])
    actual = plan(src, dst, shape, torch.float32, costs=costs)
    assert actual.rounds == (("move", "broadcast") if shape[0] == 4096 else ("move",))


@pytest.mark.parametrize(("first", "rounds"), [(0, ("move", "broadcast")), (4, ("move",))])
def test_relays_are_used_if_the_node_with_most_receivers_lacks_data(
    first: int, rounds: tuple[str, ...]
) -> None:
    """Two of the receivers are on the first node, four on the second."""
    src = Layout(HolderMesh.ranks(4, first=first), [Shard(0)])
    dst = Layout(HolderMesh.ranks(6, first=2), [Replicate()])
    costs = CPU.with_ranks_per_node(4)
    assert plan(src, dst, (4096, 4096), torch.float32, costs=costs).rounds == rounds


def test_many_small_shards_are_forwarded_whole_and_evenly() -> None:
    mesh = HolderMesh.ranks(128)
    src, dst = Layout(mesh, [Shard(0)]), Layout(mesh, [Replicate()])
    actual = _on_nodes(src, dst, (4096, 4), 8)
    first, second = actual.transfers(3)
    carried = [piece for piece in first.receives if piece.peer // 8]  # pyright: ignore[reportOperatorIssue]
    assert len(carried) == 120 // 8
    assert len(second.sends) == 7 * len(carried)
    assert len(second.receives) == 120 - len(carried)


def _on_nodes(src: Layout, dst: Layout, shape: tuple[int, ...], ranks_per_node: int) -> Plan:
    """Plan with relays wherever a node has several receivers: its network is slow."""
    slow = replace(CPU, round_s=0.0, between=Link(latency_s=0.0, bytes_per_s=1.0))
    costs = slow.with_ranks_per_node(ranks_per_node)
    return plan(src, dst, shape, torch.float32, costs=costs)


def _elements_between_nodes(found: Plan) -> int:
    """Return the number of elements sent to another node, of four ranks each."""
    crossing: Counter[bool] = Counter()
    for holder in found.src.mesh.holders:
        assert isinstance(holder, int)
        for part in found.transfers(holder):
            for piece in part.sends:
                assert isinstance(piece.peer, int)
                crossing[piece.peer // 4 != holder // 4] += piece.stop - piece.start
    return crossing[True]
