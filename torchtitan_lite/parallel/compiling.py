"""torch.compile, block by block: the repeated blocks share one compiled graph, so the cost of
compiling does not grow with the number of layers. Layer: above nn, mesh and spec; `expert`.
"""

import torch
from torch import nn

from torchtitan_lite.mesh import Mesh
from torchtitan_lite.nn.moe import Experts
from torchtitan_lite.parallel.blocks import blocks_of
from torchtitan_lite.parallel.expert import has_own_mesh
from torchtitan_lite.schema.compile import CompileConfig
from torchtitan_lite.spec import ModelSpec


def apply(model: nn.Module, spec: ModelSpec, mesh: Mesh, config: CompileConfig) -> None:
    """Compile the forward of each block; parameter names stay as they are.

    Only forward, not the whole call: the hooks by which FSDP gathers weights stay outside. A block
    is one graph, but for the experts that lie elsewhere, where the host waits for what travels.
    """
    if not config.covers("model"):
        return
    experts_apart = has_own_mesh(spec, mesh)
    if experts_apart:
        for module in model.modules():
            if isinstance(module, Experts):
                setattr(module, "forward", torch.compiler.disable(module.forward))  # noqa: B010
    for block in blocks_of(model, spec):
        block.forward = torch.compile(
            block.forward,
            backend=config.backend,
            fullgraph=not experts_apart,
            # DTensor cannot flatten a sharded sequence behind a batch of symbolic size (torch 2.13:
            # "Cannot propagate strict view sharding"): another batch size is another graph.
            dynamic=False if mesh.degrees.tp > 1 else None,
        )
