"""The layout of an element of a stack has the boxes of the stack's layout."""

import itertools

import pytest
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_lite.core.errors import LayoutError
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout
from torchtitan_lite.distributed.torch_compat import strided_shard

SHAPES = [(5, 4, 3), (2, 7, 6), (12, 1, 9)]
PLACEMENTS: list[Placement] = [Replicate(), Shard(0), Shard(1), Shard(2)]


def check(layout: Layout, shape: tuple[int, ...]) -> None:
    for index in range(shape[0]):
        element, local_index = layout.of_element(shape, index)
        for holder in layout.mesh.holders:
            boxes = layout.boxes(shape, holder)
            # In the order of the storage, once each.
            held = dict.fromkeys(
                row for box in boxes for row in range(box.offset[0], box.offset[0] + box.size[0])
            )
            expected = [
                (box.offset[1:], box.size[1:])
                for box in boxes
                if box.offset[0] <= index < box.offset[0] + box.size[0]
            ]
            found = [(box.offset, box.size) for box in element.boxes(shape[1:], holder)]
            assert found == expected, (str(layout), shape, index, holder)
            assert not found or list(held).index(index) == local_index


@pytest.mark.parametrize("shape", SHAPES)
def test_every_pair_of_placements(shape: tuple[int, ...]) -> None:
    for sizes in ((2, 3), (1, 4), (2, 1)):
        mesh = HolderMesh.ranks(*sizes)
        for placements in itertools.product(PLACEMENTS, repeat=2):
            check(Layout(mesh, placements), shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_orders_and_strides(shape: tuple[int, ...], dim: int) -> None:
    mesh = HolderMesh.ranks(2, 2, 2)
    for other in PLACEMENTS:
        check(Layout(mesh, [Shard(dim), Shard(dim), Shard(dim)], {dim: (2, 0, 1)}), shape)
        if not (isinstance(other, Shard) and other.dim == dim):
            check(Layout(mesh, [Shard(dim), other, Shard(dim)], {dim: (2, 0)}), shape)
            check(Layout(mesh, [strided_shard(dim, 2), other, Shard(dim)]), shape)


def test_partial_values_stay_partial() -> None:
    layout = Layout(HolderMesh.ranks(2, 2), [Shard(0), Partial()])
    element, local_index = layout.of_element((4, 3), 3)
    assert element == Layout(HolderMesh((2,), (2, 3), ("axis1",)), [Partial()])
    assert local_index == 1


def test_elements_that_do_not_exist_are_rejected() -> None:
    layout = Layout(HolderMesh.ranks(2), [Shard(0)])
    for shape, index in (((4, 3), 4), ((4, 3), -1), ((), 0)):
        with pytest.raises(LayoutError, match="no element|shards dim 0"):
            layout.of_element(shape, index)
