"""Redistribution of the DTensors of a state dict, all at once."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_lite.core.errors import LayoutError
from torchtitan_lite.distributed.redistribute.execution.execute import check_out, execute_exchange
from torchtitan_lite.distributed.redistribute.planning.cost import (
    DEFAULT_OPTIONS,
    Costs,
    ExchangeOptions,
)
from torchtitan_lite.distributed.redistribute.planning.layout import Layout, TensorSpec
from torchtitan_lite.distributed.redistribute.planning.placements import HolderMesh, StridedReading
from torchtitan_lite.distributed.redistribute.planning.plan import Plan, plan
from torchtitan_lite.distributed.torch_compat import DTensorSpec, dtensor_spec_of, with_spec


@torch.no_grad()
def redistribute_state_dict(
    tensors: Mapping[str, DTensor],
    layouts: Mapping[str, Layout],
    *,
    meshes: Iterable[DeviceMesh] = (),
    remote_specs: Mapping[str, TensorSpec] | None = None,
    strided: StridedReading | None = "order",
    out: Mapping[str, DTensor] | None = None,
    options: ExchangeOptions = DEFAULT_OPTIONS,
) -> dict[str, DTensor]:
    """Return `tensors` in `layouts`, by name and in the order of `layouts`; one without a layout is
    returned unchanged. Every rank of any mesh must call it with the same layouts.

    `meshes` are DeviceMeshes of results, beside those of `tensors` and `out`. `remote_specs`
    describes tensors of which this rank has no DTensor, as with a pipeline, where each stage has
    its own; results on other ranks only are omitted. `strided` selects the interpretation of
    strided shards, by default FSDP2's. Tensors in `out` are filled; without it a tensor in its
    layout is returned itself, and an unchanged shard shares its memory. Raises LayoutError naming
    the tensor without a plan or a mesh.
    """
    out = out or {}
    meshes = tuple(meshes)
    device = _device([*tensors.values(), *out.values()], meshes)
    known = tuple(
        dtensor_spec_of(tensors[name]) if name in tensors else _described(name, remote_specs)
        for name in layouts
    )
    plans = _plans(known, tuple(layouts.values()), strided, options.costs_on(device))
    for name, tensor_plan in zip(layouts, plans, strict=True):
        if name in out:
            check_out(
                dtensor_spec_of(out[name]), tensor_plan.dst, tensor_plan.shape, tensor_plan.dtype
            )
    sources = [tensors[name].to_local() if name in tensors else None for name in layouts]
    outs = [out[name].to_local() if name in out else None for name in layouts]
    moved = execute_exchange(plans, sources, outs, device, options)
    results = {name: tensor for name, tensor in tensors.items() if name not in layouts}
    by_holders: dict[HolderMesh, DeviceMesh] = {}
    if not layouts.keys() <= out.keys():
        of_tensors = (t.device_mesh for t in (*tensors.values(), *out.values()))
        # The last of equal ones is the one that the caller gave.
        by_holders = {HolderMesh.from_device_mesh(mesh): mesh for mesh in (*of_tensors, *meshes)}
    specs: dict[Plan, DTensorSpec] = {}
    for name, tensor_plan, local in zip(layouts, plans, moved, strict=True):
        if name in out:
            results[name] = out[name]
        elif name in tensors and tensor_plan.is_noop:
            results[name] = tensors[name]
        elif tensor_plan.dst.mesh in by_holders:
            if tensor_plan not in specs:
                mesh = by_holders[tensor_plan.dst.mesh]
                specs[tensor_plan] = tensor_plan.dst.dtensor_spec(
                    mesh, tensor_plan.shape, tensor_plan.dtype
                )
            results[name] = with_spec(local, specs[tensor_plan])
        elif local.numel() > 0:
            raise LayoutError(
                f"{name} goes to {tensor_plan.dst.mesh}, and no DeviceMesh of these ranks was "
                "given. Add it to meshes."
            )
    return results


def align_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient of a parameter with the parameter's placements; None if there is none.
    Without FSDP, the gradient of a weight that is replicated over tp is still each rank's partial
    sum; this sums it, once. Every rank that holds the parameter must call it."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)
    return parameter.grad


def _device(tensors: Sequence[DTensor], meshes: Sequence[DeviceMesh]) -> torch.device:
    """Return the device of all shards: a rank without tensors must agree with the others."""
    kinds = {mesh.device_type for mesh in (*(t.device_mesh for t in tensors), *meshes)}
    if len(kinds) > 1:
        raise LayoutError(
            f"Tensors and meshes of {' and '.join(sorted(kinds))} cannot move in one exchange. "
            "Call it once for each kind of device."
        )
    kind = kinds.pop() if kinds else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _described(name: str, remote_specs: Mapping[str, TensorSpec] | None) -> TensorSpec:
    if remote_specs is None or name not in remote_specs:
        raise LayoutError(
            f"{name} has a layout to go to, and is neither a tensor of this rank nor described in "
            "remote_specs."
        )
    return remote_specs[name]


@lru_cache(maxsize=128)
def _plans(
    known: tuple[DTensorSpec | TensorSpec, ...],
    layouts: tuple[Layout, ...],
    strided: StridedReading | None,
    costs: Costs,
) -> tuple[Plan, ...]:
    """Return a plan per tensor; those of the same state dict are looked up at once."""
    plans = []
    for known_spec, layout in zip(known, layouts, strict=True):
        placed = (
            known_spec
            if isinstance(known_spec, TensorSpec)
            else TensorSpec.from_dtensor_spec(known_spec, strided)
        )
        src, shape, dtype = placed.layout, placed.shape, placed.dtype
        plans.append(plan(src, layout, shape, dtype, costs=costs))
    return tuple(plans)
