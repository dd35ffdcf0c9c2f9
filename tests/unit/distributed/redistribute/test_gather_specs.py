"""Tensors of other ranks are known by name."""

import torch
from torch.distributed.tensor import DTensor, Shard

from tests.harness.threads import run_on_threads
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import AXES, Mesh, ParallelDims
from torchtitan_lite.distributed.redistribute.execution.serialization import gather_specs


def test_each_rank_knows_the_tensors_of_the_other_stages() -> None:
    def gather() -> dict[str, tuple[int, ...]]:
        mesh = Mesh(detect_device("cpu"), ParallelDims(pp=2))
        stage = mesh.device_mesh[AXES[1:]]
        own = DTensor.from_local(torch.zeros(3 + mesh.rank), stage, [Shard(0)] * 4)
        found = gather_specs({f"weight {mesh.rank}": own})
        return {name: tuple(spec.shape) for name, spec in found.items()}

    assert run_on_threads(2, gather) == [{"weight 0": (3,), "weight 1": (4,)}] * 2
