"""The [lora] table."""

from typing import Annotated

from torchtitan_lite.config.tables.section import Section, above, at_least


class LoRAConfig(Section):
    """Fine-tuning of low-rank adapters beside frozen weights (LoRA, arXiv:2106.09685). Enabled by
    "lora" in `model.converters`; the frozen weights are those of `checkpoint.initial_load_path`."""

    rank: Annotated[int, at_least(1)] = 8
    """Rank of the update of each linear layer."""
    alpha: Annotated[float, above(0)] = 16.0
    """Numerator of the update's factor, alpha / rank."""
    use_rslora: bool = False
    """Factor alpha / sqrt(rank), which suits high ranks (rank-stabilized LoRA, arXiv:2312.03732).
    """
    targets: list[str] = ["*"]
    """Linear layers with an adapter, by the end of their name in this project (fnmatch):
    "attention.wq", "feed_forward.*", "layers.0.*". Each pattern must match. Output, embedding,
    routers and stacked experts never have an adapter."""

    @property
    def scale(self) -> float:
        """Factor of the update."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)
