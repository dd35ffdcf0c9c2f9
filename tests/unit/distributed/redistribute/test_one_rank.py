"""What is checked before parts are exchanged, and what need not be exchanged, on one rank."""

import json

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchtitan_lite.core.errors import LayoutError, RedistributionError
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.redistribute import (
    HolderMesh,
    Layout,
    TensorSpec,
    plan,
    redistribute_state_dict,
)
from torchtitan_lite.distributed.redistribute.execution import serialization
from torchtitan_lite.distributed.redistribute.execution.execute import (
    execute_exchange,
    fused_exchange,
    shared_memory_for,
)
from torchtitan_lite.distributed.redistribute.planning.cost import DEFAULT_OPTIONS

_ONE = HolderMesh((1,), (0,), ("dp",))
_CPU = torch.device("cpu")


def test_parts_that_do_not_fit_their_layouts_are_errors(mesh: Mesh) -> None:
    found = plan(Layout(_ONE, [Shard(0)]), Layout(_ONE, [Replicate()]), (4, 3), torch.float32)
    fits, other = torch.ones(4, 3), torch.ones(3, 4)
    (moved,) = execute_exchange([found], [fits], [None], _CPU, DEFAULT_OPTIONS)
    assert torch.equal(moved, fits)
    # One rank allocates no shared memory.
    allocated = shared_memory_for.cache_info().misses
    fused_exchange([found], (0,), _CPU, DEFAULT_OPTIONS)
    assert shared_memory_for.cache_info().misses == allocated
    with pytest.raises(LayoutError, match=r"has a part of shape \(3, 4\)"):
        execute_exchange([found], [other], [None], _CPU, DEFAULT_OPTIONS)
    for out in (other, fits.double(), torch.ones(3, 4).t()):
        with pytest.raises(RedistributionError, match="out has a part of shape"):
            execute_exchange([found], [fits], [out], _CPU, DEFAULT_OPTIONS)


def test_a_tensor_to_fill_has_the_layout_that_is_wanted(mesh: Mesh) -> None:
    devices = mesh.device_mesh["dp_shard"]
    given = DTensor.from_local(torch.ones(4, 3), devices, [Shard(0)])
    wanted = {"a": Layout(HolderMesh.from_device_mesh(devices), [Replicate()])}
    out = {"a": DTensor.from_local(torch.zeros(4, 3), devices, [Replicate()])}
    redistribute_state_dict({"a": given}, wanted, out=out)
    assert torch.equal(out["a"].to_local(), torch.ones(4, 3))
    # Of the same part of this rank.
    out = {"a": DTensor.from_local(torch.zeros(4, 3), devices, [Shard(1)])}
    with pytest.raises(RedistributionError):
        redistribute_state_dict({"a": given}, wanted, out=out)


def test_a_shard_that_is_the_same_in_another_layout_is_kept() -> None:
    mesh = HolderMesh((2,), (0, 1), ("dp",))
    square = HolderMesh((2, 1), (0, 1), ("dp", "tp"))
    same = plan(Layout(mesh, [Shard(0)]), Layout(square, [Shard(0), Replicate()]), (4,), torch.int8)
    other = plan(Layout(mesh, [Shard(0)]), Layout(mesh, [Replicate()]), (4,), torch.int8)
    assert [same.keeps_shard(rank) for rank in (0, 1)] == [True, True]
    assert [other.keeps_shard(rank) for rank in (0, 1)] == [False, False]


@pytest.mark.parametrize(
    ("holders", "text"),
    [((0, 1), "(dp 2)"), ((1, 0), "(dp 2 of 1, 0)"), (("a", "b"), "(dp 2 of a, b)")],
)
def test_a_mesh_of_all_ranks_in_order_does_not_list_them(
    holders: tuple[int | str, ...], text: str
) -> None:
    assert str(HolderMesh((2,), holders, ("dp",))) == text


def test_a_description_of_too_few_dims_is_rejected() -> None:
    spec = TensorSpec(Layout(_ONE, [Shard(1)]), (4, 3), torch.float32)
    text = serialization._to_json({"a": spec})
    assert serialization._from_json(text) == {"a": spec}
    described = json.loads(text)
    described["tensors"]["a"][1] = [4]
    with pytest.raises(LayoutError, match="shards dim 1"):
        serialization._from_json(json.dumps(described).encode())
    described["tensors"]["a"][0] = 1
    with pytest.raises(LayoutError, match="describes a by layout 1 of 1"):
        serialization._from_json(json.dumps(described).encode())
