"""The places of tensors in a slot, and the boxes that each rank writes."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.harness.threads import run_on_threads
from torchtitan_lite.checkpoint.save_plan import SavePlan, plan_save
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims


def test_large_tensors_precede_small_ones_which_are_packed_by_width(mesh: Mesh) -> None:
    """Large ones have at least 64 KiB, in multiples of 8 bytes."""
    tensors = {
        "bytes": torch.empty(3, dtype=torch.uint8),
        "below": torch.empty(2**14 - 2),
        "odd": torch.empty(2**14 + 1),
        "edge": torch.empty(2**14),
        "bfloat16": torch.empty(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "large": torch.empty(2, 2**14 + 4, dtype=torch.bfloat16),
    }
    plan = plan_save(tensors, mesh)
    expected, position = {}, 0
    for name in ("edge", "large", "scalar", "below", "odd", "bfloat16", "bytes"):
        expected[name] = position
        position += tensors[name].nbytes
    assert plan.starts == expected and plan.slot_bytes == position
    assert {one.name: (one.offset, one.bytes) for one in plan.held_tensors()} == {
        name: (expected[name], tensor.nbytes) for name, tensor in tensors.items()
    }
    assert [box.tensor for box in plan.boxes] == list(expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_floating_point_tensors_are_stored_as_the_given_dtype(
    mesh: Mesh, dtype: torch.dtype | None
) -> None:
    plan = plan_save({"weight": torch.ones(3), "step": torch.tensor(7)}, mesh, dtype)
    found = {name: spec.dtype for name, spec in plan.placed.items()}
    assert found == {"weight": dtype or torch.float32, "step": torch.int64}
    assert plan.slot_bytes == 8 + 3 * found["weight"].itemsize


def test_a_dtype_that_files_do_not_support_is_named(mesh: Mesh) -> None:
    tensors = {"weight": torch.ones(3), "phase": torch.ones(3, dtype=torch.complex128)}
    with pytest.raises(CheckpointError, match=r"^phase: .* not support torch\.complex128\.$"):
        plan_save(tensors, mesh)


def test_the_boxes_of_all_ranks_are_each_element_once() -> None:
    draws = torch.Generator().manual_seed(0)
    whole = {
        "scalar": torch.tensor(7),
        "rows": torch.randn(5, 3, generator=draws),
        "columns": torch.randn(2, 7, generator=draws, dtype=torch.float64),
        "replicated": torch.randn(300, 2, generator=draws).bfloat16(),
        "empty": torch.empty(0, 3),
    }

    def run() -> tuple[SavePlan, bytes]:
        mesh = Mesh(detect_device("cpu"), ParallelDims(dp_replicate=2, dp_shard=2))
        axes = mesh.device_mesh["dp_replicate", "dp_shard"]
        tensors = dict(whole)
        for dim, name in enumerate(("rows", "columns")):
            tensors[name] = distribute_tensor(whole[name], axes, [Replicate(), Shard(dim)])
        plan = plan_save(tensors, mesh)
        slot = bytearray(plan.slot_bytes)
        for name, tensor in tensors.items():
            local = mesh.to_dtensor(tensor).to_local().contiguous()
            content = local.reshape(-1).view(torch.uint8).numpy().tobytes()
            slot[plan.starts[name] : plan.starts[name] + len(content)] = content
        return plan, bytes(slot)

    found = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    times = {name: torch.zeros(tensor.shape) for name, tensor in whole.items()}
    writers: dict[str, set[int]] = {}
    for plan, slot in run_on_threads(4, run):
        for box in plan.boxes:
            content = bytearray(slot[box.start : box.start + box.bytes])
            values = torch.frombuffer(content, dtype=whole[box.tensor].dtype).view(box.size)
            region = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
            found[box.tensor][region] = values
            times[box.tensor][region] += 1
            writers.setdefault(box.tensor, set()).add(plan.rank)
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name
        assert (times[name] == 1).all(), name
    # Each rank writes a part of what all ranks have.
    assert len(writers["replicated"]) == 4
