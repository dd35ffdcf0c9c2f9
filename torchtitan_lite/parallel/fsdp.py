"""Fully sharded data parallelism (FSDP2), with replication (HSDP), mixed precision and CPU offload.

The gradient is the plain sum over ranks. FSDP would average it, which is wrong when ranks hold
different numbers of target tokens; the trainer divides once.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.config.tables.training import PrecisionConfig
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.torch_compat import shards_on
from torchtitan_lite.nn.moe import Experts
from torchtitan_lite.nn.spec import ModelSpec, modules_matching
from torchtitan_lite.parallel.expert import has_own_mesh
from torchtitan_lite.parallel.precision import precision_policy


def apply(
    model: nn.Module,
    spec: ModelSpec,
    mesh: Mesh,
    parallelism: ParallelismConfig,
    precision: PrecisionConfig,
) -> None:
    """Shard the parameters of each unit of `spec` over `dp_shard`, replicate over `dp_replicate`.

    A rank without peers along these axes is left unwrapped in full precision. In mixed precision
    and without any other parallelism its modules cast their parameters where they read them, which
    saves FSDP's copies of weights and gradients. The arithmetic is FSDP's, except that gradients of
    a weight that is read twice add up in float32, and that inductor may fuse a cast and leave out
    its rounding. Everything else runs the code of several ranks; for example, a pipeline would
    cast again for each microbatch.
    """
    dtypes = precision_policy(precision, mesh.device)
    experts_apart = has_own_mesh(spec, mesh)
    is_alone = mesh.degrees.batch * mesh.degrees.cp == 1 and not (
        experts_apart and mesh.expert_mesh.size(2) > 1
    )
    if is_alone and not precision.enable_cpu_offload:
        if not dtypes.is_mixed:
            return
        if mesh.degrees.tp == mesh.degrees.pp == 1:
            _cast_where_read(model, dtypes.compute)
            return
    placement = None
    apart: dict[str, Any] | None = None
    if experts_apart:
        expert_mesh = _expert_sharding_mesh(mesh)
        along = shards_on(expert_mesh, (0, 1))
        placement = _expert_placement(model, mesh, along or {0: Shard(0), 1: Shard(1)})
        if along is None:
            apart, placement = {"mesh": expert_mesh, "shard_placement_fn": placement}, None
    settings: dict[str, Any] = {
        "mesh": _sharding_mesh(mesh),
        "shard_placement_fn": placement,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtypes.compute if dtypes.is_mixed else None,
            reduce_dtype=dtypes.reduction if dtypes.reduction != dtypes.compute else None,
            # The tables of cosines and sines stay in float32, as they are on a single rank.
            cast_forward_inputs=False,
        ),
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=mesh.device.pin_memory)
            if precision.enable_cpu_offload
            else OffloadPolicy()
        ),
    }
    # A single shard is only cast to the compute dtype, so freeing it would repeat the cast; but an
    # offloaded one is copied to the device.
    num_shards = mesh.degrees.dp_shard * mesh.degrees.cp
    if experts_apart:
        num_shards = max(num_shards, mesh.expert_mesh.size(2))
    is_gathered = num_shards > 1 or precision.enable_cpu_offload
    units = modules_matching(model, spec.blocks, *spec.extra_fsdp_units)
    policy = parallelism.fsdp_reshard_after_forward
    for position, unit in enumerate(units):
        # Backward begins with the last unit: freeing it would gather it twice.
        is_last = position == len(units) - 1
        # Under a pipeline every microbatch would gather it again.
        frees = policy == "default" and mesh.degrees.pp == 1 and not is_last and is_gathered
        reshard = policy == "always" or frees
        stacks = [
            fully_shard(module, **{**settings, **apart}, reshard_after_forward=reshard)
            for module in unit.modules()
            if apart and isinstance(module, Experts)
        ]
        # Gathered with their block, as parameters of one unit are.
        fully_shard(
            unit, **settings, reshard_after_forward=reshard
        ).set_modules_to_forward_prefetch(stacks)
    fully_shard(model, **settings, reshard_after_forward=policy == "always")
    if not is_alone:
        _sum_gradients(model)


def _cast_where_read(model: nn.Module, dtype: torch.dtype) -> None:
    """Let modules read their parameters in `dtype`. Parameters, gradients and the state dict keep
    their own dtype. Each attribute returns a new tensor, so that a parameter is changed through
    `parameters()` only. As in torchtitan's SimpleFSDP."""
    for module in model.modules():
        names = tuple(
            name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
        )
        if names:
            module.__class__ = _casting_class(type(module), names, dtype)


@cache
def _casting_class(base: type[nn.Module], names: tuple[str, ...], dtype: torch.dtype) -> type:
    """Return a subclass whose parameters `names` are cast by their properties. One for all modules
    of a kind, so that equal blocks share compiled code."""

    def reading(name: str) -> property:
        return property(lambda module: module._parameters[name].to(dtype))

    names_of_class = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), names_of_class | {name: reading(name) for name in names})


def reshard(model: nn.Module) -> None:
    """Free the weights gathered by a forward without backward. FSDP frees them in backward, and
    until then `named_parameters` returns unsharded weights."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _sharding_mesh(mesh: Mesh) -> DeviceMesh:
    """Return the mesh for fully_shard: 1-D without replication, else 2-D."""
    shard = "dp_shard"
    if mesh.degrees.cp > 1:
        # Weights are sharded over cp as over dp_shard.
        shard = "dp_shard_cp"
        flat = mesh.groups.flattened(mesh.device_mesh, ("dp_shard", "cp"), shard)
        if mesh.degrees.dp_replicate == 1:
            return flat
    if mesh.degrees.dp_replicate == 1:
        return mesh.device_mesh[shard]
    return mesh.device_mesh["dp_replicate", shard]


def _expert_sharding_mesh(mesh: Mesh) -> DeviceMesh:
    """Return the mesh of the ranks that hold the same experts, as `_sharding_mesh`."""
    if mesh.degrees.dp_replicate == 1:
        return mesh.expert_mesh["expert_shard"]
    return mesh.expert_mesh["dp_replicate", "expert_shard"]


def _expert_placement(
    model: nn.Module, mesh: Mesh, along: Mapping[int, Any]
) -> Callable[[nn.Parameter], Any]:
    """Return the placement function that shards experts over the ranks that hold the same ones, by
    `along`: the result for each dim. They are gathered together with the rest of their unit."""
    num_shards = mesh.degrees.expert_shape[2]
    stacks = {p for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}

    def placement(parameter: nn.Parameter) -> Any:
        if parameter not in stacks:
            return None
        assert isinstance(parameter, DTensor)
        # Over experts (dim 0); if they are too few, over a dim that divides evenly.
        num_experts, num_rows, *_ = parameter.to_local().shape
        return along[1 if num_experts < num_shards and num_rows % num_shards == 0 else 0]

    return placement


def _sum_gradients(model: nn.Module) -> None:
    """Disable FSDP's averaging: divide by 1, with a plain sum, because gloo has no scaled one. A
    single rank divides by 1 unless told otherwise, and would spend a pass over its gradients."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
