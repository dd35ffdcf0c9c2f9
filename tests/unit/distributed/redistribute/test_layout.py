"""Computed boxes compared with those of DTensor."""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.errors import LayoutError, RedistributionError
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import start_mesh
from torchtitan_lite.distributed.redistribute import (
    Box,
    HolderMesh,
    Layout,
    local_box,
    plan,
)
from torchtitan_lite.distributed.redistribute.execution import execute
from torchtitan_lite.distributed.redistribute.execution.read_plan import deduplicate
from torchtitan_lite.distributed.redistribute.planning.layout import covers_exactly

_PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


@pytest.mark.parametrize("shape", [(1, 1), (4, 6), (5, 7), (2, 3), (7, 0)])
@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (4,), (2, 2), (2, 3), (3, 2), (1, 4)])
def test_boxes_equal_torchs_chunks(shape: tuple[int, int], mesh_shape: tuple[int, ...]) -> None:
    full = torch.arange(math.prod(shape)).reshape(shape)
    for placements in itertools.product(_PLACEMENTS, repeat=len(mesh_shape)):
        layout = Layout(HolderMesh.ranks(*mesh_shape), placements)
        for coordinate in _coordinates(mesh_shape):
            held = full
            for axis_size, placement, index in zip(mesh_shape, placements, coordinate, strict=True):
                if isinstance(placement, Shard):
                    chunks = held.chunk(axis_size, placement.dim)
                    # torch.chunk returns fewer chunks if nothing is left for the rest.
                    held = (
                        chunks[index]
                        if index < len(chunks)
                        else held.narrow(placement.dim, held.shape[placement.dim], 0)
                    )
            box = layout.box(shape, coordinate)
            assert box.size == tuple(held.shape), (placements, coordinate)
            assert torch.equal(full[box.slices], held), (placements, coordinate)


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2), (2, 3)])
def test_boxes_of_every_rank_equal_those_of_its_dtensors(mesh_shape: tuple[int, ...]) -> None:
    shape, world_size = (5, 7), math.prod(mesh_shape)
    for rank in range(world_size):
        with _as_rank(rank, world_size):
            mesh = init_device_mesh("cpu", mesh_shape)
            for placements in itertools.product(_PLACEMENTS, repeat=len(mesh_shape)):
                tensor = zeros(*shape, device_mesh=mesh, placements=placements)
                assert local_box(tensor).size == tuple(tensor.to_local().shape)


@contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Use a process group that pretends to be large and moves nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@settings(max_examples=150)
@given(st.data())
def test_boxes_of_different_ranks_cover_a_tensor_exactly_once(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    mesh_shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    kinds = st.one_of(
        st.just(Replicate()), st.integers(0, len(shape) - 1).map(lambda dim: Shard(dim))
    )
    placements = [data.draw(kinds) for _ in mesh_shape]
    covered = torch.zeros(shape, dtype=torch.int64)
    layout = Layout(HolderMesh.ranks(*mesh_shape), placements)
    for coordinate in _coordinates(mesh_shape):
        box = layout.box(shape, coordinate)
        assert box.is_empty == (covered[box.slices].numel() == 0)
        covered[box.slices] += 1
    copies = math.prod(
        size for size, p in zip(mesh_shape, placements, strict=True) if p.is_replicate()
    )
    assert (covered == copies).all()


def test_boxes_of_a_dtensor_and_a_plain_tensor() -> None:
    plain = torch.ones(3, 2)
    assert local_box(plain) == Box((0, 0), (3, 2))
    assert local_box(torch.tensor(1.0)) == Box((), ())
    assert not local_box(torch.tensor(1.0)).is_empty
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as mesh:
        sharded = DTensor.from_local(
            plain, mesh.device_mesh["dp_replicate", "dp_shard"], [Replicate(), Shard(0)]
        )
        assert local_box(sharded) == Box((0, 0), (3, 2))


def _boxes(*bounds: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Box]:
    return [Box(offset, size) for offset, size in bounds]


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((4, 6), _boxes(((0, 0), (4, 2)), ((0, 2), (1, 4)), ((1, 2), (3, 4))), True),
        ((4, 6), _boxes(((0, 0), (4, 6)), ((4, 0), (0, 6))), True),
        # A gap; an overlap and a gap of the same size; an element beyond the end.
        ((4, 6), _boxes(((0, 0), (4, 5))), False),
        ((4, 6), _boxes(((0, 0), (4, 3)), ((0, 2), (4, 3))), False),
        ((4, 6), _boxes(((0, 0), (4, 3)), ((0, 4), (4, 3))), False),
        # Of another number of dims.
        ((4, 6), _boxes(((0,), (24,))), False),
        ((4, 6), [Box((0, 0), (24,))], False),
        ((), _boxes(((), ())), True),
        ((), _boxes(((), ()), ((), ())), False),
        ((0, 3), [], True),
        ((2, 3), [], False),
        ((4, 6), _boxes(((0, 2), (4, 4)), ((0, 0), (4, 2))), True),
        ((4, 6), [Box((0,), (4, 6))], False),
    ],
)
def test_boxes_that_cover_a_shape_exactly(
    shape: tuple[int, ...], boxes: list[Box], expected: bool
) -> None:
    assert covers_exactly(shape, boxes) == expected


def _coordinates(mesh_shape: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh_shape)))


def test_a_tensor_with_too_few_dims_has_no_shards() -> None:
    layout = Layout(HolderMesh((2,), (0, 1), ("dp",)), [Shard(1)])
    for ask in (
        lambda: layout.boxes((4,), 0),
        lambda: layout.box((4,), (0,)),
        lambda: layout.local_shape((4,), 0),
        lambda: layout.of_element((4,), 0),
        lambda: deduplicate(layout, (4,), 0),
    ):
        with pytest.raises(LayoutError, match="shards dim 1 over dp, but a tensor"):
            ask()


def test_only_ranks_exchange_parts() -> None:
    files = Layout(HolderMesh((2,), ("a", "b"), ("dp",)), [Shard(0)])
    ranks = Layout(HolderMesh((2,), (0, 1), ("dp",)), [Shard(0)])
    one = plan(files, files.with_holders(("b", "a")), (4,), torch.float32)
    with pytest.raises(RedistributionError, match="Holder '[ab]' .* is no rank"):
        execute._ranks([one])
    assert execute._ranks([plan(ranks, ranks, (4,), torch.float32)]) == (0, 1)
