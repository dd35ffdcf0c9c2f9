"""Which meshes shard experts apart from the other weights, and whose tokens a router counts."""

from dataclasses import replace

import pytest
import torch

from tests.harness.threads import run_on_threads
from tests.unit.models.tiny import tiny_spec
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.nn.moe import MoEDims, Router
from torchtitan_lite.parallel.expert import _see_whole_sequences, has_own_mesh


@pytest.mark.parametrize("axis", ["ep", "etp", "tp", "dp_shard"])
@pytest.mark.parametrize("num_experts", [0, 4])
def test_experts_have_a_mesh_of_their_own_if_the_mesh_splits_them(
    axis: str, num_experts: int, mesh: Mesh
) -> None:
    mesh.degrees = ParallelDims(**{axis: 2})
    spec = replace(tiny_spec(), num_experts=num_experts)
    assert has_own_mesh(spec, mesh) == (num_experts > 0 and axis != "dp_shard")


@pytest.mark.parametrize(
    ("degrees", "enable_sequence_parallel", "totals"),
    [
        (ParallelDims(dp_shard=2, cp=2), True, [3, 3, 7, 7]),
        (ParallelDims(dp_shard=2, tp=2), True, [3, 3, 7, 7]),
        (ParallelDims(dp_shard=2, tp=2), False, [1, 2, 3, 4]),
        (ParallelDims(cp=2, tp=2), True, [10, 10, 10, 10]),
        (ParallelDims(cp=2, tp=2), False, [4, 6, 4, 6]),
    ],
)
def test_a_router_counts_the_tokens_of_entire_sequences(
    degrees: ParallelDims, enable_sequence_parallel: bool, totals: list[int]
) -> None:
    def count() -> int:
        mesh = Mesh(detect_device("cpu"), degrees)
        router = Router(6, MoEDims(num_experts=4, top_k=1, hidden_dim=8))
        config = ParallelismConfig(enable_sequence_parallel=enable_sequence_parallel)
        _see_whole_sequences(router, mesh, config)
        counts_BX = torch.tensor([[mesh.rank + 1]])
        total_BX = router.sum_over_sequence(counts_BX)
        assert counts_BX.item() == mesh.rank + 1
        return int(total_BX.item())

    assert run_on_threads(4, count) == totals
