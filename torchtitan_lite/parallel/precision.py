"""The data types of a run: of its parameters, of forward and backward, and of the sums of gradients
over ranks."""

from dataclasses import dataclass

import torch

from torchtitan_lite.config.tables.training import PrecisionConfig
from torchtitan_lite.distributed.device import Device


@dataclass(frozen=True)
class PrecisionPolicy:
    """One for all techniques. Use `precision_policy`."""

    parameters: torch.dtype
    """Dtype of the parameters, their gradients and the optimizer's state."""
    compute: torch.dtype
    """Dtype of the parameters in forward and backward, and of hidden states."""

    @property
    def is_mixed(self) -> bool:
        """Whether parameters are cast for the computation."""
        return self.compute != self.parameters

    @property
    def reduction(self) -> torch.dtype:
        """Of sums of gradients over ranks: at least float32, because a sum over many ranks in
        bfloat16 loses most of the terms."""
        return torch.promote_types(self.compute, torch.float32)


def precision_policy(config: PrecisionConfig, device: Device) -> PrecisionPolicy:
    """Return the data types of a run on `device`: by default, a GPU computes in bfloat16."""
    parameters = getattr(torch, config.dtype)
    if config.mixed_precision_param != "auto":
        return PrecisionPolicy(parameters, getattr(torch, config.mixed_precision_param))
    return PrecisionPolicy(parameters, torch.bfloat16 if device.kind == "cuda" else parameters)
