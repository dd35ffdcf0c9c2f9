"""The [optimizer] table."""

from typing import Annotated, Literal

from torchtitan_lite.schema.section import NoEffect, Section, at_least, below


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["AdamW", "Adam", "SGD", "Adagrad"] = "AdamW"
    """AdamW (arXiv:1711.05101), Adam (arXiv:1412.6980), SGD with momentum `beta1`, or Adagrad (JMLR
    12:2121, 2011; not in torchtitan), whose sums of squared gradients start at 0 and whose rate is
    only that of the schedule."""
    lr: Annotated[float, at_least(0)] = 8e-4
    """Highest learning rate, between warmup and decay."""
    beta1: Annotated[float, at_least(0), below(1)] = 0.9
    """Decay of the average of gradients."""
    beta2: Annotated[float, at_least(0), below(1)] = 0.95
    """Decay of the average of squared gradients; Adagrad sums them."""
    eps: Annotated[float, at_least(0)] = 1e-8
    """Added to the root of the average of squared gradients."""
    weight_decay: Annotated[float, at_least(0)] = 0.1
    """Decay of the weights per step, times the learning rate."""
    decay_norms_biases_embeddings: bool = False
    """Apply weight decay to norms, biases and embeddings too (torchtitan: true)."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How the step is computed: one parameter at a time, several at once, or in one kernel. The
    result is the same up to rounding."""
    early_step_in_backward: Annotated[
        bool,
        NoEffect(
            "a step is applied as a whole or not at all, so all gradients are kept until its end, "
            "and are clipped"
        ),
    ] = False
    """Accepted and without effect: a step is applied as a whole, after all gradients are finite and
    clipped (torchtitan steps each parameter as soon as its gradient is available, without
    clipping)."""
