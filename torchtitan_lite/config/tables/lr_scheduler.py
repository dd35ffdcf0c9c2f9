"""The [lr_scheduler] table."""

from typing import Annotated, Literal

from torchtitan_lite.config.tables.section import Section, at_least, between


class LRSchedulerConfig(Section):
    """Warmup, stable phase and decay of the learning rate (WSD, arXiv:2404.06395)."""

    warmup_steps: Annotated[int, at_least(0)] = 200
    """Warmup steps, over which the learning rate rises linearly from 0."""
    total_steps: Annotated[int, at_least(1)] | None = None
    """Length of the schedule. Unset: `training.steps`."""
    decay_ratio: Annotated[float, between(0, 1)] | None = None
    """Fraction of the steps at the end over which the learning rate decays. Unset: it decays right
    after warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay, over its progress p: 1 - p, 1 - sqrt(p), or (1 + cos(pi p)) / 2."""
    min_lr_factor: Annotated[float, between(0, 1)] = 0.0
    """Final learning rate, as a fraction of `optimizer.lr`."""
