"""The [optimizer] table."""

from typing import Annotated, Literal

from torchtitan_lite.config.tables.section import BuiltIn, NoEffect, Section, at_least, below

OPTIMIZERS = ("AdamW", "Adam", "SGD", "Adagrad", "Muon")
"""The optimizers that need no module of the user."""


class OptimizerConfig(Section):
    """The optimizer."""

    name: Annotated[str, BuiltIn(OPTIMIZERS)] = "AdamW"
    """"AdamW" (arXiv:1711.05101), "Adam" (arXiv:1412.6980), "SGD" with momentum `beta1`, "Adagrad"
    (JMLR 12:2121, 2011), whose sums of squared gradients start at 0 and whose rate is only that of
    the schedule, "Muon" (arXiv:2502.16982), with AdamW for all parameters that are not matrices of
    hidden layers, or a name that `experimental.custom_import` registers. Adagrad and Muon are not
    in torchtitan 0.2.2."""
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
    ema_decay: Annotated[float, at_least(0), below(1)] = 0.0
    """Decay, per committed step, of an exponential moving average of the weights, which is saved
    beside them and used with `--ema` by `evaluate`, `generate` and `convert to-hf`; 0: none."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How the step is computed: one parameter at a time, several at once, or in one kernel. The
    result is the same up to rounding."""
    adamw_lr: Annotated[float, at_least(0)] | None = None
    """Highest learning rate of the parameters that Muon leaves to AdamW; its schedule is that of
    `lr`. Unset: `lr`. AdamW's `beta1`, `beta2` and `eps` are those above, and `weight_decay` is
    for both."""
    muon_momentum: Annotated[float, at_least(0), below(1)] = 0.95
    """Muon's decay of the average of gradients."""
    muon_nesterov: bool = True
    """Use Nesterov momentum."""
    muon_ns_steps: Annotated[int, at_least(1), below(100)] = 5
    """Steps of the Newton-Schulz iteration, which orthogonalizes the updates of Muon."""
    muon_adjust_lr: Literal["original", "match_rms_adamw"] = "original"
    """Scale of Muon's updates: "original" multiplies the rate of a tall matrix by the root of rows
    over columns; "match_rms_adamw" gives updates the size of AdamW's (0.2 as root mean square,
    arXiv:2502.16982), so that `lr` and `weight_decay` of AdamW fit."""
    muon_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Data type of the Newton-Schulz iteration, and of the updates that move between ranks for it.
    torch.optim.Muon always uses bfloat16."""
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
