"""Plans for ranks on several nodes: exact with relays, and each element enters a node once."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tests.redistribution.reference import replay
from torchtitan_lite.redistribute import HolderMesh, Layout, Plan, plan
from torchtitan_lite.redistribute.collective_search import Collective
from torchtitan_lite.redistribute.cost import CPU, CUDA

_PLACEMENTS: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial()]


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4])
def test_every_pair_is_exact_with_relays(ranks_per_node: int) -> None:
    rng = np.random.default_rng(ranks_per_node)
    mesh = HolderMesh.ranks(2, 4)
    pairs = itertools.product(itertools.product(_PLACEMENTS, repeat=2), repeat=2)
    for source, expected in pairs:
        actual = _on_nodes(Layout(mesh, source), Layout(mesh, expected), (7, 9), ranks_per_node)
        assert replay(actual, rng) * 4 == actual.moved_bytes


def test_other_meshes_are_exact_with_relays() -> None:
    rng = np.random.default_rng(0)
    src = Layout(HolderMesh.ranks(3), [Shard(0)])
    dst = Layout(HolderMesh.ranks(2, 4, first=2), [Shard(1), Replicate()])
    actual = _on_nodes(src, dst, (50, 30), 4)
    assert replay(actual, rng) * 4 == actual.moved_bytes


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


@pytest.mark.parametrize("costs", [CPU.with_ranks_per_node(4), CUDA, CUDA.with_ranks_per_node(4)])
def test_multi_step_plans_are_used_only_if_predicted_to_be_faster(costs) -> None:
    mesh, with_legs = HolderMesh.ranks(2, 4), 0
    for source, expected in itertools.product(itertools.product(_PLACEMENTS, repeat=2), repeat=2):
        src, dst = Layout(mesh, source), Layout(mesh, expected)
        actual = plan(src, dst, (512, 512), torch.float32, costs=costs)
        direct = plan(src, dst, (512, 512), torch.float32, costs=costs, single_exchange=True)
        assert actual.predicted_s <= direct.predicted_s * (1 + 1e-9)
        assert not direct.steps
        if actual.steps:
            ends = [step.src for step in actual.steps], [step.dst for step in actual.steps]
            assert ends[0][0] == src and ends[1][-1] == dst
            assert ends[0][1:] == ends[1][:-1]
            with_legs += 1
    assert with_legs > 20


def test_one_all_reduce_replaces_two_rounds_if_it_starts_earlier() -> None:
    mesh = HolderMesh.ranks(8)
    actual = plan(
        Layout(mesh, [Partial()]), Layout(mesh, [Replicate()]), (64,), torch.float32, costs=CUDA
    )
    assert [step.kind for step in actual.steps if isinstance(step, Collective)] == ["all_reduce"]


def test_no_intermediate_layout_exceeds_the_limit() -> None:
    mesh = HolderMesh.ranks(2, 4)
    src, dst = Layout(mesh, [Partial(), Partial()]), Layout(mesh, [Shard(0), Replicate()])
    costs = CUDA.with_ranks_per_node(4)
    free = plan(src, dst, (512, 512), torch.float32, costs=costs)
    assert free.intermediate_bytes > 0
    actual = plan(
        src,
        dst,
        (512, 512),
        torch.float32,
        costs=costs,
        max_intermediate_bytes=free.intermediate_bytes - 1,
    )
    assert actual.intermediate_bytes < free.intermediate_bytes
    assert actual.predicted_s >= free.predicted_s


def _on_nodes(src: Layout, dst: Layout, shape: tuple[int, ...], ranks_per_node: int) -> Plan:
    costs = CPU.with_ranks_per_node(ranks_per_node)
    return plan(src, dst, shape, torch.float32, costs=costs, objective="bytes")


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
