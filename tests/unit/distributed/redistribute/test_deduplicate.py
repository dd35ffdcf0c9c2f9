"""Every element gets one of its holders, and the work is divided evenly."""

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from tests.redistribution.layouts import all_layouts
from tests.redistribution.reference import elements_of
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, plan
from torchtitan_lite.distributed.redistribute.execution.read_plan import deduplicate, element_range
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.torch_compat import is_strided_shard, strided_shard

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS = [
    layout
    for mesh in (HolderMesh.ranks(4), HolderMesh.ranks(2, 2), HolderMesh.ranks(2, 1, 3))
    for layout in all_layouts(mesh, 2)
    if layout.reduce_op is None and not any(map(is_strided_shard, layout.placements))
]


@settings(max_examples=200)
@given(
    st.sampled_from(LAYOUTS), st.tuples(st.integers(0, 80), st.integers(0, 9)), st.integers(0, 9)
)
def test_every_element_has_one_of_its_holders(
    layout: Layout, shape: tuple[int, int], number: int
) -> None:
    once = deduplicate(layout, shape, number)
    held = sum(prod(once.local_shape(shape, holder)) for holder in once.mesh.holders)
    assert held == prod(shape)
    assert plan(layout, once, shape, torch.float32).moved_bytes == 0
    full = np.arange(prod(shape)).reshape(shape)
    for holder in once.mesh.holders:
        mine, part = (_part(some, full, holder) for some in (layout, once))
        start, stop = element_range(layout, once, shape, holder)
        assert stop - start == part.size
        assert np.array_equal(mine.reshape(-1)[start:stop], part.reshape(-1))


def _part(layout: Layout, whole: np.ndarray, holder: Holder) -> np.ndarray:
    at = layout.mesh.coordinate(holder)
    assert at is not None
    return whole.reshape(-1)[elements_of(layout, whole.shape, at)]


@pytest.mark.parametrize("shape", [(256, 64), (4096,)])
def test_holders_of_a_part_divide_it(shape: tuple[int, ...]) -> None:
    layout = Layout(HolderMesh.ranks(2, 2), [R, S0])
    once = deduplicate(layout, shape, 0)
    assert {once.local_shape(shape, rank)[0] for rank in range(4)} == {shape[0] // 4}


def test_small_tensors_are_assigned_round_robin() -> None:
    layout = Layout(HolderMesh.ranks(2, 2), [R, S0])
    owners = [deduplicate(layout, (3, 5), number).mesh.holders for number in range(4)]
    assert owners == [(0, 1), (2, 3), (0, 1), (2, 3)]
    scalar = Layout(HolderMesh.ranks(2, 2), [R, R])
    assert [deduplicate(scalar, (), number).mesh.holders for number in range(4)] == [
        (0,), (1,), (2,), (3,),
    ]  # fmt: skip


def test_replicas_of_a_strided_shard_do_not_divide_it() -> None:
    layout = Layout(HolderMesh.ranks(2, 2), [R, strided_shard(0, 2)])
    once = deduplicate(layout, (4096, 2), 1)
    sizes = [prod(once.local_shape((4096, 2), rank)) for rank in range(4)]
    assert sorted(sizes) == [0, 0, 4096, 4096]
