"""Optimizer (`optimizer.build_optimizer`), learning rate scheduler and gradient norm."""

from torchtitan_lite.optim.gradients import local_gradients, square_norm
from torchtitan_lite.optim.lr_scheduler import WarmupStableDecay, build_lr_scheduler
from torchtitan_lite.optim.optimizer import ShardedOptimizer, build_optimizer, placed_like

__all__ = [
    "ShardedOptimizer",
    "WarmupStableDecay",
    "build_lr_scheduler",
    "build_optimizer",
    "local_gradients",
    "placed_like",
    "square_norm",
]
