"""A gradient that lies where its parameter does. Layer: imports torch only."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def align_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient of a parameter, with the parameter's placements; None where there is none.

    Without FSDP, the gradient of a weight that every tp rank holds whole is still each rank's part
    of a sum, and this sums it, once. Every rank that holds the parameter must call it.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)
    return parameter.grad
