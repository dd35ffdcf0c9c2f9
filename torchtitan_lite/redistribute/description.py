"""What the ranks hold together, told to all of them: with a pipeline each stage has tensors of its
own, and a plan needs to know them on every rank.

Descriptions travel as JSON; nothing is pickled. Layer: above layout_json and state_dict.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.tensor import DTensor

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.messages import gather_texts
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.layout_json import layout_from_json, layout_to_json
from torchtitan_lite.redistribute.state_dict import Placed
from torchtitan_lite.redistribute.strided import StridedReading

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_Size = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Description(BaseModel):
    """Of one rank. Layouts are told once each, since many tensors lie alike."""

    model_config = ConfigDict(extra="forbid", strict=True)

    layouts: list[dict[str, Any]]
    tensors: dict[str, tuple[_Size, list[_Size], str]]
    """Name -> (index of its layout, shape, dtype)."""


def describe(
    tensors: Mapping[str, DTensor], *, strided: StridedReading | None = "order"
) -> dict[str, Placed]:
    """All tensors of all ranks by name, in one order everywhere: given this rank's, which every
    holder of a tensor calls alike. Every rank must call it.

    Raises LayoutError where ranks tell different things of one name.
    """
    rank = dist.get_rank()
    placed = {name: Placed.of(tensor, strided) for name, tensor in tensors.items()}
    first = {name: p for name, p in placed.items() if p.layout.mesh.holders[0] == rank}
    found: dict[str, Placed] = {}
    for text in filter(None, gather_texts(_to_json(first))):
        for name, described in _from_json(text).items():
            if found.setdefault(name, described) is not described:
                raise LayoutError(
                    f"{name} is a tensor on {found[name].layout.mesh} and another one on "
                    f"{described.layout.mesh}. Give tensors of other ranks other names."
                )
    return found


def layouts_of(wanted: Mapping[str, Placed], given: Mapping[str, Placed]) -> dict[str, Layout]:
    """The layouts of `wanted`, to which tensors of `given` can go.

    Raises LayoutError with every name, shape and dtype in which the two differ.
    """
    problems = [f"{name} is missing" for name in wanted.keys() - given.keys()]
    problems += [f"{name} has no place to go to" for name in given.keys() - wanted.keys()]
    for name in wanted.keys() & given.keys():
        there, here = ((tuple(p.shape), p.dtype) for p in (given[name], wanted[name]))
        if there != here:
            problems.append(f"{name} is {there[0]}, {there[1]}, and {here[0]}, {here[1]} is wanted")
    if problems:
        shown = "; ".join(sorted(problems)[:8]) + ("; ..." if len(problems) > 8 else "")
        raise LayoutError(
            f"The two states do not have the same tensors ({len(problems)} differ): {shown}."
        )
    return {name: placed.layout for name, placed in wanted.items()}


def _to_json(placed: Mapping[str, Placed]) -> bytes:
    if not placed:
        return b""
    numbers: dict[Layout, int] = {}
    tensors = {
        name: (
            numbers.setdefault(p.layout, len(numbers)),
            list(p.shape),
            str(p.dtype).removeprefix("torch."),
        )
        for name, p in placed.items()
    }
    described = {"layouts": [layout_to_json(layout) for layout in numbers], "tensors": tensors}
    return json.dumps(described).encode()


def _from_json(text: bytes) -> dict[str, Placed]:
    try:
        read = _Description.model_validate_json(text)
    except ValidationError as error:
        raise LayoutError(f"A rank's description cannot be read: {error.errors()[0]}") from None
    layouts = [layout_from_json(layout) for layout in read.layouts]
    found = {}
    for name, (number, shape, dtype) in read.tensors.items():
        if number >= len(layouts) or dtype not in _DTYPES:
            raise LayoutError(
                f"A rank describes {name} by layout {number} of {len(layouts)} and dtype {dtype!r}."
            )
        layouts[number].check(shape)
        found[name] = Placed(layouts[number], tuple(shape), _DTYPES[dtype])
    return found
