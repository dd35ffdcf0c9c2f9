"""The [compile] table."""

from typing import Literal

from torchtitan_lite.config.tables.section import Section


class CompileConfig(Section):
    """torch.compile per block."""

    enable: bool = False
    """Compile the repeated blocks of the model."""
    components: list[Literal["model", "loss"]] = ["model", "loss"]
    """What to compile: "model" the blocks, "loss" the output projection with the loss."""
    backend: str = "inductor"
    """Backend of torch.compile."""

    def covers(self, component: Literal["model", "loss"]) -> bool:
        """Whether `component` is to be compiled."""
        return self.enable and component in self.components
