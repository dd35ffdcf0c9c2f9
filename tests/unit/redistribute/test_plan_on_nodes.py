"""Plans for ranks on several nodes: exact with relays, and what a node needs crosses once."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tests.redistribution.reference import replay
from torchtitan_lite.redistribute import HolderMesh, Layout, Plan, plan
from torchtitan_lite.redistribute.collectives import Collective
from torchtitan_lite.redistribute.cost import CPU, CUDA

_PLACEMENTS: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial()]


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4])
def test_every_pair_is_exact_with_relays(ranks_per_node: int) -> None:
    rng = np.random.default_rng(ranks_per_node)
    mesh = HolderMesh.ranks(2, 4)
    pairs = itertools.product(itertools.product(_PLACEMENTS, repeat=2), repeat=2)
    for given, wanted in pairs:
        found = _on_nodes(Layout(mesh, given), Layout(mesh, wanted), (7, 9), ranks_per_node)
        assert replay(found, rng) * 4 == found.moved_bytes


def test_other_meshes_are_exact_with_relays() -> None:
    rng = np.random.default_rng(0)
    src = Layout(HolderMesh.ranks(3), [Shard(0)])
    dst = Layout(HolderMesh.ranks(2, 4, first=2), [Shard(1), Replicate()])
    found = _on_nodes(src, dst, (50, 30), 4)
    assert replay(found, rng) * 4 == found.moved_bytes


def test_what_a_node_needs_crosses_to_it_once() -> None:
    mesh = HolderMesh.ranks(8)
    shape = (4096, 64)
    gathered = _on_nodes(Layout(mesh, [Shard(0)]), Layout(mesh, [Replicate()]), shape, 4)
    # Each node lacks the half that the other has.
    assert _crossing(gathered) == 4096 * 64
    direct = plan(gathered.src, gathered.dst, shape, torch.float32)
    assert _crossing(direct) == 4 * 4096 * 64
    assert direct.moved_bytes == gathered.moved_bytes


def test_what_a_node_has_comes_from_it() -> None:
    mesh = HolderMesh.ranks(2, 4)
    src, dst = Layout(mesh, [Replicate(), Shard(0)]), Layout(mesh, [Replicate(), Shard(1)])
    assert _crossing(_on_nodes(src, dst, (64, 64), 4)) == 0


@pytest.mark.parametrize("costs", [CPU.with_ranks_per_node(4), CUDA, CUDA.with_ranks_per_node(4)])
def test_legs_are_taken_only_where_they_are_predicted_to_be_faster(costs) -> None:
    mesh, with_legs = HolderMesh.ranks(2, 4), 0
    for given, wanted in itertools.product(itertools.product(_PLACEMENTS, repeat=2), repeat=2):
        src, dst = Layout(mesh, given), Layout(mesh, wanted)
        found = plan(src, dst, (512, 512), torch.float32, costs=costs)
        straight = plan(src, dst, (512, 512), torch.float32, costs=costs, single_exchange=True)
        assert found.predicted_s <= straight.predicted_s * (1 + 1e-9)
        assert not straight.steps
        if found.steps:
            ends = [step.src for step in found.steps], [step.dst for step in found.steps]
            assert ends[0][0] == src and ends[1][-1] == dst
            assert ends[0][1:] == ends[1][:-1]
            with_legs += 1
    assert with_legs > 20


def test_one_all_reduce_takes_the_place_of_two_rounds_where_it_begins_sooner() -> None:
    mesh = HolderMesh.ranks(8)
    found = plan(
        Layout(mesh, [Partial()]), Layout(mesh, [Replicate()]), (64,), torch.float32, costs=CUDA
    )
    assert [step.kind for step in found.steps if isinstance(step, Collective)] == ["all_reduce"]


def test_no_layout_in_between_is_larger_than_allowed() -> None:
    mesh = HolderMesh.ranks(2, 4)
    src, dst = Layout(mesh, [Partial(), Partial()]), Layout(mesh, [Shard(0), Replicate()])
    costs = CUDA.with_ranks_per_node(4)
    free = plan(src, dst, (512, 512), torch.float32, costs=costs)
    assert free.intermediate_bytes > 0
    found = plan(
        src,
        dst,
        (512, 512),
        torch.float32,
        costs=costs,
        max_intermediate_bytes=free.intermediate_bytes - 1,
    )
    assert found.intermediate_bytes < free.intermediate_bytes
    assert found.predicted_s >= free.predicted_s


def _on_nodes(src: Layout, dst: Layout, shape: tuple[int, ...], ranks_per_node: int) -> Plan:
    costs = CPU.with_ranks_per_node(ranks_per_node)
    return plan(src, dst, shape, torch.float32, costs=costs, objective="bytes")


def _crossing(found: Plan) -> int:
    """Elements that go to another node, of four ranks each."""
    crossing: Counter[bool] = Counter()
    for holder in found.src.mesh.holders:
        assert isinstance(holder, int)
        for part in found.transfers(holder):
            for piece in part.sends:
                assert isinstance(piece.peer, int)
                crossing[piece.peer // 4 != holder // 4] += piece.stop - piece.start
    return crossing[True]
