"""State that lies in files comes to ranks, each file opened by one rank: as many as ranks, more,
and fewer."""

import random
from collections.abc import Callable, Sequence
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from tests.pool import WorkerPool
from tests.redistribution.indices import elements_of
from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute import ExchangeOptions, HolderMesh, Layout
from torchtitan_lite.redistribute.placements import Holder
from torchtitan_lite.redistribute.storage import ReadPlan, assign_readers, distribute_reads

Pools = Callable[[int], WorkerPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPES = [(13, 6), (8, 8), (3,), (), (0, 4), (16, 2, 3)]


def _files(*shape: int) -> HolderMesh:
    count = HolderMesh.ranks(*shape).holders
    return HolderMesh(shape, tuple(f"{number}.safetensors" for number in count))


def _layouts(mesh: HolderMesh) -> list[Layout]:
    if len(mesh.shape) == 1:
        return [Layout(mesh, [R]), Layout(mesh, [S0]), Layout(mesh, [S1])]
    return [
        Layout(mesh, [R, S0]),
        Layout(mesh, [S0, S0]),
        Layout(mesh, [S0, S0], {0: (1, 0)}),
        Layout(mesh, [S1, R]),
    ]


def _cases(world_size: int) -> list[tuple[Layout, Layout, tuple[int, ...]]]:
    sources = [_files(1), _files(2), _files(3), _files(2, 2), _files(2, 4)]
    ranks = [HolderMesh.ranks(world_size), HolderMesh.ranks(1)]
    if world_size == 4:
        ranks += [HolderMesh.ranks(2, 2)]
    return [
        (src, dst, shape)
        for files in sources
        for src in _layouts(files)
        for mesh in ranks
        for dst in _layouts(mesh)
        for shape in SHAPES
        if _fits(src, shape) and _fits(dst, shape)
    ]


def _fits(layout: Layout, shape: Sequence[int]) -> bool:
    try:
        layout.check(shape)
    except LayoutError:
        return False
    return True


def _part(layout: Layout, whole: torch.Tensor, holder: Holder) -> torch.Tensor:
    at = layout.mesh.coordinate(holder)
    assert at is not None
    return whole.flatten()[torch.from_numpy(elements_of(layout, tuple(whole.shape), at))]


def _take_all(options: Sequence[ExchangeOptions], spread: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cases = _cases(world_size)
    random.Random(7).shuffle(cases)
    for first in range(0, len(cases), 40):
        some = cases[first : first + 40]
        takings, given, outs, wanted = [], [], [], []
        for number, (src, dst, shape) in enumerate(some):
            whole = torch.arange(prod(shape), dtype=torch.float32).view(shape)
            reach = None if spread else {holder: [0] for holder in src.mesh.holders}
            readers = assign_readers(src, range(world_size), number, reach)
            takings.append(ReadPlan(src, dst, shape, whole.dtype, readers))
            given.append(
                {h: _part(src, whole, h) for h, reader in readers.items() if reader == rank}
            )
            holds = dst.mesh.position(rank) is not None
            outs.append(torch.full(dst.local_shape(shape, rank), -1.0) if holds else None)
            wanted.append(_part(dst, whole, rank) if holds else None)
        for some_options in options:
            distribute_reads(takings, given, outs, some_options)
            for case, out, part in zip(some, outs, wanted, strict=True):
                assert out is None or torch.equal(out, part), case
                if out is not None:
                    out.fill_(-1)


@pytest.mark.parametrize("spread", [True, False], ids=["every rank reads", "one rank reads all"])
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.matrix)])
def test_state_comes_out_of_files(world_size: int, spread: bool, pools: Pools) -> None:
    small = 1 << 14
    options = [
        ExchangeOptions(bucket_bytes=small),
        ExchangeOptions(bucket_bytes=small, transport="collective"),
    ]
    pools(world_size).run(_take_all, options, spread)


def test_each_tensor_is_opened_by_other_ranks() -> None:
    one_file = Layout(_files(1), [R])
    opened = [assign_readers(one_file, range(4), number)["0.safetensors"] for number in range(8)]
    assert opened == [0, 1, 2, 3, 0, 1, 2, 3]
    eight = assign_readers(Layout(_files(8), [S0]), range(4), 0)
    assert list(eight.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    same = assign_readers(Layout(_files(2, 2), [R, S0]), range(4), 3)
    assert list(same.values()) == [0, 1, 2, 3]


def test_what_nobody_can_open_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"0\.safetensors.* out of reach"):
        assign_readers(Layout(_files(1), [R]), range(2), 0, {})
