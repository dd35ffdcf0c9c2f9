"""The one file that touches private parts of torch. Layer: imports nothing of the project.

Each function says why the public API does not serve, and until when it is needed. `pyproject.toml`
admits torch 2.11 to 2.13; the tests run on 2.13.0.
"""

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

ATTENTION_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}
"""The kernels behind scaled_dot_product_attention on each device. Selective recomputation sees
these names and not the public function's; needed as long as its policy is asked about kernels."""


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change the timeout of a running process group.

    There is no public way: `init_process_group(timeout=)` holds for the whole life of a group.
    Needed until torch.distributed offers one.
    """
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply many tensors in place in one call.

    One call instead of one per tensor; the optimizers of torch use it and no public function
    offers it. Needed until there is one.
    """
    if tensors:
        torch._foreach_mul_(list(tensors), factor)  # pyright: ignore[reportPrivateImportUsage]


def foreach_norm(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The 2-norm of each tensor, float32 at least, in one call.

    `torch.nn.utils.get_total_norm` computes in the tensors' own dtype. Needed until it can be told
    another.
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch._foreach_norm(list(tensors), 2, dtype)  # pyright: ignore[reportPrivateImportUsage]


def record_cuda_memory_history(max_entries: int | None) -> None:
    """Record the last `max_entries` allocations and frees on the GPU; None stops it.

    The documentation of torch teaches these two functions for memory snapshots, but they are
    underscored. Needed until they have public names.
    """
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_cuda_memory_snapshot(path: str) -> None:
    """Write what `record_cuda_memory_history` recorded, for pytorch.org/memory_viz.

    The file is a pickle because that viewer wants one; nothing here ever reads it.
    """
    torch.cuda.memory._dump_snapshot(path)


def is_strided_shard(placement: Placement) -> TypeGuard[Shard]:
    """Whether a placement is the private one by which FSDP2 marks that it cut a tensor which an
    inner axis had cut before. It has a `dim` as Shard does.

    Needed until DTensor tells the order of its cuts in public.
    """
    return isinstance(placement, _StridedShard)


def attention_with_lse(
    q_BHSE: torch.Tensor, k_BHSE: torch.Tensor, v_BHSE: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the log-sum-exp [B, H, S] of its scores, by which parts are merged.

    scaled_dot_product_attention does not return the latter, so the kernels behind it are called:
    the CPU's, and FlashAttention on a GPU (float16 and bfloat16 only). Needed until the public
    function returns it.
    """
    if q_BHSE.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q_BHSE, k_BHSE, v_BHSE, 0.0, causal
        )
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHSE, k_BHSE, v_BHSE, 0.0, causal
        )
    return out, lse


def attention_backward(
    grad_out: torch.Tensor,
    q_BHSE: torch.Tensor,
    k_BHSE: torch.Tensor,
    v_BHSE: torch.Tensor,
    out: torch.Tensor,
    lse_BHS: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients for q, k and v of a part, given the output and log-sum-exp of the whole.

    See `attention_with_lse`.
    """
    inputs = (grad_out, q_BHSE, k_BHSE, v_BHSE, out.contiguous(), lse_BHS.contiguous())
    if not q_BHSE.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, 0.0, causal
        )
    none = torch.empty(0, device=q_BHSE.device)
    seed = torch.zeros(2, dtype=torch.uint64, device=q_BHSE.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q_BHSE.device)
    lengths = q_BHSE.shape[2], k_BHSE.shape[2]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *inputs, none, none, *lengths, 0.0, causal, seed, offset
    )


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Several axes of a mesh as one, with the mesh still as its root.

    FSDP2 wants one axis to shard over, of the same root mesh as that of the tensors it shards.
    Needed until DeviceMesh flattens in public.
    """
    return mesh[axes]._flatten(name)


def schedule_actions(
    name: str, num_ranks: int, num_stages: int, num: int
) -> list[list[tuple[int, str, int]]]:
    """What each rank does under torch's schedule `name` with `num` microbatches: (stage, one of F,
    B, I and W, microbatch). Raises ValueError where torch refuses the numbers.

    The schedules offer their order only as an attribute of private actions, and only to whoever
    has stages, which need a process group; what stands here for the stages has the attributes
    that are read. Needed until torch gives the order of a schedule in public.
    """
    from torch.distributed.pipelining import schedules

    stages: list[Any] = [
        SimpleNamespace(num_stages=num_stages, group_size=num_ranks, group_rank=0, submod=None)
        for _ in range(num_stages // num_ranks)
    ]
    made = schedules.get_schedule_class(name)
    single = issubclass(made, schedules.PipelineScheduleSingle)
    order = made(stages[0] if single else stages, num).pipeline_order or {}
    flat = [
        [part for action in order[rank] if action for part in action.sub_actions or (action,)]
        for rank in range(num_ranks)
    ]
    return [
        [
            (action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in row
            if action.microbatch_index is not None
        ]
        for row in flat
    ]


def schedule_of_order(
    stages: Sequence[Any], rows: Sequence[Sequence[str]], num: int, **options
) -> Any:
    """A pipeline schedule that runs the actions of `rows`, one row a rank, such as `0F3`. `num` is
    the number of microbatches.

    torch's public schedules work out their order themselves, and its reader of orders, private
    too, wants a file. Needed until a public schedule takes an order.
    """
    from torch.distributed.pipelining import schedules

    runtime = schedules._PipelineScheduleRuntime(list(stages), num, **options)
    runtime.pipeline_order = {
        rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)
    }
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)
    return runtime


def forward_schedule(
    stages: Sequence[Any], rows: Sequence[Sequence[str]], ranks: Sequence[int], num: int, **options
) -> Any:
    """A pipeline schedule for `eval` only: each rank runs the forwards of its row, such as `0F3`.
    `ranks` holds the rank of each stage, `num` is the number of microbatches.

    `eval` of torch's own schedules walks through backward too, and in a V-shaped one it fails
    there, since neighbouring stages of a rank hand on gradients that do not exist; and torch's
    check of an order wants each backward. Needed until torch has a schedule of several stages
    without backward.
    """
    from torch.distributed.pipelining import schedules

    runtime = schedules._PipelineScheduleRuntime(list(stages), num, **options)
    holders = dict(enumerate(ranks))
    runtime.stage_index_to_group_rank = holders
    for stage in stages:
        stage.stage_index_to_group_rank = holders
    actions = {
        rank: schedules._add_unshard_reshard([schedules._Action.from_str(cell) for cell in row])
        for rank, row in enumerate(rows)
    }
    runtime.pipeline_order_with_comms = schedules._add_send_recv(
        actions, stage_to_rank=holders.__getitem__, num_stages=len(holders)
    )
    return runtime
