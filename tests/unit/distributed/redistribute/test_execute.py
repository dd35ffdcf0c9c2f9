"""Exchanges between ranks that are threads, on both transports and in many small buckets."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.harness.threads import run_on_threads
from tests.redistribution import processes
from tests.redistribution.processes import Move, all_at_once
from torchtitan_lite.core.errors import LayoutError, RedistributionError
from torchtitan_lite.distributed.redistribute import (
    ExchangeOptions,
    HolderMesh,
    Layout,
    redistribute_state_dict,
)
from torchtitan_lite.distributed.redistribute.execution import execute
from torchtitan_lite.distributed.redistribute.execution.execute import check_out
from torchtitan_lite.distributed.redistribute.execution.shared_memory import (
    SharedMemory,
    is_supported,
)
from torchtitan_lite.distributed.redistribute.planning.cost import CPU
from torchtitan_lite.distributed.torch_compat import dtensor_spec_of, strided_shard

R, S0, S1, P, AVG = Replicate(), Shard(0), Shard(1), Partial(), Partial("avg")
FOUR, SQUARE = HolderMesh.ranks(4), HolderMesh.ranks(2, 2)
MOVES = [
    Move(Layout(FOUR, [S0]), Layout(FOUR, [R]), (130, 67)),
    Move(Layout(FOUR, [S0]), Layout(FOUR, [S1]), (130, 67), torch.float64),
    Move(Layout(FOUR, [P]), Layout(FOUR, [S0]), (130, 67)),
    Move(Layout(SQUARE, [AVG, S0]), Layout(SQUARE, [R, S1]), (40, 30), torch.bfloat16),
    Move(Layout(SQUARE, [R, S0]), Layout(SQUARE, [P, S1]), (7, 5)),
    Move(Layout(SQUARE, [P, P]), Layout(SQUARE, [P, R]), (7, 5)),
    Move(Layout(HolderMesh.ranks(2), [S0]), Layout(HolderMesh((2,), (3, 1)), [S1]), (9, 6)),
    Move(Layout(FOUR, [S0]), Layout(FOUR, [R]), (3,), torch.int8),
    Move(Layout(FOUR, [P]), Layout(FOUR, [R]), ()),
    Move(Layout(FOUR, [R]), Layout(FOUR, [S0]), (6, 2)),
]


@pytest.fixture
def per_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each rank its own meshes, and small shared memory that does not outlive the test."""
    made = threading.local()

    def device_mesh(mesh: HolderMesh) -> DeviceMesh:
        if mesh not in vars(made):
            ranks = torch.tensor(mesh.holders).reshape(mesh.shape)
            vars(made)[mesh] = DeviceMesh("cpu", ranks)  # pyright: ignore[reportArgumentType]
        return vars(made)[mesh]  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(processes, "device_mesh", device_mesh)
    memories: list[SharedMemory] = []

    def shared_memory(group: dist.ProcessGroup, region_bytes: int) -> SharedMemory:
        memories.append(SharedMemory(group, region_bytes))
        return memories[-1]

    monkeypatch.setattr(execute, "SharedMemory", shared_memory)
    monkeypatch.setattr(execute, "_SLOT_BYTES", 1 << 14)
    yield
    execute.shared_memory_for.cache_clear()
    execute._fused_exchange.cache_clear()
    for memory in memories:
        for file in memory._files.values():
            file.close()


@pytest.mark.parametrize("ranks_per_node", [0, 2])
@pytest.mark.parametrize(
    "transport",
    [
        "collective",
        pytest.param(None, marks=pytest.mark.skipif(not is_supported(), reason="needs Linux")),
    ],
)
def test_tensors_arrive_to_the_bit(
    transport: str | None, ranks_per_node: int, per_thread: None
) -> None:
    options = ExchangeOptions(
        bucket_bytes=1 << 14,
        transport=transport,  # pyright: ignore[reportArgumentType]
        costs=CPU.with_ranks_per_node(ranks_per_node),
    )
    run_on_threads(4, all_at_once, MOVES, [options, options])
    # Of some ranks only.
    run_on_threads(4, all_at_once, MOVES[6:7], [options])


def test_only_ranks_with_a_result_need_its_mesh(per_thread: None) -> None:
    def move() -> str:
        src, dst = Layout(FOUR, [S0]), Layout(HolderMesh.ranks(2, first=1), [R])
        tensors = {"weight": processes.source(Move(src, dst, (8,)), 0)}
        try:
            return str(list(redistribute_state_dict(tensors, {"weight": dst})))
        except LayoutError as error:
            return str(error)

    results = run_on_threads(4, move)
    assert results[0] == results[3] == "[]"
    assert all("weight goes to" in text and "Add it to meshes" in text for text in results[1:3])


def test_a_result_may_encode_the_order_of_axes_as_strides(per_thread: None) -> None:
    def check() -> None:
        order = Layout(SQUARE, [S0, S0], {0: (1, 0)})
        stride = Layout(SQUARE, [strided_shard(0, 2), S1])
        for layout, other, local in ((order, stride, (2, 4)), (stride, order, (4, 2))):
            mesh = processes.device_mesh(SQUARE)
            given = dtensor_spec_of(layout.to_dtensor(torch.empty(local), mesh, (8, 4)))
            check_out(given, layout, (8, 4), torch.float32)
            for wrong in (
                (other, (8, 4), torch.float32),
                (layout, (4, 8), torch.float32),
                (layout, (8, 4), torch.float64),
            ):
                with pytest.raises(RedistributionError, match="is needed"):
                    check_out(given, *wrong)

    run_on_threads(4, check)
