"""Layouts as plain JSON, for what travels between processes or lies in files.

Invariant: what is read is checked in full, and nothing in it runs. Layer: above layout.
"""

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute.holder_mesh import HolderMesh
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.placements import placement_text
from torchtitan_lite.torch_compat import strided_shard

_PLACEMENT = re.compile(r"R|S([0-9]{1,3})(?:/([1-9][0-9]{0,9}))?|P\(([a-z]{1,16})\)", re.ASCII)
_Size = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _MeshJson(_Strict):
    shape: list[_Size]
    holders: list[int | str]
    axes: list[str]


class _OrderJson(_Strict):
    dim: _Size
    axes: list[_Size]


class _LayoutJson(_Strict):
    mesh: _MeshJson
    placements: list[str]
    shard_order: list[_OrderJson]


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """A layout as lists, strings and numbers. Raises LayoutError for a holder that is neither a
    number nor a string."""
    odd = next((h for h in layout.mesh.holders if type(h) not in (int, str)), None)
    if odd is not None:
        raise LayoutError(f"Holder {odd!r} of {layout.mesh} is no number and no string for JSON.")
    return {
        "mesh": {
            "shape": list(layout.mesh.shape),
            "holders": list(layout.mesh.holders),
            "axes": list(layout.mesh.axes),
        },
        "placements": [placement_text(placement) for placement in layout.placements],
        "shard_order": [{"dim": dim, "axes": list(axes)} for dim, axes in layout.shard_order],
    }


def layout_from_json(value: Any) -> Layout:
    """The layout that `layout_to_json` gave as `value`. Raises LayoutError, naming the part, for
    anything else."""
    try:
        read = _LayoutJson.model_validate(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise LayoutError(f"{value!r:.200} is no layout: {where}: {first['msg']}.") from None
    mesh = HolderMesh(tuple(read.mesh.shape), tuple(read.mesh.holders), tuple(read.mesh.axes))
    order = {cuts.dim: tuple(cuts.axes) for cuts in read.shard_order}
    if len(order) != len(read.shard_order):
        raise LayoutError(f"{value!r:.200} is no layout: shard_order names a dim twice.")
    return Layout(mesh, [_placement(text) for text in read.placements], order)


def _placement(text: str) -> Placement:
    found = _PLACEMENT.fullmatch(text)
    if found is None:
        raise LayoutError(f"{text!r:.40} is no placement; R, S0, S0/2 and P(sum) are.")
    dim, split, op = found.groups()
    if op is not None:
        return Partial(op)
    if dim is None:
        return Replicate()
    return Shard(int(dim)) if split is None else strided_shard(int(dim), int(split))
