"""Rotary position embedding (RoPE, arXiv:2104.09864) in Hugging Face's layout: the two numbers of a
pair are half a head apart. Layer: above spec."""

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """RoPE scaling of Llama 3.1 for longer contexts (arXiv:2407.21783)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class RotaryEmbedding(nn.Module):
    """Map positions to the cosine and sine of each rotation."""

    frequencies_E: torch.Tensor

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        # On the CPU even while the model is built on the meta device: it has no other source.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        frequencies_E = theta**-exponents
        if scaling is not None:
            frequencies_E = _stretch(frequencies_E, scaling)
        self.register_buffer("frequencies_E", frequencies_E, persistent=False)

    def forward(self, positions_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two float32 tensors [B, S, 1, E/2]."""
        angles = positions_BS[:, :, None, None].float() * self.frequencies_E
        return angles.cos(), angles.sin()


def rotate(x_BSHE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (x[i], x[i + E/2]) by its angle, in at least float32; the dtype does not
    change."""
    left, right = x_BSHE.chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return turned.to(x_BSHE.dtype)


def _stretch(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Divide slow frequencies by `factor`, keep fast ones, and interpolate between."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return frequencies * (blend + (1 - blend) / scaling.factor)
