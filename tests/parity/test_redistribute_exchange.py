"""Exchanges of redistribution: temporary memory, shared memory and its failures, reads from files.

In reads from files, each file is opened by one rank; there are as many files as ranks, more, and
fewer.
"""

import errno
import os
import random
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.ranks import WorkerPool
from tests.redistribution.processes import device_mesh
from tests.redistribution.reference import elements_of
from torchtitan_lite.core.errors import LayoutError, RedistributionError
from torchtitan_lite.distributed.redistribute import (
    ExchangeOptions,
    HolderMesh,
    Layout,
    TensorSpec,
    plan,
    redistribute_state_dict,
)
from torchtitan_lite.distributed.redistribute.execution.collective_transport import ScratchBuffers
from torchtitan_lite.distributed.redistribute.execution.execute import FusedExchange
from torchtitan_lite.distributed.redistribute.execution.program import TensorTask
from torchtitan_lite.distributed.redistribute.execution.read_plan import (
    ReadPlan,
    assign_readers,
    distribute_reads,
)
from torchtitan_lite.distributed.redistribute.execution.shared_memory import FOLDER, SharedMemory
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.training.debug.memory import LiveTensors

Pools = Callable[[int], WorkerPool]

FOUR = HolderMesh.ranks(4)
MIB = 1 << 20
SLACK_BYTES = 1 << 12
"""Values that the ranks reduce: a few words per tensor."""
R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPES = [(13, 6), (8, 8), (3,), (), (0, 4), (16, 2, 3)]


@pytest.mark.parametrize("bucket_mib", [1, 4, 25])
@pytest.mark.parametrize(
    ("src", "dst", "is_transposed"),
    [
        (Shard(0), Replicate(), False),
        (Shard(0), Shard(1), False),
        (Partial(), Shard(0), False),
        (Shard(0), Replicate(), True),
    ],
    ids=["gather", "transpose", "reduce", "transposed memory"],
)
def test_temporary_memory_is_at_most_two_buckets(
    src: Placement, dst: Placement, is_transposed: bool, bucket_mib: int, pools: Pools
) -> None:
    bucket_bytes = bucket_mib * MIB
    for extra in pools(4).run(_extra_bytes, src, dst, bucket_bytes, is_transposed):
        # The move takes more than one bucket.
        assert bucket_bytes < extra <= 2 * bucket_bytes + SLACK_BYTES


def test_sends_and_receives_share_the_two_buckets(pools: Pools) -> None:
    """Of one exchange, in which rank 0 receives one tensor and sends another."""
    assert max(pools(4).run(_extra_bytes_of_both_ways)) <= 2 * MIB + SLACK_BYTES


def _extra_bytes_of_both_ways() -> int:
    all_ranks, first = Layout(FOUR, [S0]), Layout(HolderMesh.ranks(1), [R])
    shape = (2 * MIB // 1024, 256)
    sources = {"gathered": _empty(all_ranks, shape)}
    outs = {"scattered": _empty(all_ranks, shape)}
    if dist.get_rank() == 0:
        sources["scattered"], outs["gathered"] = _empty(first, shape), _empty(first, shape)
    specs = {
        "gathered": TensorSpec(all_ranks, shape, torch.float32),
        "scattered": TensorSpec(first, shape, torch.float32),
    }
    options = ExchangeOptions(bucket_bytes=MIB, transport="collective")
    with _Watch([*sources.values(), *outs.values()]) as watch:
        redistribute_state_dict(
            sources,
            {"gathered": first, "scattered": all_ranks},
            remote_specs=specs,
            out=outs,
            meshes=[device_mesh(FOUR), device_mesh(first.mesh)],
            options=options,
        )
    return watch.live.take_peak() - watch.before


def _extra_bytes(src: Placement, dst: Placement, bucket_bytes: int, is_transposed: bool) -> int:
    """The peak of live bytes beyond sources and destinations."""
    # A rank sends and receives at least three buckets.
    rows = bucket_bytes // 1024 * (8 if isinstance(dst, Shard) and isinstance(src, Shard) else 2)
    names = [f"weight {number}" for number in range(3)]
    shape = (rows // 3, 256)
    sources = {name: _empty(Layout(FOUR, [src]), shape, is_transposed) for name in names}
    outs = {name: _empty(Layout(FOUR, [dst]), shape) for name in names}
    layouts = {name: Layout(FOUR, [dst]) for name in names}
    options = ExchangeOptions(bucket_bytes=bucket_bytes, transport="collective")
    with _Watch([*sources.values(), *outs.values()]) as watch:
        redistribute_state_dict(sources, layouts, out=outs, options=options)
    return watch.live.take_peak() - watch.before


def _empty(layout: Layout, shape: tuple[int, ...], is_transposed: bool = False) -> DTensor:
    own = layout.local_shape(shape, dist.get_rank())
    local = torch.zeros(own[::-1]).t() if is_transposed else torch.zeros(own)
    return layout.to_dtensor(local, device_mesh(layout.mesh), shape)


class _Watch(TorchDispatchMode):
    """Records the result of every operation, except numpy views of `tensors`, which have their own
    storages."""

    def __init__(self, tensors: Sequence[DTensor]) -> None:
        super().__init__()
        locals_ = [tensor.to_local() for tensor in tensors]
        self._known = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in locals_]
        self.live = LiveTensors(tensors)
        self.before = self.live.take_peak()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (isinstance(result, torch.Tensor) and self._is_known(result)):
            self.live.note(result)
        return result

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, DTensor):
            return False
        return any(start <= tensor.data_ptr() < stop for start, stop in self._known)


def test_replicas_send_parts_of_their_shards_in_several_buckets(pools: Pools) -> None:
    pools(4).run(_shard_experts)


def _shard_experts() -> None:
    """From experts that are replicated over an axis and sharded over another to whole ones."""
    mesh = HolderMesh.ranks(2, 2)
    src = Layout(mesh, [R, S1])
    wholes = {
        "w1": torch.arange(8.0 * 64 * 128).view(8, 64, 128),
        # In the same exchange, elements of half the size.
        "w2": torch.arange(8.0 * 96 * 32).view(8, 96, 32).bfloat16(),
    }
    for dst in (Layout(mesh, [S0, S0]), Layout(mesh, [S0, S0], {0: (1, 0)}), Layout(mesh, [S0, R])):
        sources = {
            name: src.to_dtensor(_box(src, whole), device_mesh(mesh), whole.shape)
            for name, whole in wholes.items()
        }
        for bucket_bytes in (1 << 14, 1 << 20):
            options = ExchangeOptions(bucket_bytes=bucket_bytes, transport="shared_memory")
            moved = redistribute_state_dict(sources, dict.fromkeys(wholes, dst), options=options)
            for name, whole in wholes.items():
                assert torch.equal(moved[name].to_local(), _box(dst, whole)), (name, dst)


def _box(layout: Layout, whole: torch.Tensor) -> torch.Tensor:
    """This rank's shard, which is one box."""
    (box,) = layout.boxes(whole.shape, dist.get_rank())
    return whole[box.slices].clone(memory_format=torch.contiguous_format)


def test_buffers_of_collectives_are_kept_up_to_a_bucket() -> None:
    scratch = ScratchBuffers(torch.device("cpu"))
    first = scratch.buffer(0, 1000, 4096).data_ptr()
    assert scratch.buffer(0, 600, 4096).data_ptr() == first
    assert len(scratch.buffer(0, 600, 4096)) == 600
    assert scratch.buffer(1, 600, 4096).data_ptr() != first
    # An exchange with smaller buckets does not keep it.
    assert scratch.buffer(0, 600, 800).untyped_storage().nbytes() == 600
    assert scratch.buffer(0, 5000, 4096).untyped_storage().nbytes() == 5000
    assert scratch.buffer(0, 4096, 4096).untyped_storage().nbytes() == 4096


def test_a_rank_without_shared_memory_is_not_a_peer(pools: Pools) -> None:
    assert pools(3).run(_peers_if_one_allocation_fails) == [{0, 2}, {1}, {0, 2}]


def test_a_rank_that_allocates_late_is_a_peer(pools: Pools) -> None:
    assert pools(3).run(_peers_if_one_allocation_is_slow) == [{0, 1, 2}] * 3


def test_a_missing_rank_is_named(pools: Pools) -> None:
    pools(3).run(_wait_for_a_missing_rank)


def test_no_file_is_left(pools: Pools) -> None:
    before = set(os.listdir(FOLDER))
    pools(3).run(_allocate)
    left = {name for name in set(os.listdir(FOLDER)) - before if "redistribute" in name}
    deadline = time.monotonic() + 5
    # Files of another run on this machine disappear.
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= set(os.listdir(FOLDER))
    assert not left


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _peers_if_one_allocation_fails() -> set[int]:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if dist.get_rank() != 1:
        return _peers_after_exchange(SharedMemory(_world(), 1 << 16))
    with patch("os.posix_fallocate", full):
        memory = SharedMemory(_world(), 1 << 16)
    assert memory.problem is not None and "No space left" in memory.problem
    assert not memory.covers_all
    return _peers_after_exchange(memory)


def _peers_if_one_allocation_is_slow() -> set[int]:
    allocate = os.posix_fallocate

    def slow(*given: int) -> None:
        time.sleep(0.1 * dist.get_rank())
        allocate(*given)

    with patch("os.posix_fallocate", slow):
        return set(SharedMemory(_world(), 1 << 16).peers)


def _peers_after_exchange(memory: SharedMemory) -> set[int]:
    """The peers after an exchange of all ranks."""
    mesh = HolderMesh.ranks(3)
    found = plan(Layout(mesh, [Shard(0)]), Layout(mesh, [Shard(1)]), (6, 9), torch.float32)
    rank, whole = dist.get_rank(), torch.arange(54.0).view(6, 9)
    out = torch.zeros(6, 3)
    with patch(
        "torchtitan_lite.distributed.redistribute.execution.execute.shared_memory_for",
        lambda _: memory,
    ):
        options = ExchangeOptions(bucket_bytes=1 << 14)
        tasks = [TensorTask(found, rank, 4)]
        execution = FusedExchange(tasks, range(3), _world(), torch.device("cpu"), options)
        execution.run([whole[2 * rank : 2 * rank + 2].contiguous()], [out])
    assert torch.equal(out, whole[:, 3 * rank : 3 * rank + 3])
    return set(memory.peers)


def _wait_for_a_missing_rank() -> None:
    memory = SharedMemory(_world(), 1 << 16)
    assert memory.covers_all
    if dist.get_rank() == 0:
        memory.signal_written(0)
        memory.timeout_s = 0.1
        with pytest.raises(RedistributionError, match="Rank 1 of the group did not write"):
            memory.wait_written([1], 0)
    else:
        memory.wait_written([0], 0)
    dist.barrier()


def _allocate() -> None:
    SharedMemory(_world(), 1 << 16)


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


def _shard(layout: Layout, whole: torch.Tensor, holder: Holder) -> torch.Tensor:
    at = layout.mesh.coordinate(holder)
    assert at is not None
    return whole.flatten()[torch.from_numpy(elements_of(layout, tuple(whole.shape), at))]


def _read_all(options: Sequence[ExchangeOptions], spread: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cases = _cases(world_size)
    random.Random(7).shuffle(cases)
    for first in range(0, len(cases), 40):
        some = cases[first : first + 40]
        read_plans, inputs, outs, expected = [], [], [], []
        for number, (src, dst, shape) in enumerate(some):
            whole = torch.arange(prod(shape), dtype=torch.float32).view(shape)
            reach = None if spread else {holder: [0] for holder in src.mesh.holders}
            readers = assign_readers(src, range(world_size), number, reach)
            read_plans.append(ReadPlan(src, dst, shape, whole.dtype, readers))
            inputs.append(
                {h: _shard(src, whole, h) for h, reader in readers.items() if reader == rank}
            )
            holds = dst.mesh.position(rank) is not None
            outs.append(torch.full(dst.local_shape(shape, rank), -1.0) if holds else None)
            expected.append(_shard(dst, whole, rank) if holds else None)
        for some_options in options:
            distribute_reads(read_plans, inputs, outs, some_options)
            for case, out, shard in zip(some, outs, expected, strict=True):
                assert out is None or torch.equal(out, shard), case
                if out is not None:
                    out.fill_(-1)


@pytest.mark.parametrize("spread", [True, False], ids=["every rank reads", "one rank reads all"])
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.matrix)])
def test_reads_from_files(world_size: int, spread: bool, pools: Pools) -> None:
    small = 1 << 14
    options = [
        ExchangeOptions(bucket_bytes=small),
        ExchangeOptions(bucket_bytes=small, transport="collective"),
    ]
    pools(world_size).run(_read_all, options, spread)


def test_readers_rotate_over_tensors() -> None:
    one_file = Layout(_files(1), [R])
    opened = [assign_readers(one_file, range(4), number)["0.safetensors"] for number in range(8)]
    assert opened == [0, 1, 2, 3, 0, 1, 2, 3]
    eight = assign_readers(Layout(_files(8), [S0]), range(4), 0)
    assert list(eight.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    same = assign_readers(Layout(_files(2, 2), [R, S0]), range(4), 3)
    assert list(same.values()) == [0, 1, 2, 3]


def test_an_unreachable_file_is_an_error() -> None:
    with pytest.raises(LayoutError, match=r"0\.safetensors.* not accessible"):
        assign_readers(Layout(_files(1), [R]), range(2), 0, {})
