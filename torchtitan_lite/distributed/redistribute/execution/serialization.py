"""Layouts and tensor specs as JSON, for files and for messages between ranks.

Invariant: all input is validated, and nothing in it is executed or unpickled.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchtitan_lite.core.errors import LayoutError
from torchtitan_lite.distributed.host_collectives import all_gather_bytes
from torchtitan_lite.distributed.redistribute.planning.layout import Layout, TensorSpec
from torchtitan_lite.distributed.redistribute.planning.placements import (
    HolderMesh,
    StridedReading,
    placement_text,
)
from torchtitan_lite.distributed.torch_compat import strided_shard

_PLACEMENT = re.compile(r"R|S([0-9]{1,3})(?:/([1-9][0-9]{0,9}))?|P\(([a-z]{1,16})\)", re.ASCII)

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}

_Size = Annotated[int, Field(ge=0, lt=1 << 62)]


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Convert a layout to lists, strings and numbers. Raises LayoutError for a holder that is
    neither a number nor a string."""
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
    """Restore a layout from `layout_to_json`. Raises LayoutError, naming the part, for anything
    else."""
    try:
        read = _LayoutJson.model_validate(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"{where}: {first['msg']}"
        raise LayoutError(f"{value!r:.200} is not a valid layout: {problem}.") from None
    mesh = HolderMesh(tuple(read.mesh.shape), tuple(read.mesh.holders), tuple(read.mesh.axes))
    order = {splits.dim: tuple(splits.axes) for splits in read.shard_order}
    if len(order) != len(read.shard_order):
        raise LayoutError(f"{value!r:.200} is not a valid layout: shard_order names a dim twice.")
    return Layout(mesh, [_placement(text) for text in read.placements], order)


def gather_specs(
    tensors: Mapping[str, DTensor], *, strided: StridedReading | None = "order"
) -> dict[str, TensorSpec]:
    """Return all tensors of all ranks by name, in the same order on every rank, given this rank's.
    Every holder of a tensor must give the same spec, and every rank must call it. Raises
    LayoutError if ranks disagree about a name."""
    rank = dist.get_rank()
    placed = {name: TensorSpec.from_dtensor(tensor, strided) for name, tensor in tensors.items()}
    first = {name: p for name, p in placed.items() if p.layout.mesh.holders[0] == rank}
    specs: dict[str, TensorSpec] = {}
    for text in filter(None, all_gather_bytes(_to_json(first))):
        for name, described in _from_json(text).items():
            if specs.setdefault(name, described) is not described:
                raise LayoutError(
                    f"{name} is a tensor on {specs[name].layout.mesh} and another one on "
                    f"{described.layout.mesh}. Give tensors of other ranks other names."
                )
    return specs


def match_layouts(
    wanted: Mapping[str, TensorSpec], stored: Mapping[str, TensorSpec]
) -> dict[str, Layout]:
    """Return the layouts of `wanted` as destinations of `stored`. Raises LayoutError with every
    name, shape and dtype in which the two differ."""
    problems = [f"{name} is missing" for name in wanted.keys() - stored.keys()]
    problems += [f"{name} is unexpected" for name in stored.keys() - wanted.keys()]
    for name in wanted.keys() & stored.keys():
        there, here = ((tuple(p.shape), p.dtype) for p in (stored[name], wanted[name]))
        if there != here:
            problems.append(f"{name} is {there[0]}, {there[1]}, but must be {here[0]}, {here[1]}")
    if problems:
        shown = "; ".join(sorted(problems)[:8]) + ("; ..." if len(problems) > 8 else "")
        raise LayoutError(
            f"The two states do not have the same tensors ({len(problems)} differ): {shown}."
        )
    return {name: placed.layout for name, placed in wanted.items()}


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


def _placement(text: str) -> Placement:
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise LayoutError(f"{text!r:.40} is not a valid placement; R, S0, S0/2 and P(sum) are.")
    dim, split, op = match.groups()
    if op is not None:
        return Partial(op)
    if dim is None:
        return Replicate()
    return Shard(int(dim)) if split is None else strided_shard(int(dim), int(split))


class _Description(BaseModel):
    """The specs of one rank. Each layout occurs once, because many tensors share one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    layouts: list[dict[str, Any]]
    tensors: dict[str, tuple[_Size, list[_Size], str]]
    """Name -> (index of its layout, shape, dtype)."""


def _to_json(placed: Mapping[str, TensorSpec]) -> bytes:
    if not placed:
        return b""
    indices: dict[Layout, int] = {}
    tensors = {
        name: (
            indices.setdefault(p.layout, len(indices)),
            list(p.shape),
            str(p.dtype).removeprefix("torch."),
        )
        for name, p in placed.items()
    }
    described = {"layouts": [layout_to_json(layout) for layout in indices], "tensors": tensors}
    return json.dumps(described).encode()


def _from_json(text: bytes) -> dict[str, TensorSpec]:
    try:
        read = _Description.model_validate_json(text)
    except ValidationError as error:
        raise LayoutError(f"A rank's description cannot be read: {error.errors()[0]}") from None
    layouts = [layout_from_json(layout) for layout in read.layouts]
    specs = {}
    for name, (index, shape, dtype) in read.tensors.items():
        if index >= len(layouts) or dtype not in _DTYPES:
            raise LayoutError(
                f"A rank describes {name} by layout {index} of {len(layouts)} and dtype {dtype!r}."
            )
        layouts[index].check(shape)
        specs[name] = TensorSpec(layouts[index], tuple(shape), _DTYPES[dtype])
    return specs
