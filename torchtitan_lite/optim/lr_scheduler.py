"""The learning rate schedule: a pure function of the number of committed steps, so that a skipped
step has no effect on it."""

import math
from dataclasses import dataclass

from torchtitan_lite.config.tables.lr_scheduler import LRSchedulerConfig
from torchtitan_lite.config.tables.optimizer import OptimizerConfig
from torchtitan_lite.core.log import logger


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay:
    """A learning rate schedule, as plain data."""

    peak_lr: float
    warmup_steps: int
    decay_steps: int
    total_steps: int
    decay_type: str
    min_factor: float

    def lr(self, committed_steps: int) -> float:
        """Return the learning rate of the step after `committed_steps` committed ones. The decay
        would end one step after the last, so no step has a rate of 0."""
        if committed_steps < self.warmup_steps:
            return self.peak_lr * (committed_steps + 1) / self.warmup_steps
        steps_into_decay = committed_steps - (self.total_steps - self.decay_steps)
        if steps_into_decay <= 0:
            return self.peak_lr
        progress = min(1.0, steps_into_decay / self.decay_steps) if self.decay_steps else 1.0
        shape = {
            "linear": 1 - progress,
            "sqrt": 1 - math.sqrt(progress),
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
        }[self.decay_type]
        return self.peak_lr * (self.min_factor + (1 - self.min_factor) * shape)


def build_lr_scheduler(
    config: LRSchedulerConfig, optimizer: OptimizerConfig, steps: int
) -> WarmupStableDecay:
    """Build the schedule of a run of `steps` steps. Phases longer than the run are shortened, with
    a log line for those that the user has set."""
    total = config.total_steps or steps
    warmup = min(config.warmup_steps, total)
    wanted = total - warmup
    if config.decay_ratio is not None:
        wanted = round(total * config.decay_ratio)
    decay = min(wanted, total - warmup)
    phases = {"warmup_steps": (config.warmup_steps, warmup), "decay_ratio": (wanted, decay)}
    shortened = [
        f"{key} has {used:,} instead of {asked:,} steps"
        for key, (asked, used) in phases.items()
        if used < asked and key in config.model_fields_set
    ]
    if shortened:
        logger.info(
            "lr_scheduler: the schedule has %s steps, %s of them warmup, so that %s.",
            f"{total:,}",
            f"{warmup:,}",
            " and ".join(shortened),
        )
    return WarmupStableDecay(
        peak_lr=optimizer.lr,
        warmup_steps=warmup,
        decay_steps=decay,
        total_steps=total,
        decay_type=config.decay_type,
        min_factor=config.min_lr_factor,
    )
