"""Redistribute all tensors of a model, or of its training state, in one exchange.

Layer: above joint.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute.cost import Costs
from torchtitan_lite.redistribute.holder_mesh import HolderMesh
from torchtitan_lite.redistribute.joint import check_out, move
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.means import DEFAULT_MEANS, Means
from torchtitan_lite.redistribute.plan import Plan, plan
from torchtitan_lite.redistribute.strided import StridedReading
from torchtitan_lite.torch_compat import DTensorSpec, spec_of


@dataclass(frozen=True)
class Placed:
    """What is known of a tensor without having a part of it."""

    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: DTensor, strided: StridedReading | None = None) -> "Placed":
        """A DTensor's."""
        return _placed(spec_of(tensor), strided)


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
    tensor that lies right already is returned itself, and a part that stays as it is shares its
    memory.

    Raises LayoutError naming the tensor for which a plan or a mesh is missing.
    """
    out = out or {}
    meshes = tuple(meshes)
    device = _device([*tensors.values(), *out.values()], meshes)
    known = tuple(
        spec_of(tensors[name]) if name in tensors else _described(name, elsewhere)
        for name in layouts
    )
    plans = _plans(known, tuple(layouts.values()), strided, means.costs_on(device))
    for name, found in zip(layouts, plans, strict=True):
        if name in out:
            check_out(spec_of(out[name]), found.dst, found.shape, found.dtype)
    sources = [tensors[name].to_local() if name in tensors else None for name in layouts]
    outs = [out[name].to_local() if name in out else None for name in layouts]
    moved = move(plans, sources, outs, device, means)
    results = {name: tensor for name, tensor in tensors.items() if name not in layouts}
    by_holders: dict[HolderMesh, DeviceMesh] = {}
    if not layouts.keys() <= out.keys():
        of_tensors = (t.device_mesh for t in (*tensors.values(), *out.values()))
        # Of equal ones the last, which is the one that the caller gave.
        by_holders = {HolderMesh.of(mesh): mesh for mesh in (*of_tensors, *meshes)}
    for name, found, local in zip(layouts, plans, moved, strict=True):
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


def _device(tensors: Sequence[DTensor], meshes: Sequence[DeviceMesh]) -> torch.device:
    """Where all parts lie: a rank without tensors must come to the same as the others."""
    kinds = {mesh.device_type for mesh in (*(t.device_mesh for t in tensors), *meshes)}
    if len(kinds) > 1:
        raise LayoutError(
            f"Tensors and meshes of {' and '.join(sorted(kinds))} cannot move in one exchange. "
            "Call it once for each kind of device."
        )
    kind = kinds.pop() if kinds else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _described(name: str, elsewhere: Mapping[str, Placed] | None) -> Placed:
    if elsewhere is None or name not in elsewhere:
        raise LayoutError(
            f"{name} has a layout to go to, and is neither a tensor of this rank nor described in "
            "elsewhere."
        )
    return elsewhere[name]


@lru_cache(maxsize=128)
def _plans(
    known: tuple[DTensorSpec | Placed, ...],
    layouts: tuple[Layout, ...],
    strided: StridedReading | None,
    costs: Costs,
) -> tuple[Plan, ...]:
    """A plan for each tensor; of the same state dict they are looked up at once."""
    found = []
    for given, layout in zip(known, layouts, strict=True):
        placed = given if isinstance(given, Placed) else _placed(given, strided)
        src, shape, dtype = placed.layout, placed.shape, placed.dtype
        found.append(plan(src, layout, shape, dtype, costs=costs, one_exchange=True))
    return tuple(found)


def _placed(spec: DTensorSpec, strided: StridedReading | None) -> Placed:
    meta = spec.tensor_meta
    assert meta is not None
    return Placed(Layout.from_spec(spec, strided=strided), tuple(meta.shape), meta.dtype)
