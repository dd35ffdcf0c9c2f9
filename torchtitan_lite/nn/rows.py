"""Row gather with a deterministic gradient."""

from typing import Any

import torch


def take_rows(x_RD: torch.Tensor, index_N: torch.Tensor, inverse_RC: torch.Tensor) -> torch.Tensor:
    """Return [N, D] whose row n is `x_RD[index_N[n]]`; `inverse_RC` holds the C places of each row.
    The gradient gathers by the inverse index: plain indexing would add gradients atomically, in an
    order that differs from run to run."""
    return _Taken.apply(x_RD, index_N, inverse_RC)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: torch.Tensor, index_N: torch.Tensor, inverse_RC: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse_RC)
        return x_RD.index_select(0, index_N)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse_RC,) = ctx.saved_tensors
        grad_RCD = grads[0].index_select(0, inverse_RC.flatten()).unflatten(0, inverse_RC.shape)
        return grad_RCD.sum(1), None, None
