"""torch.compile, block by block: the repeated blocks share one compiled graph, so the cost of
compiling does not grow with the number of layers. Layer: above spec.
"""

from torch import nn

from torchtitan_lite.parallel.blocks import blocks_of
from torchtitan_lite.parallel.config import CompileConfig
from torchtitan_lite.spec import ModelSpec


def apply(model: nn.Module, spec: ModelSpec, config: CompileConfig) -> None:
    """Compile each block in place; parameter names stay as they are."""
    if config.enable and "model" in config.components:
        for block in blocks_of(model, spec):
            block.compile(backend=config.backend, fullgraph=True)
