"""Layouts as JSON: a round trip gives the same layout, and invalid input is rejected."""

import copy
import json
from typing import Any

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from torchtitan_lite.core.errors import LayoutError
from torchtitan_lite.distributed.redistribute import (
    HolderMesh,
    Layout,
    layout_from_json,
    layout_to_json,
)
from torchtitan_lite.distributed.torch_compat import strided_shard

MESH = HolderMesh((2, 3), tuple(range(6)), ("dp", "tp"))
LAYOUTS = [
    Layout(MESH, [Shard(0), Shard(0)], {0: (1, 0)}),
    Layout(MESH, [Replicate(), Shard(12)]),
    Layout(MESH, [Partial("sum"), Partial("avg")]),
    Layout(MESH, [strided_shard(1, 3), Shard(1)]),
    Layout(HolderMesh((2,), ("rank-00000.safetensors", 7)), [Partial("max")]),
    Layout(HolderMesh((), (3,)), []),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_survives_a_round_trip(layout: Layout) -> None:
    assert layout_from_json(json.loads(json.dumps(layout_to_json(layout)))) == layout


def test_a_holder_without_a_json_form_is_rejected() -> None:
    with pytest.raises(LayoutError, match=r"Holder \(1, 2\) .* no number and no string"):
        layout_to_json(Layout(HolderMesh((1,), ((1, 2),)), [Replicate()]))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (("placements",), ["R"], "1 placements"),
        (("placements",), ["R", "S-1"], "'S-1' is not a valid placement"),
        (("placements",), ["R", "S0/0"], "'S0/0' is not a valid placement"),
        (("placements",), ["R", "S0\n"], "is not a valid placement"),
        (("placements",), ["R", "P(__import__)"], "is not a valid placement"),
        (("placements",), ["R", "P(median)"], "joined by 'median'"),
        (("placements",), ["R", 0], "placements.1"),
        (("placements",), "RR", "placements"),
        (("mesh", "shape"), [2, True], "mesh.shape.1"),
        (("mesh", "shape"), [2, -3], "mesh.shape.1"),
        (("mesh", "shape"), [2, 2], "needs 4 holders"),
        (("mesh", "holders"), [0, 1, 2, 3, 4, 4], "Holder 4 is twice"),
        (("mesh", "holders"), [0, 1, 2, 3, 4, 5.0], "mesh.holders.5"),
        (("mesh", "axes"), ["dp", "dp"], "different axis names"),
        (("mesh", "rest"), 1, "mesh.rest"),
        (("shard_order",), [{"dim": 0, "axes": [0]}], "must name the axes"),
        (("shard_order",), [{"dim": 0, "axes": [1, 0]}] * 2, "names a dim twice"),
        (("shard_order",), [[0, [1, 0]]], "shard_order.0"),
    ],
)
def test_invalid_parts_are_rejected_by_name(
    part: tuple[str, ...], value: Any, message: str
) -> None:
    written = copy.deepcopy(layout_to_json(LAYOUTS[0]))
    inner = written
    for key in part[:-1]:
        inner = inner[key]
    inner[part[-1]] = value
    with pytest.raises(LayoutError, match=message):
        layout_from_json(written)


@pytest.mark.parametrize("value", [None, [], "R", {}, 3])
def test_anything_but_an_object_is_rejected(value: Any) -> None:
    with pytest.raises(LayoutError, match="is not a valid layout"):
        layout_from_json(value)
