"""Redistribute one DTensor. Layer: above legs."""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute.holder_mesh import HolderMesh
from torchtitan_lite.redistribute.joint import check_out
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.legs import follow
from torchtitan_lite.redistribute.means import DEFAULT_MEANS, Means
from torchtitan_lite.redistribute.placements import LINEAR
from torchtitan_lite.redistribute.plan import average_factor, plan
from torchtitan_lite.redistribute.strided import StridedReading
from torchtitan_lite.torch_compat import spec_of


def redistribute(
    tensor: DTensor,
    dst: Layout,
    *,
    mesh: DeviceMesh | None = None,
    strided: StridedReading | None = None,
    out: DTensor | None = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    means: Means = DEFAULT_MEANS,
) -> DTensor:
    """`tensor` laid out as `dst`. Every rank of both meshes must call it; others may.

    A tensor that lies so already is returned as it is, and where this rank's part stays as it is
    the result shares its memory. `mesh` is the DeviceMesh of `dst` if that is not the tensor's
    own; a rank outside of it gets a DTensor without elements. `strided` is how to read strided
    shards, see `Layout.from_dtensor`. `out` lies as `dst` and takes the result. The tensor moves
    and results in `forward_dtype`, its gradient moves in `backward_dtype` (by
    default the tensor's dtype) and results in the tensor's dtype; both as in
    `DTensor.redistribute`.
    Gradients flow back the opposite way, once, and of averages and sums only: every rank of both
    meshes must come to backward.

    Raises LayoutError if no plan leads there, `mesh` is missing, or the tensor's part has another
    shape than its layout says, and RedistributionError if another rank does not take part.
    """
    shape = tuple(tensor.shape)
    src, dst = Layout.from_dtensor(tensor, strided=strided), dst.with_num_dims(len(shape))
    dtype = forward_dtype or tensor.dtype
    kind = _Kind(shape, dtype, tensor.device)
    if out is not None:
        check_out(spec_of(out), dst, kind.shape, kind.dtype)
        with torch.no_grad():
            _moved(tensor.to_local(), kind, src, dst, means, out.to_local())
        return out
    target = _mesh_of(tensor, dst, mesh)
    if src == dst and dtype == tensor.dtype and backward_dtype in (None, dtype):
        return tensor
    result = _Redistribute.apply(tensor, kind, src, dst, target, backward_dtype, means)
    assert isinstance(result, DTensor)
    return result


class _Kind(NamedTuple):
    """What is known of a tensor without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _moved(
    local: torch.Tensor,
    kind: _Kind,
    src: Layout,
    dst: Layout,
    means: Means,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's part of `dst`, in the dtype of `kind`."""
    local = local.to(kind.dtype)
    found = plan(
        src,
        dst,
        kind.shape,
        kind.dtype,
        costs=means.costs_on(kind.device),
        most_intermediate_bytes=2 * means.bucket_bytes,
    )
    return follow(found, local, out, kind.device, means)


def _mesh_of(tensor: DTensor, dst: Layout, mesh: DeviceMesh | None) -> DeviceMesh:
    found = tensor.device_mesh if mesh is None else mesh
    if HolderMesh.of(found) != dst.mesh:
        raise LayoutError(
            f"The result lies on {dst.mesh}, and "
            + ("the tensor's mesh is " if mesh is None else "the given mesh is ")
            + f"{HolderMesh.of(found)}. Give the DeviceMesh of the destination as mesh."
        )
    return found


class _Redistribute(torch.autograd.Function):
    """From DTensor to DTensor, as torch's own: the gradient then says how it lies."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        kind: _Kind,
        src: Layout,
        dst: Layout,
        mesh: DeviceMesh,
        backward_dtype: torch.dtype | None,
        means: Means,
    ) -> DTensor:
        """See `redistribute`."""
        local = tensor.to_local()
        ctx.kind, ctx.src, ctx.dst, ctx.means = kind, src, dst, means
        ctx.mesh, ctx.dtype, ctx.backward_dtype = tensor.device_mesh, tensor.dtype, backward_dtype
        return dst.to_dtensor(_moved(local, kind, src, dst, means), mesh, kind.shape)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: DTensor
    ) -> tuple[DTensor | None, ...]:
        """The gradient of every contribution to a sum is the whole gradient, and the other way
        round each holder's gradient is one of the whole."""
        src, dst = ctx.src, ctx.dst
        for layout in (src, dst):
            if layout.reduce_op not in (None, "sum"):
                raise LayoutError(
                    f"{layout} is joined by {layout.reduce_op}, which has no gradient here. "
                    "Redistribute sums or averages."
                )
        (grad,) = grads
        whole, wanted = (layout.with_copies(LINEAR) for layout in (dst, src))
        if grad.placements != whole.dtensor_placements:
            whole = Layout.from_dtensor(grad, strided="order")
        kind = ctx.kind._replace(dtype=ctx.backward_dtype or ctx.dtype)
        moved = _moved(grad.to_local(), kind, whole, wanted, ctx.means)
        factor = average_factor(src, dst)
        result = (moved if factor == 1 else moved * factor).to(ctx.dtype)
        return wanted.to_dtensor(result, ctx.mesh, ctx.kind.shape), *[None] * 6
