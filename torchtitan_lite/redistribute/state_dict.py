"""Redistribute all tensors of a model, or of its training state, in one exchange.

Layer: above joint.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute.execution import DEFAULT_MEANS, Means
from torchtitan_lite.redistribute.joint import move
from torchtitan_lite.redistribute.layout import HolderMesh, Layout, StridedReading
from torchtitan_lite.redistribute.plan import plan


@dataclass(frozen=True)
class Placed:
    """What is known of a tensor without having a part of it."""

    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: DTensor, strided: StridedReading | None = None) -> "Placed":
        """A DTensor's."""
        layout = Layout.from_dtensor(tensor, strided=strided)
        return Placed(layout, tuple(tensor.shape), tensor.dtype)


@torch.no_grad()
def redistribute_state_dict(
    tensors: Mapping[str, DTensor],
    layouts: Mapping[str, Layout],
    *,
    meshes: Iterable[DeviceMesh] = (),
    elsewhere: Mapping[str, Placed] | None = None,
    strided: StridedReading | None = "order",
    out: Mapping[str, DTensor] | None = None,
    means: Means = DEFAULT_MEANS,
) -> dict[str, DTensor]:
    """`tensors`, laid out as `layouts` say by name, in the order of `layouts`; one without a layout
    stays as it is. Every rank of any mesh must call it with the same layouts.

    `meshes` are DeviceMeshes on which results lie, beside those of `tensors` and `out`.
    `elsewhere` tells of tensors that this rank has no DTensor of, as with a pipeline, where each
    stage has its own; what lies on other ranks only is not in the result. `strided` is how to read
    strided shards: by default as FSDP2 means them. What `out` has a name of is filled; without it a
    tensor that lies right already is returned itself.

    Raises LayoutError naming the tensor for which a plan or a mesh is missing.
    """
    out = out or {}
    known = [*meshes, *(t.device_mesh for t in (*out.values(), *tensors.values()))]
    by_holders = {HolderMesh.of(mesh): mesh for mesh in reversed(known)}
    device = next((t.device for t in (*tensors.values(), *out.values())), torch.device("cpu"))
    names, plans, sources, outs = [], [], [], []
    for name, layout in layouts.items():
        tensor = tensors.get(name)
        placed = Placed.of(tensor, strided) if tensor is not None else (elsewhere or {}).get(name)
        if placed is None:
            raise LayoutError(
                f"{name} has a layout to go to, and is neither a tensor of this rank nor described "
                "in elsewhere."
            )
        names.append(name)
        plans.append(
            plan(
                placed.layout,
                layout,
                placed.shape,
                placed.dtype,
                costs=means.costs_on(device),
                one_exchange=True,
            )
        )
        sources.append(None if tensor is None else tensor.to_local().detach())
        outs.append(out[name].to_local() if name in out else None)
    moved = move(plans, sources, outs, device, means)
    results = {name: tensor for name, tensor in tensors.items() if name not in layouts}
    for name, found, local in zip(names, plans, moved, strict=True):
        if name in out:
            results[name] = out[name]
        elif name in tensors and found.is_nothing:
            results[name] = tensors[name]
        elif found.dst.mesh in by_holders:
            results[name] = found.dst.to_dtensor(local, by_holders[found.dst.mesh], found.shape)
        elif local.numel() > 0:
            raise LayoutError(
                f"{name} goes to {found.dst.mesh}, and no DeviceMesh of these ranks was given. Add "
                "it to meshes."
            )
    return results
