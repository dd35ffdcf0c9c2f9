"""torch.compile, block by block: the repeated blocks share one compiled graph, so the cost of
compiling does not grow with the number of layers. Layer: above spec.
"""

import torch
from torch import nn

from torchtitan_lite.parallel.blocks import blocks_of
from torchtitan_lite.parallel.config import CompileConfig
from torchtitan_lite.spec import ModelSpec


def apply(model: nn.Module, spec: ModelSpec, config: CompileConfig) -> None:
    """Compile the forward of each block; parameter names stay as they are.

    Only forward, not the whole call: the hooks by which FSDP gathers weights stay outside.
    """
    if config.enable and "model" in config.components:
        for block in blocks_of(model, spec):
            block.forward = torch.compile(block.forward, backend=config.backend, fullgraph=True)
