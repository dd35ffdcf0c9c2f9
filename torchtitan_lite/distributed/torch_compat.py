"""The only module that uses private APIs of torch.

Each docstring states why the public API is not sufficient, and until when the function is needed.
`pyproject.toml` allows torch 2.11 to 2.13; the tests run on 2.13.0, and were run on 2.11.0.
"""

import ctypes
import hashlib
import inspect
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from functools import _lru_cache_wrapper, cache, lru_cache
from threading import Lock, current_thread, main_thread
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
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.torch_version import TorchVersion
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

Placements = tuple[Placement, ...]

ATTENTION_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}
"""The kernels behind scaled_dot_product_attention on each device. The policy of selective
activation checkpointing receives these names instead of the public function; needed until it
does not."""


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change the timeout of a running process group.

    There is no public way: `init_process_group(timeout=)` applies to the whole life of a group.
    Needed until torch.distributed has one.
    """
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)


def new_local_group(ranks: Sequence[int], timeout: timedelta, name: str) -> dist.ProcessGroup:
    """Create a process group collectively on its own ranks only; once per `ranks` and `name`.

    torch names such a group by its ranks and the number of groups that this process has created
    before, so ranks with different histories wait for each other forever (2.13). Needed until a
    group can be given a name.
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


def gloo_group(
    store: Any,
    rank: int,
    world_size: int,
    *,
    address: str,
    connect_timeout: timedelta,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """Create a gloo group beside the default one that listens at `address`, for tensors of any
    device. `connect_timeout` is for the connections to the others, `timeout` for a collective.

    `new_group` takes no address, and has one timeout for both (2.13). Needed until a group can be
    given both.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = connect_timeout
    backend = dist.ProcessGroupGloo(store, rank, world_size, options)
    backend._set_default_timeout(timeout)
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def abort_groups() -> None:
    """Abort all process groups of this process from any thread, and forget them.

    `destroy_process_group` waits for pending work in NCCL, whose communicators are aborted here.
    gloo's `abort` does not wake a collective that waits (2.13): its connections must be cut, too.
    Needed until there is a public function.
    """
    from torch.distributed import distributed_c10d

    distributed_c10d._abort_process_group()


def reset_group_names() -> None:
    """Number the groups of the next world from 0, as a new process does.

    The number is the prefix under which ranks find each other in the store, and only the end of a
    world resets it: after an `init_process_group` that has failed, a process
    would wait for its peers without end (2.13). Needed until torch resets it then, too.
    """
    from torch.distributed import distributed_c10d

    distributed_c10d._world.group_count = 0


_unknown_names = itertools.count()
MESH_CACHES = "torch.distributed.tensor."
"""Prefix of the modules with caches of DTensor, which refer to groups through meshes only."""


def detach_mesh(mesh: DeviceMesh) -> None:
    """Release the process groups that a mesh keeps for itself and for the meshes sliced from it.

    DTensor's caches keep the meshes of a world that has ended. Code that is not compiled asks a
    mesh for the names of its groups and finds them by these, so that the entries serve an equal
    mesh of the next world if its groups have the same names; compiled code takes the groups from
    the mesh (2.13). A torch that keeps the groups elsewhere gets its caches cleared instead. Needed
    until the groups of a mesh can be replaced.
    """
    groups = getattr(mesh, "_pg_registry", None)
    if groups is None:
        clear_mesh_caches()
    else:
        groups.clear()


def mesh_group_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the process groups of a mesh's axes; see `detach_mesh`. If this torch
    keeps them elsewhere, a name that no other call returns, so that no mesh counts as equal."""
    names = getattr(mesh, "_dim_group_names", None)
    return (f"unknown-{next(_unknown_names)}",) if names is None else tuple(names)


def clear_mesh_caches() -> None:
    """Clear the caches of DTensor, in which meshes of a world that has ended may be left.

    Only a debugging function clears the cache of sharding propagation (2.13). Needed until
    `destroy_process_group` clears it.
    """
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for function in lru_caches(MESH_CACHES):
        function.cache_clear()


def lru_caches(*prefixes: str) -> "Iterator[_lru_cache_wrapper[Any]]":
    """Yield the functions and methods with a cache of `functools` in modules with these prefixes.

    A search in all objects of the process would take tenths of a second.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(prefixes):
            for value in list(vars(module).values()):
                # `isinstance` would ask some objects of torch for their class, and make them warn.
                is_class = issubclass(type(value), type)
                members = vars(value).values() if is_class else ()
                for member in (value, *members):
                    is_wrapped = type(member) in (classmethod, staticmethod)
                    function = member.__func__ if is_wrapped else member
                    if type(function) is _lru_cache_wrapper:
                        yield function


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply many tensors in place in one call instead of one call per tensor.

    The optimizers of torch use it, but there is no public function. Needed until there is one.
    """
    if tensors:
        torch._foreach_mul_(list(tensors), factor)  # pyright: ignore[reportPrivateImportUsage]


def foreach_norm(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the 2-norm of each tensor, in at least float32, in one call.

    `torch.nn.utils.get_total_norm` computes in the dtype of the tensors. Needed until it accepts
    another.
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch._foreach_norm(list(tensors), 2, dtype)  # pyright: ignore[reportPrivateImportUsage]


def keep_compiler_out_of_optimizers() -> None:
    """Let torch's optimizers be built without importing the compiler, which takes half a second.

    `add_param_group` is never compiled: its first call asks the compiler for such a function, and
    keeps it as an attribute (2.11 to 2.13). Here it is the function itself; without that attribute,
    nothing changes but the time. Needed until torch.optim imports the compiler only to compile.
    """
    function: Any = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    function.__dynamo_disable = function


def step_without_compiler(optimizer: torch.optim.Optimizer) -> None:
    """Call `step` of an optimizer in a block without gradients, not importing the compiler.

    torch's own optimizers wrap it in a function that imports the compiler, to end a graph there,
    and calls hooks (2.11 to 2.13). Without hooks, that function is left out. Needed until
    torch.optim imports the compiler only to compile.
    """
    kind = type(optimizer)
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    if any(hooks) or not kind.__module__.startswith("torch.optim."):
        optimizer.step()
        return
    with torch.profiler.record_function(f"Optimizer.step#{kind.__name__}.step"):
        inspect.unwrap(kind.step)(optimizer)


class RepeatableRecomputation:
    """Recomputation context of selective activation checkpointing, for regions that are recomputed
    more than once.

    torch's context returns each saved output once and then fails with "Trying to backward an extra
    time", but a pipeline schedule that splits the backward recomputes a region in each part. The
    outputs are freed with the graph of the region. Needed until torch can keep them.
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
    """Record the last `max_entries` allocations and frees on the GPU; None stops the recording.

    The documentation of torch recommends these two functions for memory snapshots, but they are
    underscored. Needed until they have public names.
    """
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_cuda_memory_snapshot(path: str) -> None:
    """Write what `record_cuda_memory_history` recorded, for pytorch.org/memory_viz.

    The file is a pickle because that viewer requires one; this project never reads it.
    """
    torch.cuda.memory._dump_snapshot(path)


def clear_cuda_error() -> None:
    """Forget the last error of the CUDA runtime in this thread, once it has been handled: torch
    would raise it at the next kernel launch.

    torch has no function for it. Needed until it has. It calls the runtime that torch has loaded.
    """
    with suppress(OSError):
        major = (torch.version.cuda or "").partition(".")[0]
        ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself.

    Needed until torch offers one call for both.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in which a DTensor holds this rank's shard, or a plain tensor itself.
    Setting its `data` changes the DTensor.

    Needed until a DTensor can get other values without a copy.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_strided_shard(placement: Placement) -> TypeGuard[Shard]:
    """Whether a placement is the private one by which FSDP2 marks a tensor that an inner axis had
    already sharded. It has a `dim` as Shard does.

    Needed until DTensor's order of sharding is public.
    """
    return isinstance(placement, _StridedShard)


def split_factor(placement: Placement) -> int:
    """Return the number of pieces into which a strided shard splits the dim before it shards
    each."""
    assert isinstance(placement, _StridedShard)
    return int(placement.split_factor)


def strided_shard(dim: int, factor: int) -> Placement:
    """Return the placement that `is_strided_shard` recognizes."""
    return _StridedShard(dim, split_factor=factor)


def as_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size
) -> DTensor:
    """Wrap a shard as a contiguous DTensor of global `shape`, outside of autograd; a rank outside
    of the mesh gets one without elements, or with a meaningless scalar. It has as many dims as the
    tensor; otherwise the backward of `to_local` fails.

    `DTensor.from_local` takes ten times as long, which is half the time of moving a small state
    dict, and treats the shape of a scalar as missing. Needed until there is a public way without
    autograd.
    """
    return with_spec(local, contiguous_spec(mesh, placements, shape, local.dtype))


def contiguous_spec(
    mesh: DeviceMesh, placements: Placements, shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a contiguous DTensor of global `shape`. Making it takes most of the time
    of `as_dtensor`; several tensors may share one."""
    return DTensorSpec(mesh, placements, tensor_meta=_contiguous(shape, dtype))


def with_spec(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap a shard as `as_dtensor` does."""
    if spec.mesh.get_coordinate() is None:
        local = local.new_zeros((0,) * spec.ndim)
    # Without `__init__`, which does nothing but import the compiler, half a second (2.13).
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


@lru_cache(maxsize=8192)
def _contiguous(shape: torch.Size, dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)


def dtensor_spec_of(tensor: DTensor) -> DTensorSpec:
    """Return mesh, placements, shape and dtype of a DTensor as the single value by which DTensor
    compares them. Needed until it is public."""
    return tensor._spec


def shard_order_of(spec: DTensorSpec) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return, for each sharded dim, the order in which axes shard it; empty if strided shards
    express it.

    DTensor stores it in its private spec (since torch 2.10). Needed until it is public.
    """
    order = getattr(spec, "shard_order", None)
    return tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in order or ())


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Create a default process group that acts as rank `rank` of many and moves nothing.

    With it one process can query DTensor about any mesh. It comes from torch's own tests; needed
    until a mesh can be created without processes. DTensor caches plans by mesh, but equal meshes
    have different plans on different ranks, so the caches are cleared.
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
        # Results of operations, with meshes whose groups no longer exist.
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Run operations on tensors that have shape, dtype and device, but no memory. Tensors of the
    meta device, and tensors with memory, may be among their inputs.

    torch's compiler and its memory tracker use it; needed until the mode is public.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextmanager
def outside_of_fake_tensors() -> Iterator[None]:
    """Run operations on tensors with values inside of `fake_tensors`. See there."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def flops_of(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the floating-point operations of a matrix product or an attention, and 0 for others. A
    causal mask halves an attention.

    The formulas are those of torch's FlopCounterMode, which offers them for modules only, does not
    count attention on the CPU, and ignores causal masks (2.13). Needed until there is a public
    function.
    """
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    aten, lite = torch.ops.aten, torch.ops.torchtitan_lite
    packet = getattr(operation, "overloadpacket", None)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        is_causal = len(args) > 4 and args[4]
        return sdpa_flop_count(*(argument.shape for argument in args[:3])) // (
            2 if is_causal else 1
        )
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        flops = sdpa_backward_flop_count(*(argument.shape for argument in args[:4]))
        return flops // (2 if args[7] else 1)
    if packet in (lite.grouped_linear, lite.grouped_outer):
        # The features of the other factor: [X, O, I], or [N, I].
        return 2 * args[0].numel() * args[1].shape[1]
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def redistribution_steps(
    tensor: DTensor, placements: Placements
) -> list[tuple[int, Placement, Placement]]:
    """Return the steps by which DTensor would redistribute `tensor` on its mesh: (axis, from, to).

    Its planner is private, and the collectives do not show steps without communication. Needed
    until DTensor's plan is public.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached

    source = tensor._spec
    target = DTensorSpec(source.mesh, placements, tensor_meta=source.tensor_meta)
    steps = _gen_transform_infos_non_cached(source, target)
    return [(step.mesh_dim, *step.src_dst_placements) for step in steps]


def redistribute_on_all_ranks(
    parts: Sequence[torch.Tensor],
    mesh_shape: tuple[int, ...],
    shape: Sequence[int],
    src_placements: Placements,
    dst_placements: Placements,
) -> list[torch.Tensor]:
    """Return the result of `DTensor.redistribute` on the shards of all ranks, computed in this
    process. The world is that of `fake_process_group`, and the mesh contains its ranks in order.

    Only values show whether DTensor implements its placements correctly. The mode that simulates
    ranks is private; needed until it is public.
    """
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

    with LocalTensorMode(len(parts)):
        ranks = torch.arange(len(parts)).reshape(mesh_shape)
        local: Any = LocalTensor(dict(enumerate(parts)))
        stride = torch.empty(tuple(shape), device="meta").stride()
        tensor = DTensor.from_local(
            local,
            DeviceMesh("cpu", ranks),
            src_placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
        moved: Any = tensor.redistribute(placements=dst_placements).to_local()
    return [moved._local_tensors[rank] for rank in range(len(parts))]


def attention_with_lse(
    q_BHSE: torch.Tensor,
    k_BHSE: torch.Tensor,
    v_BHSE: torch.Tensor,
    causal: bool,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention, and the log-sum-exp [B, H, S] of its scores, by which partial results are
    merged. `scale` multiplies scores, by default 1 / sqrt(E); `bias` [B or 1, H or 1, S, S] is
    added to them, on a CPU only.

    scaled_dot_product_attention does not return the latter, so the kernels behind it are called:
    the CPU's, and FlashAttention on a GPU (float16 and bfloat16 only). Needed until the public
    function returns it.
    """
    if q_BHSE.is_cpu:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHSE, k_BHSE, v_BHSE, 0.0, causal, attn_mask=bias, scale=scale
        )
    assert bias is None
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q_BHSE, k_BHSE, v_BHSE, 0.0, causal, scale=scale
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
    scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v for a part, given the output and log-sum-exp of the whole.

    See `attention_with_lse`.
    """
    inputs = (grad_out, q_BHSE, k_BHSE, v_BHSE, out.contiguous(), lse_BHS.contiguous())
    if q_BHSE.is_cpu:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, 0.0, causal, attn_mask=bias, scale=scale
        )
    assert bias is None
    seed = torch.zeros(2, dtype=torch.uint64, device=q_BHSE.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q_BHSE.device)
    lengths = q_BHSE.shape[2], k_BHSE.shape[2]
    # Cumulative sequence lengths, even empty ones, would select the kernel for packed sequences.
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *inputs, None, None, *lengths, 0.0, causal, seed, offset, scale=scale
    )


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Flatten several axes of a mesh into one that still has the mesh as its root.

    FSDP2 requires one axis to shard over, with the same root mesh as the tensors it shards. Needed
    until flattening a DeviceMesh is public.
    """
    return mesh[axes]._flatten(name)


def shards_on(mesh: DeviceMesh, dims: Sequence[int]) -> dict[int, Any] | None:
    """Return, by dim, the result of a `shard_placement_fn` of `fully_shard` for a parameter that is
    sharded along it over another mesh than the rest of its unit: 1-D, or 2-D with replicas first.
    None in torch 2.11, where such parameters need a unit of their own.

    The classes are described in the documentation of fully_shard but not exported (torch 2.13).
    Needed until they are, and None until torch 2.11 is no longer supported.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        return None
    # One object for all, by which FSDP groups the parameters.
    info = (
        _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
        if mesh.ndim == 1
        else _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    )
    return {dim: _fsdp_common.ShardPlacementResult(Shard(dim), info) for dim in dims}


def next_node_number() -> int:
    """Return the number that autograd gives to the next node of this thread.

    Numbers increase in the order in which nodes are created. Needed until autograd exposes which
    module created a node.
    """
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def current_node_number() -> int | None:
    """Return the number of the autograd node whose backward this thread runs. None outside of
    backward; 0 in backward between nodes, as in the callbacks at its end.

    See `next_node_number`.
    """
    if torch._C._current_graph_task_id() == -1:
        return None
    node = torch._C._current_autograd_node()
    return 0 if node is None else node._sequence_nr()


class Operations(TorchDispatchMode):
    """Context manager that passes every operation on plain tensors to `run(operation, args,
    kwargs)`, which must call it and return its result. DTensor operations appear as operations on
    local tensors; those of backward are included, in any thread.

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
    """Return the process group over which an operation communicates; None if it does not.

    Every collective reaches the dispatcher as an operation with its group among the arguments: that
    of c10d as a boxed object, that of a functional collective by name. Needed until operations
    expose their group publicly.
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
    """Return position and name of the argument that is a process group."""
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name in ("process_group", "group_name"):
            return position, argument.name
    return None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dicts. For each operation of a trace: torch's
    pytrees take more than twice as long."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for element in value for tensor in tensors_in(element)]


class RecordedLabels(list[str]):
    """Labels of the `torch.profiler.record_function` blocks that are entered, the innermost last.

    FSDP2 labels its collectives with their module, which no public hook exposes. Needed until one
    does.
    """

    def follow(self, operation: Any, args: Sequence[Any]) -> bool:
        """Enter or leave a block if `operation` does. Returns whether it left one."""
        if operation is torch.ops.profiler._record_function_enter_new.default:
            self.append(str(args[0]))
        is_exit = operation is torch.ops.profiler._record_function_exit._RecordFunction
        if is_exit:
            self.pop()
        return is_exit


class ImplicitRedistributions(DebugMode):
    """Context manager that calls `found(operation, given, wanted)` before DTensor redistributes
    data implicitly: to compute an operation, or for the gradient of `from_local`.

    `ExplicitRedistributionContext` is a private switch too. It does not report the target
    placements, does not cover `from_local`, and applies to one thread, which on a GPU is not that
    of backward. A debug mode also covers backward. Needed until DTensor has such a public switch.
    """

    def __init__(self, report: Callable[[str, Placements, Placements], None]) -> None:
        super().__init__()
        self._report = report
        self._operation = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Remember the operation, without the recording of the base class."""
        if DTensor in types:
            self._operation = str(func)
            return NotImplemented
        return func(*args, **(kwargs or {}))

    @contextmanager
    def record_redistribute_calls(
        self, arg, src_placement, dst_placement, transform_info_str=None, is_explicit=False
    ) -> Iterator[None]:
        """Handle a redistribution. DTensor calls this first with the index of an operation's
        argument, if it is for one, and then with the local tensor."""
        if isinstance(arg, int):
            source, target = src_placement.placements, dst_placement.placements
            if source != target:
                self._report(self._operation, source, target)
        elif not is_explicit and _node_is_from_local():
            self._report("the gradient of DTensor.from_local", src_placement, dst_placement)
        yield

    def record_output_placements(self, output_spec: object) -> None:
        """Record nothing."""


def _node_is_from_local() -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "_FromTorchTensorBackward"


def schedule_actions(
    name: str, num_ranks: int, num_stages: int, num: int
) -> list[list[tuple[int, str, int]]]:
    """Return the actions of each rank under torch's schedule `name` with `num` microbatches:
    (stage, one of F, B, I and W, microbatch). Raises ValueError if torch rejects the numbers.

    The schedules expose their order only as a private attribute, and only with stages, which need a
    process group; the stand-ins for the stages have the attributes that are read. Needed until the
    order of a schedule is public.
    """
    from torch.distributed.pipelining import schedules

    stages: list[Any] = [
        SimpleNamespace(num_stages=num_stages, group_size=num_ranks, group_rank=0, submod=None)
        for _ in range(num_stages // num_ranks)
    ]
    schedule_class = schedules.get_schedule_class(name)
    single = issubclass(schedule_class, schedules.PipelineScheduleSingle)
    order = schedule_class(stages[0] if single else stages, num).pipeline_order or {}
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


def schedule_from_order(
    stages: Sequence[Any], rows: Sequence[Sequence[str]], num: int, **options
) -> Any:
    """Return a pipeline schedule that runs the actions of `rows`, one row per rank, such as `0F3`.
    `num` is the number of microbatches.

    torch's public schedules compute their order themselves, and its private reader of orders
    requires a file. Needed until a public schedule accepts an order.
    """
    from torch.distributed.pipelining import schedules

    runtime = schedules._PipelineScheduleRuntime(list(stages), num, **options)
    runtime.pipeline_order = {
        rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)
    }
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)
    return runtime


def can_split_backward() -> bool:
    """Whether a pipeline stage can run the backward of its inputs before that of its weights.

    torch 2.11 adds up the gradients of different outputs of an operation there, and fails for
    operations with an autograd function of their own. Needed until it is no longer supported.
    """
    return TorchVersion(torch.__version__) >= "2.12"


def without_messages_to_itself(stage: Any) -> Any:
    """Return a `PipelineStage` that opens connections to other ranks only.

    torch 2.11 opens those between neighboring stages by messages. In a V-shaped schedule one rank
    holds two neighbors, and gloo does not send from a rank to itself. Needed until torch 2.11 is no
    longer supported; 2.13 does not send such messages.
    """
    to_neighbors = stage._get_init_p2p_neighbors_ops
    own_rank = stage.group_rank
    stage._get_init_p2p_neighbors_ops = lambda: [
        message for message in to_neighbors() if message.group_peer != own_rank
    ]
    return stage


def forward_schedule(
    stages: Sequence[Any], rows: Sequence[Sequence[str]], ranks: Sequence[int], num: int, **options
) -> Any:
    """Return a pipeline schedule for `eval` only: each rank runs the forwards of its row, such as
    `0F3`. `ranks` contains the rank of each stage, `num` is the number of microbatches.

    `eval` of torch's own schedules includes backward actions, and fails in a V-shaped schedule,
    because neighboring stages of a rank pass gradients that do not exist; and torch's check of an
    order requires each backward. Needed until torch has a schedule of several stages without
    backward.
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
    """Let the compiler split matrix products and overlap them with the collectives of `group` that
    they depend on (async tensor parallelism).

    A switch of inductor for the whole process. Needed until torch has a public one.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)


def foreach_copy_(
    outs: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False
) -> None:
    """Copy many tensors in one call that releases the GIL. Private in torch 2.13, without a
    public equivalent."""
    torch._foreach_copy_(outs, sources, non_blocking)  # pyright: ignore[reportPrivateImportUsage]


def raise_recompile_limit(num_graphs: int) -> None:
    """Let the compiler keep `num_graphs` graphs of one code object, if its limit is lower.

    `torch._dynamo.config` is documented, but underscored. Needed until it has a public name.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, num_graphs)


def private_dcp_classes() -> dict[str, type]:
    """Return, by name, the private classes that DCP pickles into the metadata of a checkpoint.

    Needed until DCP has a file format without pickle.
    """
    from torch.distributed.checkpoint import filesystem, metadata

    classes = (
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        filesystem._StoragePrefix,
    )
    return {kind.__name__: kind for kind in classes}


def compile_time_ns() -> int:
    """Return the time that dynamo and its backend have spent in this process so far (nanoseconds).

    `torch._dynamo.utils.compile_times` returns it as text, or per call. Needed until torch exposes
    the sum publicly. Imports nothing: without the module nothing was compiled.
    """
    module = sys.modules.get("torch._dynamo.utils")
    if module is None:
        return 0
    spent = module.cumulative_time_spent_ns
    return int(spent.get("entire_frame_compile", 0) + spent.get("entire_backward_compile", 0))


def flight_record() -> dict[str, Any]:
    """Return the flight recorders' entries about the collectives of this process, with torch's
    keys, in the order of the calls.

    torch has one recorder for gloo and one for NCCL. It writes the latter itself when a collective
    times out, as a pickle; the private functions return JSON (2.11 and 2.13). Builds without NCCL
    lack the second one. Needed until there is a public one.
    """
    merged: dict[str, Any] = {"entries": []}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is None:
            continue
        for key, value in json.loads(dump(includeCollectives=True, onlyActive=False)).items():
            if key == "entries":
                merged[key] += value
            elif isinstance(value, dict):
                merged.setdefault(key, {}).update(value)
            else:
                merged.setdefault(key, value)
    merged["entries"].sort(key=lambda entry: entry.get("time_created_ns", 0))
    return merged


class CollectiveWaits:
    """Time for which the main thread of this process has waited in collectives, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0


@contextmanager
def collective_waits() -> Iterator[CollectiveWaits]:
    """Measure the waits of the main thread during the block, whoever calls the collective: FSDP,
    DTensor, a pipeline, or a user's module.

    Work has hooks for its end but not for the wait, and the profiler costs far more. Needed until
    there are some. Two functions are replaced: each wait of torch's Python code goes through one.
    """
    from torch.distributed import _functional_collectives as functional

    waits = CollectiveWaits()
    places: tuple[tuple[Any, str], ...] = ((dist.Work, "wait"), (functional, "wait_tensor"))
    if not _measuring:
        _unmeasured[:] = [getattr(owner, name) for owner, name in places]
        for (owner, name), wait in zip(places, _unmeasured, strict=True):
            setattr(owner, name, _measured(wait))
    _measuring.append(waits)
    try:
        yield waits
    finally:
        _measuring.remove(waits)
        if not _measuring:
            for (owner, name), wait in zip(places, _unmeasured, strict=True):
                setattr(owner, name, wait)


_measuring: list[CollectiveWaits] = []
"""Open measurements, which may end in any order."""
_unmeasured: list[Callable[..., Any]] = []
"""The functions that are replaced while there are some."""


def _measured(wait: Callable[..., Any]) -> Callable[..., Any]:
    def measured(*args: Any, **kwargs: Any) -> Any:
        # Compiled code calls the original.
        if torch.compiler.is_compiling() or current_thread() is not main_thread():
            return wait(*args, **kwargs)
        started_s = time.perf_counter()
        try:
            return wait(*args, **kwargs)
        finally:
            for waits in _measuring:
                waits.seconds += time.perf_counter() - started_s

    return measured
