"""The [training] table: its keys of data, of precision, and the rest."""

from typing import Annotated, Literal

from torchtitan_lite.config.tables.data import DataConfig
from torchtitan_lite.config.tables.section import BuiltIn, Section, above, at_least


class PrecisionConfig(Section):
    """Data types, as keys of [training]."""

    dtype: Literal["bfloat16", "float32", "float64"] = "float32"
    """Data type of parameters, gradients and optimizer state. float64 is for comparisons."""
    mixed_precision_param: Literal["bfloat16", "float32", "auto"] = "auto"
    """Data type of parameters in forward and backward. "auto": bfloat16 on a GPU, `training.dtype`
    elsewhere (torchtitan: bfloat16 everywhere)."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Data type of the gradient reduction, if theirs is narrower."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and run the optimizer there.
    """


CROSS_ENTROPY = "cross_entropy"
"""The loss of this package."""


class TrainingConfig(PrecisionConfig, DataConfig):
    """Data, length and data types of training."""

    loss: Annotated[str, BuiltIn((CROSS_ENTROPY,))] = CROSS_ENTROPY
    """"cross_entropy", or a name that `experimental.custom_import` registers. Validation always
    measures the cross entropy."""
    steps: Annotated[int, at_least(1)] = 10000
    """Total optimizer steps, including those before a resume."""
    max_norm: Annotated[float, above(0)] = 1.0
    """Maximum gradient norm; larger gradients are scaled down."""
    z_loss_weight: Annotated[float, at_least(0)] = 0.0
    """Weight of the z-loss (PaLM, arXiv:2204.02311) in the objective, such as 1e-4: the mean over
    target tokens of the squared logarithm of the softmax's denominator, which keeps logits small.
    The reported loss is without it."""
    gc_freq: Annotated[int, at_least(1)] = 50
    """Steps between garbage collections, on all ranks at once."""
    gc_debug: bool = False
    """Collect garbage in every step and report reference cycles that hold tensors; slow."""
