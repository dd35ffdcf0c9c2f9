"""Readers of files, and blocks and shares of what they hold."""

import itertools
from collections import Counter
from math import prod

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tests.harness.threads import run_on_threads
from tests.redistribution.reference import coordinates, elements_of
from torchtitan_lite.core.errors import LayoutError
from torchtitan_lite.distributed.redistribute import ExchangeOptions, HolderMesh, Layout
from torchtitan_lite.distributed.redistribute.execution.read_plan import (
    ReadPlan,
    assign_readers,
    deduplicate,
    distribute_reads,
    element_range,
    held_blocks,
)
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.torch_compat import strided_shard

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def _files(*shape: int) -> HolderMesh:
    return HolderMesh(shape, tuple(f"file {number}" for number in range(prod(shape))))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_files", [1, 2, 3, 5, 8])
def test_readers_are_spread_over_ranks_and_tensors(num_files: int, num_ranks: int) -> None:
    layout, ranks = Layout(_files(num_files), [S0]), [10 + 2 * n for n in range(num_ranks)]
    opened: Counter[int] = Counter()
    for number in range(num_ranks):
        readers = list(assign_readers(layout, ranks, number).values())
        opened.update(readers)
        counts = Counter(readers)
        # Neighbors in order, and no more of one rank than needed.
        assert max(counts.values()) == -(-num_files // num_ranks)
        assert readers == sorted(readers)
        if num_files >= num_ranks:
            assert set(readers) == set(ranks)
        if num_files == num_ranks:
            assert readers == ranks
    if num_ranks % num_files == 0:
        assert len(opened) == num_ranks and len(set(opened.values())) == 1


def test_only_ranks_that_reach_a_file_read_it() -> None:
    layout = Layout(_files(3), [S0])
    reach: dict[Holder, list[int]] = {"file 0": [4], "file 1": [6, 5, 4], "file 2": [5, 4, 7]}
    readers = [tuple(assign_readers(layout, range(4, 8), n, reach).values()) for n in range(3)]
    # In turn where the rank in question does not.
    assert readers == [(4, 5, 7), (4, 5, 5), (4, 5, 4)]
    with pytest.raises(LayoutError, match="'file 2' of .* is not accessible"):
        assign_readers(layout, (4, 5, 6), 0, {"file 0": [4], "file 1": [4]})


@pytest.mark.parametrize("shape", [(7, 5), (8, 3), (1, 4)])
def test_blocks_are_copied_from_their_holders(shape: tuple[int, ...]) -> None:
    full = torch.arange(prod(shape)).reshape(shape)
    sources = [
        Layout(_files(2, 3), [R, Shard(-2)]),
        Layout(_files(2, 3), [S1, S0]),
        Layout(_files(2, 2), [strided_shard(0, 2), S0]),
    ]
    targets = [Layout(HolderMesh.ranks(3), [kind]) for kind in (R, Shard(-1), strided_shard(0, 2))]
    for src, dst in itertools.product(sources, targets):
        for rank in (0, 2):
            found = torch.full(dst.with_num_dims(2).local_shape(shape, rank), -1)
            for block in held_blocks(src, dst, shape, rank):
                shards = [_shard(src, full, holder) for holder in block.holders]
                assert all(torch.equal(shard, shards[0]) for shard in shards)
                assert len(shards) == (2 if src.placements[0].is_replicate() else 1)
                found[block.target] = shards[0][block.source]
            assert torch.equal(found, _shard(dst, full, rank))
        assert held_blocks(src, dst, shape, 3) == ()


def _shard(layout: Layout, full: torch.Tensor, holder: Holder) -> torch.Tensor:
    layout = layout.with_num_dims(full.ndim)
    at = dict(coordinates(layout.mesh))[holder]
    return full.flatten()[torch.from_numpy(elements_of(layout, tuple(full.shape), at))]


def test_replicas_share_rows_if_each_gets_eight() -> None:
    mesh = HolderMesh.ranks(2, 1, 2)
    layout = Layout(mesh, [R, R, S1])
    for rows, held in ((16, [8, 8, 8, 8]), (15, [15, 15])):
        once = deduplicate(layout, (rows, 4), 0)
        assert [once.local_shape((rows, 4), rank)[0] for rank in once.mesh.holders] == held
    # In the order of the axes: those that shard the rows first.
    order = deduplicate(Layout(HolderMesh.ranks(2, 2, 2), [S0, R, S0], {0: (2, 0)}), (64,), 0)
    assert order.shard_order == ((0, (2, 0, 1)),)
    inner = deduplicate(Layout(HolderMesh.ranks(2, 2), [R, S0]), (64,), 0)
    assert inner.shard_order == ((0, (1, 0)),)
    # An axis of one holder has no replicas.
    alone = Layout(HolderMesh.ranks(1, 2), [R, S0])
    assert deduplicate(alone, (64,), 3) is alone


def test_the_replica_of_a_small_tensor_keeps_names_and_order() -> None:
    mesh = HolderMesh((2, 2, 2), tuple(range(8)), ("dp", "ep", "tp"))
    layout = Layout(mesh, [S0, R, S0], {0: (2, 0)})
    once = [deduplicate(layout, (5,), number) for number in range(3)]
    kept = HolderMesh((2, 2), (0, 1, 4, 5), ("dp", "tp"))
    assert once[0] == once[2] == Layout(kept, [S0, S0], {0: (1, 0)})
    assert once[1].mesh.holders == (2, 3, 6, 7)
    both = Layout(HolderMesh.ranks(2, 3), [R, R])
    assert [deduplicate(both, (5,), n).mesh.holders for n in range(7)] == [
        (n % 6,) for n in range(7)
    ]


def test_the_range_of_a_scalar_and_of_rows() -> None:
    mesh = HolderMesh.ranks(2)
    layout = Layout(mesh, [R])
    once = deduplicate(layout, (), 1)
    assert [element_range(layout, once, (), rank) for rank in (0, 1)] == [(0, 0), (0, 1)]
    once = deduplicate(layout, (17, 3), 0)
    assert [element_range(layout, once, (17, 3), rank) for rank in (0, 1)] == [(0, 27), (27, 51)]


def _read(readers: dict[Holder, int], dst: Layout, files: HolderMesh | None = None) -> ReadPlan:
    src = Layout(files or _files(2), [S0])
    return ReadPlan(src, dst, (4, 2), torch.float32, readers)


def test_a_read_stays_if_each_rank_reads_its_own_shard() -> None:
    ranks = Layout(HolderMesh.ranks(2), [S0])
    assert _read({"file 0": 0, "file 1": 1}, ranks).stays
    assert not _read({"file 0": 1, "file 1": 0}, ranks).stays
    assert not _read({"file 0": 0, "file 1": 0}, ranks).stays
    assert not _read({"file 0": 0, "file 1": 1}, Layout(HolderMesh.ranks(2), [S1])).stays
    assert not _read({"file 0": 0, "file 1": 1}, Layout(HolderMesh.ranks(2, 1), [S0, R])).stays
    assert _read({"file 0": 0, "file 1": 1}, ranks).dst_ranks == [0, 1]


def test_reads_without_a_reader_or_of_contributions_are_rejected() -> None:
    ranks = Layout(HolderMesh.ranks(2), [S0])
    with pytest.raises(LayoutError, match="No rank acts for 'file 1'"):
        _read({"file 0": 0}, ranks)
    partial = Layout(HolderMesh.ranks(2), [Partial()])
    for src, dst in ((partial, ranks), (ranks, partial)):
        with pytest.raises(LayoutError, match="Contributions cannot be taken out of files"):
            ReadPlan(src, dst, (4, 2), torch.float32, {0: 0, 1: 1})


TARGETS: list[list[Placement]] = [[R], [S0], [S1]]


@pytest.mark.parametrize("num_files", [1, 2, 3, 5])
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_get_their_shards_of_what_they_read(world_size: int, num_files: int) -> None:
    shapes = [(7, 5), (8, 2), (0, 3), (1, 1)]

    def check(rank: int) -> None:
        plans, inputs, outs, expected = [], [], [], []
        for number, (shape, kinds) in enumerate(itertools.product(shapes, TARGETS)):
            full = torch.arange(prod(shape), dtype=torch.int8).reshape(shape)
            src = Layout(_files(num_files), [S0])
            dst = Layout(HolderMesh.ranks(world_size), kinds)
            readers = assign_readers(src, range(world_size), number)
            plans.append(ReadPlan(src, dst, shape, torch.int8, readers))
            inputs.append({h: _shard(src, full, h) for h, r in readers.items() if r == rank})
            outs.append(torch.full(dst.local_shape(shape, rank), -1, dtype=torch.int8))
            expected.append(_shard(dst, full, rank))
        distribute_reads(plans, inputs, outs, ExchangeOptions(transport="collective"))
        assert all(map(torch.equal, outs, expected))
        distribute_reads([], [], [])

    if world_size == 1:
        check(0)
    else:
        run_on_threads(world_size, lambda: check(torch.distributed.get_rank()))


def test_what_stays_is_read_without_other_ranks() -> None:
    read = _read({"file 0": 0, "file 1": 1}, Layout(HolderMesh.ranks(2), [S0]))
    out = torch.zeros(2, 2)
    distribute_reads([read], [{"file 0": torch.ones(2, 2)}], [out])
    assert torch.equal(out, torch.ones(2, 2))
