"""Meshes of hundreds of ranks on torch's fake process group: shapes only, without memory. Each case
runs in its own process, because such a process group would stay in the caches of this one."""

import math
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness.ranks import FORK_SERVER
from torchtitan_lite.config.tables.activation_checkpoint import ActivationCheckpointConfig
from torchtitan_lite.config.tables.compile import CompileConfig
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.config.tables.training import PrecisionConfig
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, resolve_degrees
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, local_box
from torchtitan_lite.models import model_spec
from torchtitan_lite.parallel import parallelize
from torchtitan_lite.parallel.pipeline_stages import keep_only, plan_stages

CASES = {
    "70B on 256": (256, "llama3", "70B", {"tensor_parallel_degree": 8}),
    "405B on 1024": (
        1024,
        "llama3",
        "405B",
        {
            "tensor_parallel_degree": 8,
            "pipeline_parallel_degree": 8,
            "data_parallel_replicate_degree": 2,
            "context_parallel_degree": 2,
        },
    ),
    "largest mixture on 1024": (
        1024,
        "qwen3",
        "235B-A22B",
        {
            "tensor_parallel_degree": 4,
            "context_parallel_degree": 2,
            "pipeline_parallel_degree": 2,
            "expert_parallel_degree": 32,
        },
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(name, marks=pytest.mark.matrix) for name in ("70B on 256", "405B on 1024")),
        "largest mixture on 1024",
    ],
)
def test_the_shards_of_a_large_mesh_cover_the_model(case: str) -> None:
    with ProcessPoolExecutor(1, mp_context=FORK_SERVER) as process:
        held, of_stages, num_params, peak_gib = process.submit(_last_rank, *CASES[case]).result()
    # Uneven shards of a dim leave some ranks slightly less than others.
    assert of_stages == num_params
    world_size = CASES[case][0]
    replicas = CASES[case][3].get("data_parallel_replicate_degree", 1)
    assert 0.7 < held * world_size / (num_params * replicas) < 1.3
    assert peak_gib < 1.0


def _last_rank(
    world_size: int, name: str, flavor: str, degrees: dict[str, int]
) -> tuple[int, int, int, float]:
    """Return the elements of the last rank, the distinct elements of all stages, the elements of
    the model, and this process's peak memory in GiB."""
    dist.init_process_group("fake", store=FakeStore(), rank=world_size - 1, world_size=world_size)
    config = ParallelismConfig.model_validate(degrees)
    mesh = Mesh(detect_device("cpu"), resolve_degrees(config, world_size))
    assert mesh.device_mesh.size() == world_size
    spec = model_spec(ModelConfig(name=name, flavor=flavor))
    plan = plan_stages(spec, config) if mesh.degrees.pp > 1 else None
    rank = mesh.device_mesh.get_local_rank("pp")
    with torch.device("meta"):
        model = spec.build()
    others = 0
    if plan is not None:
        (stage,) = plan.of_rank(rank)
        full = sum(parameter.numel() for parameter in model.parameters())
        keep_only(model, spec, plan.modules[stage])
        others = full - sum(parameter.numel() for parameter in model.parameters())
    parallelize(
        model,
        spec,
        mesh,
        parallelism=config,
        precision=PrecisionConfig(dtype="bfloat16"),
        checkpointing=ActivationCheckpointConfig(),
        compilation=CompileConfig(),
    )
    held = 0
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and parameter.to_local().is_meta
        assert tuple(parameter.to_local().shape) == local_box(parameter).size
        held += parameter.to_local().numel()
    peak_gib = detect_device("cpu").peak_memory_gib()
    return held, _covered(model) + others, spec.cost(1).num_params, peak_gib


def _covered(model: nn.Module) -> int:
    """Return the elements of all ranks of a stage, counting each box once."""
    alike = Counter(
        (tuple(p.shape), p.device_mesh.shape, p.placements)
        for p in model.parameters()
        if isinstance(p, DTensor)
    )
    total = 0
    for (shape, mesh_shape, placements), number in alike.items():
        mesh = HolderMesh.ranks(*mesh_shape)
        layout = Layout.from_placements(mesh, placements, shape, strided="order")
        boxes = {layout.box(shape, place) for place in product(*map(range, mesh_shape))}
        total += number * sum(math.prod(box.size) for box in boxes)
    return total
