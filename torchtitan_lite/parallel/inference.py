"""Parallelism for inference: tensor parallelism alone, so that no weight is communicated in
forward, and data parallelism over the other ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.errors import MeshError
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel import expert, tensor


def inference_degrees(spec: ModelSpec, world_size: int, asked: int | None = None) -> ParallelDims:
    """Return the degrees for inference: tensor parallelism of degree `asked`, by default the
    largest that divides `world_size` and every sharded size (such as the key/value heads), and
    replicas over the other ranks. Experts are sharded too if their features divide by it, else
    replicated. Raises MeshError if `asked` does not divide all of these."""
    sizes = [world_size, *(size for _, size in spec.sharded_sizes)]
    fitting = [
        degree
        for degree in range(1, world_size + 1)
        if all(size % degree == 0 for size in sizes)
        and tensor.every_rank_has_rows(spec.vocab_size, degree)
    ]
    fitting = fitting if spec.shard_plan else [1]
    if asked is not None and asked not in fitting:
        sizes = ", ".join(f"{size} {what}" for what, size in spec.sharded_sizes)
        raise MeshError(
            f"Tensor parallelism of degree {asked} is not possible: the degree must divide the "
            f"number of processes ({world_size}) and every sharded size of {spec.name} "
            f"{spec.flavor}: {sizes or 'none'}. Use one of {', '.join(map(str, fitting))}."
        )
    tp = max(fitting) if asked is None else asked
    etp = tp if spec.num_experts and spec.expert_width % tp == 0 else 1
    return ParallelDims(dp_replicate=world_size // tp, tp=tp, etp=etp)


def broadcast_from_first(numbers: Sequence[int], mesh: Mesh) -> list[int]:
    """Broadcast `numbers` from the first rank of the tp group: those of other ranks may differ
    where the order of a sum is not deterministic. Every rank must call it, with equally many."""
    if mesh.degrees.tp == 1:
        return list(numbers)
    values = torch.tensor(numbers)
    dist.broadcast(values, group=mesh.device_mesh.get_group("tp"), group_src=0)
    return values.tolist()


def apply(model: nn.Module, spec: ModelSpec, mesh: Mesh) -> None:
    """Shard `model`, which is on the meta device, over a mesh of `inference_degrees`. Each rank
    processes entire sequences, of any length."""
    parallelism = ParallelismConfig(enable_sequence_parallel=False)
    expert.apply(model, spec, mesh, parallelism)
    tensor.apply(model, spec, mesh, parallelism)
