"""MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 numbers of 4 bits (1 of sign, 2 of exponent, 1
of mantissa) with one power of two as their scale."""

import torch

BLOCK = 32
"""Numbers with one scale."""
_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers in bfloat16, which represents them exactly, in one dim. `numbers` (uint8)
    has two of them per byte, the first in the low bits; `scales` (uint8) has biased exponents."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    codes = torch.stack([numbers & 0xF, numbers >> 4], dim=-1).flatten()
    found = values[codes.int()].view(len(scales), BLOCK)
    return torch.ldexp(found, scales.int()[:, None] - _BIAS).flatten()
