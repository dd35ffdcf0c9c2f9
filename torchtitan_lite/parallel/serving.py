"""A copy of a model that gives text: cut by tensor parallelism alone, so that no weight travels in
a forward. The ranks hold as many copies as there are. Layer: above nn, mesh and spec; `expert`,
`tensor`.
"""

from torch import nn

from torchtitan_lite.mesh import Degrees, Mesh, ParallelismConfig
from torchtitan_lite.parallel import expert, tensor
from torchtitan_lite.spec import ModelSpec


def serving_degrees(spec: ModelSpec, world_size: int) -> Degrees:
    """The largest degree of tensor parallelism that divides `world_size` and all that it cuts (the
    heads of keys and values among it); the other ranks hold further copies. Experts are cut too
    where their features divide by it, else each rank holds all of them."""
    sizes = [world_size, *(size for _, size in spec.cut_sizes)]
    fitting = [
        degree
        for degree in range(1, world_size + 1)
        if all(size % degree == 0 for size in sizes) and tensor.reaches_all(spec.vocab_size, degree)
    ]
    tp = max(fitting) if spec.shard_plan else 1
    etp = tp if spec.num_experts and spec.expert_width % tp == 0 else 1
    return Degrees(dp_replicate=world_size // tp, tp=tp, etp=etp)


def apply(model: nn.Module, spec: ModelSpec, mesh: Mesh) -> None:
    """Cut `model`, which is on the meta device, over a mesh of `serving_degrees`. Each rank sees
    whole sequences, of any length."""
    parallelism = ParallelismConfig(enable_sequence_parallel=False)
    expert.apply(model, spec, mesh, parallelism)
    tensor.apply(model, spec, mesh, parallelism)
