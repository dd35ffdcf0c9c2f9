"""The [training] table: its keys of data, of precision, and the rest."""

from typing import Annotated, Literal

from torchtitan_lite.schema.data import DataConfig
from torchtitan_lite.schema.section import Section, above, at_least


class PrecisionConfig(Section):
    """Data types, as keys of [training]."""

    dtype: Literal["bfloat16", "float32", "float64"] = "float32"
    """Data type of parameters, gradients and optimizer state. float64 is for comparisons."""
    mixed_precision_param: Literal["bfloat16", "float32", "auto"] = "auto"
    """Data type in which parameters take part in forward and backward. "auto": bfloat16 on a GPU,
    `training.dtype` elsewhere (torchtitan: bfloat16 everywhere)."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Data type in which gradients are summed over ranks, where theirs is narrower."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and take the optimizer's
    step there."""


class TrainingConfig(PrecisionConfig, DataConfig):
    """What to train on, for how long, and in which data types."""

    steps: Annotated[int, at_least(1)] = 10000
    """Optimizer steps to take in all; a resumed run counts those before it."""
    max_norm: Annotated[float, above(0)] = 1.0
    """Gradients are scaled down to this norm when theirs is greater."""
    gc_freq: Annotated[int, at_least(1)] = 50
    """Collect garbage every this many steps, on all ranks at once."""
    gc_debug: bool = False
    """Collect garbage in every step and report reference cycles that hold tensors; slow."""
