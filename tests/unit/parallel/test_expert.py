"""Which meshes shard experts apart from the other weights."""

from dataclasses import replace

import pytest

from tests.unit.models.tiny import tiny_spec
from torchtitan_lite.mesh import Mesh, ParallelDims
from torchtitan_lite.parallel.expert import has_own_mesh


@pytest.mark.parametrize("axis", ["ep", "etp", "tp", "dp_shard"])
@pytest.mark.parametrize("num_experts", [0, 4])
def test_experts_have_a_mesh_of_their_own_if_the_mesh_splits_them(
    axis: str, num_experts: int, mesh: Mesh
) -> None:
    mesh.degrees = ParallelDims(**{axis: 2})
    spec = replace(tiny_spec(), num_experts=num_experts)
    assert has_own_mesh(spec, mesh) == (num_experts > 0 and axis != "dp_shard")
