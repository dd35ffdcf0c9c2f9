"""Random plans, executed element by element: exact results, minimal movement."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.redistribution.bound import fewest_elements
from tests.redistribution.layouts import OPS, layouts, meshes, shapes
from tests.redistribution.reference import replay
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, plan
from torchtitan_lite.distributed.redistribute.planning.cost import default_costs
from torchtitan_lite.distributed.torch_compat import strided_shard

# Without a database the examples are new in each run; derandomized they are the same in each run.
PLANS = settings(
    deadline=None,
    derandomize=True,
    max_examples=100,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# (holders of the source, holders of the destination)
WORLDS = {
    "shrinks from 4 to 2": (range(4), range(2)),
    "grows from 2 to 4": (range(2), range(4)),
    "shrinks from 8 to 4": (range(8), range(4)),
    "grows from 2 to 3": (range(2), range(3)),
    "moves elsewhere": (range(4), range(4, 10)),
    "moves half elsewhere": (range(4), range(2, 6)),
}


@PLANS
@given(st.data())
def test_on_one_mesh(data: st.DataObject) -> None:
    mesh = data.draw(meshes(range(16)))
    _check(data, mesh, mesh)


@PLANS
@given(st.data())
def test_on_one_mesh_with_holders_in_another_order(data: st.DataObject) -> None:
    mesh = data.draw(meshes(range(12)))
    turned = HolderMesh(mesh.shape, tuple(data.draw(st.permutations(mesh.holders))))
    _check(data, mesh, turned)


@PLANS
@given(st.data())
def test_between_meshes_with_common_holders(data: st.DataObject) -> None:
    _check(data, data.draw(meshes(range(12))), data.draw(meshes(range(6, 18))))


@PLANS
@given(st.data(), st.sampled_from(sorted(WORLDS)))
def test_when_the_holders(data: st.DataObject, world: str) -> None:
    before, after = WORLDS[world]
    _check(data, _mesh_of_all(data, before), _mesh_of_all(data, after))


def _mesh_of_all(data: st.DataObject, holders: range) -> HolderMesh:
    count = len(holders)
    factors = [n for n in (2, 3) if count % n == 0 and n < count]
    shapes = [(count,), (1, count), (count, 1), *((n, count // n) for n in factors)]
    return HolderMesh(data.draw(st.sampled_from(shapes)), tuple(holders))


def _check(data: st.DataObject, one: HolderMesh, other: HolderMesh) -> None:
    shape, op = data.draw(shapes()), data.draw(st.sampled_from(OPS))
    src = data.draw(layouts(one, len(shape), op, averages=True))
    dst = data.draw(layouts(other, len(shape), op, averages=True))
    check_exact(src, dst, shape, data.draw(st.integers(0, 1 << 30)))


def check_exact(src: Layout, dst: Layout, shape: tuple[int, ...], seed: int) -> None:
    """Check that the plan gives the correct result and moves the minimum number of elements."""
    made = plan(src, dst, shape, torch.float64)
    moved = replay(made, np.random.default_rng(seed))
    assert made.moved_bytes == moved * 8
    assert moved == fewest_elements(src, dst, shape)


@pytest.mark.parametrize("shape", [(4,), (5, 3), (1 << 20,)])
def test_a_strided_shard_over_one_holder_is_a_plain_shard(shape: tuple[int, ...]) -> None:
    mesh = HolderMesh((1, 2), (0, 1))
    src = Layout(mesh, [strided_shard(0, 3), Partial()])
    assert src == Layout(mesh, [Shard(0), Partial()])
    dst = Layout(mesh, [Replicate(), Shard(0)])
    made = plan(src, dst, shape, torch.float32, costs=default_costs("cuda"))
    assert made.dst == dst
    assert made.moved_bytes >= plan(src, dst, shape, torch.float32).moved_bytes


def test_partial_sums_join_an_existing_reduction() -> None:
    src = Layout(HolderMesh((4, 2), tuple(range(8))), [Partial(), Replicate()])
    dst = Layout(HolderMesh((2, 2), (0, 1, 6, 7)), [Partial(), Replicate()])
    check_exact(src, dst, (8,), 0)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        # No common holder, and contributions that cannot be divided evenly.
        (HolderMesh((2, 1), (2, 4)), HolderMesh((3, 1), (11, 0, 9))),
        (HolderMesh((4, 1), (11, 5, 3, 7)), HolderMesh((3, 1), (10, 9, 2))),
        # Owners of several groups, and groups that are better merged.
        (
            HolderMesh((4, 3), (1, 4, 2, 3, 5, 0, 8, 7, 9, 11, 6, 10)),
            HolderMesh((2, 2), (4, 8, 9, 0)),
        ),
        (HolderMesh((2, 2), (4, 1, 0, 6)), HolderMesh((2, 2), (8, 11, 5, 9))),
    ],
)
def test_partial_sums_become_others(src: HolderMesh, dst: HolderMesh) -> None:
    kinds = [Partial(), Replicate()]
    check_exact(Layout(src, kinds), Layout(dst, kinds), (6,), 0)
