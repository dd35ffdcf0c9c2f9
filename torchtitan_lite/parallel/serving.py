"""A copy of a model that gives text: cut by tensor parallelism alone, so that no weight travels in
a forward. The ranks hold as many copies as there are. Layer: above nn, mesh and spec; `expert`,
`tensor`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lite.errors import MeshError
from torchtitan_lite.mesh import Degrees, Mesh
from torchtitan_lite.parallel import expert, tensor
from torchtitan_lite.schema.parallelism import ParallelismConfig
from torchtitan_lite.spec import ModelSpec


def serving_degrees(spec: ModelSpec, world_size: int, asked: int | None = None) -> Degrees:
    """The degree of tensor parallelism that is asked for, or else the largest: it divides
    `world_size` and all that it cuts (the heads of keys and values among it); the other ranks hold
    further copies. Experts are cut too where their features divide by it, else each rank holds all
    of them. Raises MeshError where the one that is asked for does not divide all of that."""
    sizes = [world_size, *(size for _, size in spec.cut_sizes)]
    fitting = [
        degree
        for degree in range(1, world_size + 1)
        if all(size % degree == 0 for size in sizes) and tensor.reaches_all(spec.vocab_size, degree)
    ]
    fitting = fitting if spec.shard_plan else [1]
    if asked is not None and asked not in fitting:
        cut = ", ".join(f"{size} {what}" for what, size in spec.cut_sizes)
        raise MeshError(
            f"Tensor parallelism over {asked} ranks was asked for, but its degree must divide the "
            f"number of processes ({world_size}) and what it cuts of {spec.name} {spec.flavor}: "
            f"{cut or 'nothing'}. Use one of {', '.join(map(str, fitting))}."
        )
    tp = max(fitting) if asked is None else asked
    etp = tp if spec.num_experts and spec.expert_width % tp == 0 else 1
    return Degrees(dp_replicate=world_size // tp, tp=tp, etp=etp)


def first_says(numbers: Sequence[int], mesh: Mesh) -> list[int]:
    """The `numbers` of the first rank of this rank's copy, on all of its ranks: their own might
    differ where sums are added in no fixed order. Every rank of a copy must call it with as
    many."""
    if mesh.degrees.tp == 1:
        return list(numbers)
    told = torch.tensor(numbers)
    dist.broadcast(told, group=mesh.device_mesh.get_group("tp"), group_src=0)
    return told.tolist()


def apply(model: nn.Module, spec: ModelSpec, mesh: Mesh) -> None:
    """Cut `model`, which is on the meta device, over a mesh of `serving_degrees`. Each rank sees
    whole sequences, of any length."""
    parallelism = ParallelismConfig(enable_sequence_parallel=False)
    expert.apply(model, spec, mesh, parallelism)
    tensor.apply(model, spec, mesh, parallelism)
