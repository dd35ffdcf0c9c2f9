"""The norm of hidden states and heads: the root mean square (arXiv:1910.07467), with weights around
1 or around 0."""

import torch
import torch.nn.functional as F
from torch import nn


def rms_norm(width: int, eps: float, *, zero_centered: bool = False) -> nn.Module:
    """Build a norm of the last dim, of `width`."""
    return ZeroCenteredRMSNorm(width, eps) if zero_centered else nn.RMSNorm(width, eps=eps)


class ZeroCenteredRMSNorm(nn.Module):
    """An RMS norm that multiplies by 1 + weight, so that weight decay pulls the factor to 1
    (Qwen3-Next)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        # In at least float32: 1 + weight in bfloat16 would round small weights away.
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1.0 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), scale.shape, scale, self.eps).to(x.dtype)
