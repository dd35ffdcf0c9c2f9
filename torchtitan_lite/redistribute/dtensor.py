"""Redistribution of DTensors: one with autograd, or all tensors of a state dict at once."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute.cost import DEFAULT_OPTIONS, Costs, ExchangeOptions
from torchtitan_lite.redistribute.execute import check_out, execute_exchange
from torchtitan_lite.redistribute.layout import Layout, TensorSpec
from torchtitan_lite.redistribute.placements import LINEAR_OPS, HolderMesh, StridedReading
from torchtitan_lite.redistribute.plan import Plan, average_factor, plan
from torchtitan_lite.torch_compat import DTensorSpec, spec_of


def redistribute(
    tensor: DTensor,
    dst: Layout,
    *,
    mesh: DeviceMesh | None = None,
    strided: StridedReading | None = None,
    out: DTensor | None = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    options: ExchangeOptions = DEFAULT_OPTIONS,
) -> DTensor:
    """Return `tensor` in the layout `dst`. Every rank of both meshes must call it; others may.

    A tensor in that layout is returned itself, and an unchanged shard shares its memory. `mesh` is
    the DeviceMesh of `dst` if it is not the tensor's own; a rank outside of it gets a DTensor
    without elements. `strided` selects the interpretation of strided shards, see
    `Layout.from_dtensor`. `out` has the layout `dst` and receives the result. The tensor moves and
    results in `forward_dtype`, its gradient moves in `backward_dtype` (by default the tensor's
    dtype) and results in the tensor's dtype; both as in `DTensor.redistribute`. Gradients flow back
    the opposite way, once, and of averages and sums only: every rank of both meshes must run
    backward. Raises LayoutError if there is no plan, `mesh` is missing, or the tensor's shard has
    another shape than in its layout, and RedistributionError if another rank does not take part.
    """
    shape = tuple(tensor.shape)
    src, dst = Layout.from_dtensor(tensor, strided=strided), dst.with_num_dims(len(shape))
    dtype = forward_dtype or tensor.dtype
    kind = _Kind(shape, dtype, tensor.device)
    if out is not None:
        check_out(spec_of(out), dst, kind.shape, kind.dtype)
        with torch.no_grad():
            _moved(tensor.to_local(), kind, src, dst, options, out.to_local())
        return out
    target = _mesh_of(tensor, dst, mesh)
    if src == dst and dtype == tensor.dtype and backward_dtype in (None, dtype):
        return tensor
    result = _Redistribute.apply(tensor, kind, src, dst, target, backward_dtype, options)
    assert isinstance(result, DTensor)
    return result


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
        spec_of(tensors[name]) if name in tensors else _described(name, remote_specs)
        for name in layouts
    )
    plans = _plans(known, tuple(layouts.values()), strided, options.costs_on(device))
    for name, found in zip(layouts, plans, strict=True):
        if name in out:
            check_out(spec_of(out[name]), found.dst, found.shape, found.dtype)
    sources = [tensors[name].to_local() if name in tensors else None for name in layouts]
    outs = [out[name].to_local() if name in out else None for name in layouts]
    moved = execute_exchange(plans, sources, outs, device, options)
    results = {name: tensor for name, tensor in tensors.items() if name not in layouts}
    by_holders: dict[HolderMesh, DeviceMesh] = {}
    if not layouts.keys() <= out.keys():
        of_tensors = (t.device_mesh for t in (*tensors.values(), *out.values()))
        # Of equal ones the last, which is the one that the caller gave.
        by_holders = {HolderMesh.from_device_mesh(mesh): mesh for mesh in (*of_tensors, *meshes)}
    for name, found, local in zip(layouts, plans, moved, strict=True):
        if name in out:
            results[name] = out[name]
        elif name in tensors and found.is_noop:
            results[name] = tensors[name]
        elif found.dst.mesh in by_holders:
            results[name] = found.dst.to_dtensor(local, by_holders[found.dst.mesh], found.shape)
        elif local.numel() > 0:
            raise LayoutError(
                f"{name} goes to {found.dst.mesh}, and no DeviceMesh of these ranks was given. Add "
                "it to meshes."
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


class _Kind(NamedTuple):
    """Layout, shape, dtype and device of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Redistribute(torch.autograd.Function):
    """Autograd from DTensor to DTensor, as in torch: the gradient has a layout of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        kind: _Kind,
        src: Layout,
        dst: Layout,
        mesh: DeviceMesh,
        backward_dtype: torch.dtype | None,
        options: ExchangeOptions,
    ) -> DTensor:
        """See `redistribute`."""
        local = tensor.to_local()
        ctx.kind, ctx.src, ctx.dst, ctx.options = kind, src, dst, options
        ctx.mesh, ctx.dtype, ctx.backward_dtype = tensor.device_mesh, tensor.dtype, backward_dtype
        return dst.to_dtensor(_moved(local, kind, src, dst, options), mesh, kind.shape)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: DTensor
    ) -> tuple[DTensor | None, ...]:
        """Return the layout of the gradient: the gradient of every contribution to a sum is the
        entire gradient, and conversely each holder's gradient is one contribution."""
        src, dst = ctx.src, ctx.dst
        for layout in (src, dst):
            if layout.reduce_op not in (None, "sum"):
                raise LayoutError(
                    f"{layout} is joined by {layout.reduce_op}, which has no gradient here. "
                    "Redistribute sums or averages."
                )
        (grad,) = grads
        whole, wanted = (layout.with_replicas(LINEAR_OPS) for layout in (dst, src))
        if grad.placements != whole.dtensor_placements:
            whole = Layout.from_dtensor(grad, strided="order")
        kind = ctx.kind._replace(dtype=ctx.backward_dtype or ctx.dtype)
        moved = _moved(grad.to_local(), kind, whole, wanted, ctx.options)
        factor = average_factor(src, dst)
        result = (moved if factor == 1 else moved * factor).to(ctx.dtype)
        return wanted.to_dtensor(result, ctx.mesh, ctx.kind.shape), *[None] * 6


def _moved(
    local: torch.Tensor,
    kind: _Kind,
    src: Layout,
    dst: Layout,
    options: ExchangeOptions,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return this rank's shard of `dst`, in the dtype of `kind`."""
    local = local.to(kind.dtype)
    found = plan(
        src,
        dst,
        kind.shape,
        kind.dtype,
        costs=options.costs_on(kind.device),
    )
    return execute_exchange([found], [local], [out], kind.device, options)[0]


def _mesh_of(tensor: DTensor, dst: Layout, mesh: DeviceMesh | None) -> DeviceMesh:
    found = tensor.device_mesh if mesh is None else mesh
    if HolderMesh.from_device_mesh(found) != dst.mesh:
        raise LayoutError(
            f"The result lies on {dst.mesh}, and "
            + ("the tensor's mesh is " if mesh is None else "the given mesh is ")
            + f"{HolderMesh.from_device_mesh(found)}. Give the DeviceMesh of the destination as "
            "mesh."
        )
    return found


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
    found = []
    for given, layout in zip(known, layouts, strict=True):
        placed = (
            given if isinstance(given, TensorSpec) else TensorSpec.from_dtensor_spec(given, strided)
        )
        src, shape, dtype = placed.layout, placed.shape, placed.dtype
        found.append(plan(src, layout, shape, dtype, costs=costs))
    return tuple(found)
