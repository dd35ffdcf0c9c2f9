"""Optimizer, learning rate schedule and gradient norm. Layer: above device and mesh."""

from torchtitan_lite.optim.gradients import local_gradients, scale_, square_norm
from torchtitan_lite.optim.learning_rate import WarmupStableDecay, build_schedule
from torchtitan_lite.optim.sharded import ShardedOptimizer, build_optimizer, placed_like

__all__ = [
    "ShardedOptimizer",
    "WarmupStableDecay",
    "build_optimizer",
    "build_schedule",
    "local_gradients",
    "placed_like",
    "scale_",
    "square_norm",
]
