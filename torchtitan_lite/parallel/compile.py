"""torch.compile per block: the repeated blocks share one compiled graph, so the compile time does
not grow with the number of layers."""

import torch
from torch import nn

from torchtitan_lite.config.tables.compile import CompileConfig
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.torch_compat import raise_recompile_limit
from torchtitan_lite.nn.moe import Experts
from torchtitan_lite.nn.spec import ModelSpec, blocks_of
from torchtitan_lite.parallel.expert import has_own_mesh

_GRAPHS_PER_BLOCK = 8
"""Graphs of a block: in training and validation, for other batch sizes."""


def apply(model: nn.Module, spec: ModelSpec, mesh: Mesh, config: CompileConfig) -> None:
    """Compile the forward of each block; parameter names do not change.

    Only the forward, not the call: the hooks by which FSDP gathers weights stay outside. A block is
    one graph, except with experts on other ranks or with a capacity, because the host waits for the
    number of their tokens.
    """
    if not config.covers("model"):
        return
    # Blocks of several kinds share one code object, for which the compiler keeps 8 graphs.
    raise_recompile_limit(_GRAPHS_PER_BLOCK * spec.num_layers)
    experts_apart = has_own_mesh(spec, mesh)
    drops_tokens = spec.expert_capacity_factor is not None
    if experts_apart:
        for module in model.modules():
            if isinstance(module, Experts):
                setattr(module, "forward", torch.compiler.disable(module.forward))  # noqa: B010
    for block in blocks_of(model, spec):
        block.forward = torch.compile(
            block.forward,
            backend=config.backend,
            fullgraph=not (experts_apart or drops_tokens),
            # DTensor cannot flatten a sharded sequence behind a batch of symbolic size (torch 2.13:
            # "Cannot propagate strict view sharding"): another batch size is another graph.
            dynamic=False if mesh.degrees.tp > 1 and not drops_tokens else None,
        )
