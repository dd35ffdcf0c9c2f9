"""Norms of hidden states and heads: the root mean square (arXiv:1910.07467) or LayerNorm
(arXiv:1607.06450), with weights around 1 or around 0, or without."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class NormKind:
    """What a norm does to the last dim. The default is the RMS norm."""

    subtracts_mean: bool = False
    """Whether it is a LayerNorm."""
    weight: bool = True
    bias: bool = False
    zero_centered: bool = False
    """Whether it multiplies by 1 + weight."""

    def __post_init__(self) -> None:
        if self.bias and not self.subtracts_mean:
            raise ConfigError("A norm with a bias must subtract the mean: set subtracts_mean.")
        if not self.weight and (self.bias or self.zero_centered):
            raise ConfigError("A norm without a weight has no bias, and is not zero_centered.")

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return ("weight",) * self.weight + ("bias",) * self.bias

    def build(self, width: int, eps: float) -> nn.Module:
        """Build a norm of the last dim, of `width`."""
        if self.zero_centered:
            return ZeroCenteredNorm(width, eps, self)
        if self.subtracts_mean:
            return nn.LayerNorm(width, eps, elementwise_affine=self.weight, bias=self.bias)
        return nn.RMSNorm(width, eps, elementwise_affine=self.weight)


RMS_NORM = NormKind()


class ZeroCenteredNorm(nn.Module):
    """A norm that multiplies by 1 + weight, so that weight decay pulls the factor to 1
    (Qwen3-Next, Gemma, Nemotron)."""

    def __init__(self, width: int, eps: float, kind: NormKind) -> None:
        super().__init__()
        self.eps = eps
        self._subtracts_mean = kind.subtracts_mean
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width)) if kind.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        # In at least float32: 1 + weight in bfloat16 would round small weights away.
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1.0 + self.weight.to(wide)
        if not self._subtracts_mean:
            return F.rms_norm(x.to(wide), scale.shape, scale, self.eps).to(x.dtype)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x.to(wide), scale.shape, scale, bias, self.eps).to(x.dtype)


class AllHeadsNorm(nn.Module):
    """The RMS norm of all heads of a position together (OLMo 2)."""

    sum_over_heads: Callable[[torch.Tensor], torch.Tensor]
    """Sums a tensor over the ranks that share the heads. Tensor parallelism replaces it."""

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.sum_over_heads = lambda squares: squares
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim))
        self._width = num_heads * head_dim

    def forward(self, x_BSHE: torch.Tensor) -> torch.Tensor:
        """[B, S, H, E] -> [B, S, H, E], of this rank's heads."""
        return self.normalized(x_BSHE, self.weight)

    def normalized(self, x_BSHE: torch.Tensor, weight_F: torch.Tensor) -> torch.Tensor:
        """`forward` with the weights of this rank's heads."""
        wide = x_BSHE.to(torch.promote_types(x_BSHE.dtype, torch.float32))
        squares_BS11 = self.sum_over_heads(wide.square().sum((-2, -1), keepdim=True))
        scale_BS11 = torch.rsqrt(squares_BS11 / self._width + self.eps)
        weight_HE = weight_F.view(x_BSHE.shape[-2:])
        return (wide * scale_BS11 * weight_HE).to(x_BSHE.dtype)
