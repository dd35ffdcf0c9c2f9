"""The one file that touches private parts of torch. Layer: imports nothing of the project.

Each function says why the public API does not serve, and until when it is needed. `pyproject.toml`
admits torch 2.11 to 2.13; the tests run on 2.13.0.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from functools import cache, lru_cache
from threading import Lock
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Placements = tuple[Placement, ...]

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


def new_local_group(ranks: Sequence[int], timeout: timedelta, name: str) -> dist.ProcessGroup:
    """A process group to whose making only its own ranks come; once for each `ranks` and `name`.

    torch names such a group by its ranks and by how many groups this process has made before, so
    that ranks with another past wait for each other for ever (2.13). Needed until a group can be
    given a name.
    """
    from torch.distributed import distributed_c10d

    def named(ranks: Sequence[int]) -> str:
        return hashlib.sha1(f"{name}:{list(ranks)}".encode(), usedforsecurity=False).hexdigest()

    with _naming:
        by_count = distributed_c10d._hash_ranks_to_str
        distributed_c10d._hash_ranks_to_str = named
        try:
            group = dist.new_group(
                list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name
            )
        finally:
            distributed_c10d._hash_ranks_to_str = by_count
    assert isinstance(group, dist.ProcessGroup)
    return group


_naming = Lock()


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


class RepeatableRecomputation:
    """The recomputation context of selective activation checkpointing, for regions that are
    recomputed more than once.

    torch's own hands out each saved output once and then fails with "Trying to backward an extra
    time", but a pipeline schedule that splits the backward recomputes a region in each part. The
    outputs are freed with the graph that holds the region. Needed until torch can keep them.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._saved: dict[Any, Any] = {}

    def __enter__(self) -> None:
        self._saved = {key: copy(entries) for key, entries in self._inner.storage.items()}
        self._inner.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._inner.__exit__(*raised)
        self._inner.storage.update(self._saved)


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


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself, which has no `to_local`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_strided_shard(placement: Placement) -> TypeGuard[Shard]:
    """Whether a placement is the private one by which FSDP2 marks that it cut a tensor which an
    inner axis had cut before. It has a `dim` as Shard does.

    Needed until DTensor tells the order of its cuts in public.
    """
    return isinstance(placement, _StridedShard)


def split_factor(placement: Placement) -> int:
    """Of a strided shard: into how many pieces the dim is divided before each is cut."""
    assert isinstance(placement, _StridedShard)
    return int(placement.split_factor)


def strided_shard(dim: int, factor: int) -> Placement:
    """The placement that `is_strided_shard` recognises."""
    return _StridedShard(dim, split_factor=factor)


def as_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size
) -> DTensor:
    """A part as a contiguous DTensor of global `shape`, outside of autograd; a rank that is not in
    the mesh gets one without elements, or with a meaningless scalar. It has as many dims as the
    tensor, without which the backward of `to_local` fails.

    `DTensor.from_local` takes ten times as long, half the time of moving a small state dict, and
    takes the shape of a scalar for none. Needed until there is a public way without autograd.
    """
    if mesh.get_coordinate() is None:
        local = local.new_zeros((0,) * len(shape))
    spec = DTensorSpec(mesh, placements, tensor_meta=_contiguous(shape, local.dtype))
    return DTensor(local, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


@lru_cache(maxsize=8192)
def _contiguous(shape: torch.Size, dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Mesh, placements, shape and dtype of a DTensor as the one value by which DTensor itself
    compares them. Needed until DTensor offers it in public."""
    return tensor._spec


def shard_order_of(spec: DTensorSpec) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """For each dim that axes cut, the order in which they do; empty where strided shards tell it.

    DTensor keeps it in its private spec (from torch 2.10 on). Needed until it is public.
    """
    order = getattr(spec, "shard_order", None)
    return tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in order or ())


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """A default process group that believes to be rank `rank` of many and moves nothing.

    With it one process can ask DTensor what it would do on any mesh. It comes from torch's own
    tests; needed until a mesh can be made without processes. DTensor remembers plans by mesh, and
    equal meshes of different ranks have different ones: it is made to forget them.
    """
    from torch.distributed.tensor import _redistribute
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _redistribute.clear_redistribute_planner_cache()
        _redistribute._gen_transform_infos.cache_clear()


def redistribution_steps(
    tensor: DTensor, placements: Placements
) -> list[tuple[int, Placement, Placement]]:
    """What DTensor would do to lay `tensor` out anew on its mesh: (axis, from, to), in order.

    Its planner is private, and the collectives do not tell of steps that need none. Needed until
    DTensor tells its plan in public.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached

    given = tensor._spec
    wanted = DTensorSpec(given.mesh, placements, tensor_meta=given.tensor_meta)
    steps = _gen_transform_infos_non_cached(given, wanted)
    return [(step.mesh_dim, *step.src_dst_placements) for step in steps]


def redistributed_on_all(
    parts: Sequence[torch.Tensor],
    mesh_shape: tuple[int, ...],
    shape: Sequence[int],
    given: Placements,
    wanted: Placements,
) -> list[torch.Tensor]:
    """What `DTensor.redistribute` makes of the parts of all ranks, computed in this process. The
    world is that of `fake_process_group`, and the mesh holds its ranks in their order.

    Values tell whether DTensor does what its placements say, which no plan does. The mode that
    simulates ranks is private; needed until it is public.
    """
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

    with LocalTensorMode(len(parts)):
        ranks = torch.arange(len(parts)).reshape(mesh_shape)
        local: Any = LocalTensor(dict(enumerate(parts)))
        stride = torch.empty(tuple(shape), device="meta").stride()
        tensor = DTensor.from_local(
            local,
            DeviceMesh("cpu", ranks),
            given,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
        moved: Any = tensor.redistribute(placements=wanted).to_local()
    return [moved._local_tensors[rank] for rank in range(len(parts))]


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


def shards_on(mesh: DeviceMesh, dims: Sequence[int]) -> dict[int, Any]:
    """By dim, what a `shard_placement_fn` of `fully_shard` returns for a parameter that is to be
    sharded along it over another mesh than the rest of its unit: 1-D, or 2-D with replicas first.

    The classes are described in fully_shard's documentation but not exported (torch 2.13; older
    ones do not have them). Needed until they are.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    # One object for all, by which FSDP knows that the parameters belong together.
    info = (
        FSDPMeshInfo(mesh, shard_mesh_dim=0)
        if mesh.ndim == 1
        else HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    )
    return {dim: ShardPlacementResult(Shard(dim), info) for dim in dims}


def next_node_number() -> int:
    """The number that autograd gives to the next node of this thread.

    Numbers rise in the order in which nodes are made. Needed until autograd tells which module
    made a node.
    """
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def running_node() -> int | None:
    """The number of the autograd node that this thread runs the backward of. None outside of
    backward; 0 in backward between nodes, as in the callbacks at its end.

    See `next_node_number`.
    """
    if torch._C._current_graph_task_id() == -1:
        return None
    node = torch._C._current_autograd_node()
    return 0 if node is None else node._sequence_nr()


class Operations(TorchDispatchMode):
    """Inside its `with` block, hands every operation on plain tensors to `run(operation, args,
    kwargs)`, which must call it and return its result. DTensor's come as those on its local
    tensors; backward's come too, in whichever thread.

    Needed until dispatch modes are public.
    """

    def __init__(self, run: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """See the class."""
        return NotImplemented if DTensor in types else self._run(func, args, kwargs or {})


def group_of(
    operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dist.ProcessGroup | None:
    """The process group that an operation communicates over; None where it does not.

    Every collective reaches the dispatcher as an operation with its group among the arguments:
    c10d's as a boxed object, a functional one's by name. Needed as long as operations do not tell
    in public what they communicate over.
    """
    place = _group_argument(operation) if isinstance(operation, OpOverload) else None
    if place is None:
        return None
    position, name = place
    group = kwargs[name] if name in kwargs else args[position]
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, str):
        return _distributed_c10d._resolve_process_group(group)  # pyright: ignore[reportArgumentType]
    return dist.ProcessGroup.unbox(group)


@cache
def _group_argument(operation: OpOverload) -> tuple[int, str] | None:
    """Position and name of the argument that is a process group."""
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name in ("process_group", "group_name"):
            return position, argument.name
    return None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts.

    Needed until torch has a public pytree.
    """
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def record_entered(operation: Any, args: Sequence[Any]) -> str | None:
    """The label of the `torch.profiler.record_function` block that an operation enters.

    FSDP2 labels its collectives with the module that they are for, which no public hook tells.
    Needed until one does.
    """
    is_entry = operation is torch.ops.profiler._record_function_enter_new.default
    return str(args[0]) if is_entry else None


def record_left(operation: Any) -> bool:
    """Whether an operation leaves such a block; see `record_entered`."""
    return operation is torch.ops.profiler._record_function_exit._RecordFunction


class ImplicitRedistributions(DebugMode):
    """Inside its `with` block, calls `found(operation, given, wanted)` before DTensor moves data
    that nobody asked it to move: to compute an operation, or for the gradient of `from_local`.

    `ExplicitRedistributionContext` is a private switch too. It tells neither what was wanted nor of
    `from_local`, and it belongs to one thread, which is not that of backward on a GPU. A debug mode
    goes along with backward. Needed until DTensor offers such a switch in public.
    """

    def __init__(self, found: Callable[[str, Placements, Placements], None]) -> None:
        super().__init__()
        self._found = found
        self._operation = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Note the operation, and record nothing as the base class would."""
        if DTensor in types:
            self._operation = str(func)
            return NotImplemented
        return func(*args, **(kwargs or {}))

    @contextmanager
    def record_redistribute_calls(
        self, arg, src_placement, dst_placement, transform_info_str=None, is_explicit=False
    ) -> Iterator[None]:
        """DTensor calls this around each redistribution: first with the number of an operation's
        argument, if it is for one, and then with the local tensor."""
        if isinstance(arg, int):
            given, wanted = src_placement.placements, dst_placement.placements
            if given != wanted:
                self._found(self._operation, given, wanted)
        elif not is_explicit and _node_is_from_local():
            self._found("the gradient of DTensor.from_local", src_placement, dst_placement)
        yield

    def record_output_placements(self, output_spec: object) -> None:
        """Nothing is recorded."""


def _node_is_from_local() -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "_FromTorchTensorBackward"


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


def overlap_collectives(group: dist.ProcessGroup) -> None:
    """Let the compiler split matrix products and run them beside the collectives of `group` that
    they wait for (async tensor parallelism).

    A switch of inductor for the whole process. Needed until torch offers it in public.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)


def foreach_copy_(
    outs: list[torch.Tensor], given: list[torch.Tensor], *, non_blocking: bool = False
) -> None:
    """Copy many tensors in one call, in which other threads run. Private in torch 2.13, without a
    public equal."""
    torch._foreach_copy_(outs, given, non_blocking)  # pyright: ignore[reportPrivateImportUsage]


def compile_time_ns() -> int:
    """What dynamo and the compiler behind it have taken in this process up to now (nanoseconds).

    `torch._dynamo.utils.compile_times` gives it as a text, or per call. Needed until torch gives
    the sum in public. Nothing is imported for it: without the module nothing was compiled.
    """
    module = sys.modules.get("torch._dynamo.utils")
    if module is None:
        return 0
    spent = module.cumulative_time_spent_ns
    return int(spent.get("entire_frame_compile", 0) + spent.get("entire_backward_compile", 0))


def flight_record() -> dict[str, Any]:
    """What the flight recorder holds of the collectives of this process: torch's own keys.

    torch writes it by itself for NCCL only, when a collective is late, and as a pickle; the private
    function gives JSON, and of gloo's too (2.13). Needed until a public one does.
    """
    dump = _distributed_c10d._dump_fr_trace_json  # pyright: ignore[reportAttributeAccessIssue]
    return json.loads(dump(includeCollectives=True, onlyActive=False))
