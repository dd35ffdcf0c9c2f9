"""Rotary position embedding (RoPE, arXiv:2104.09864) in Hugging Face's layout: the two numbers of a
pair are half a head apart, or adjacent where a release has them so."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from torchtitan_lite.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """RoPE scaling of Llama 3.1 for longer contexts (arXiv:2407.21783)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    @property
    def magnitude(self) -> float:
        """Factor of the rotated values."""
        return 1.0

    def stretch(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Divide slow frequencies by `factor`, keep fast ones, and interpolate between."""
        wavelengths = 2 * math.pi / frequencies
        turns = self.original_max_position / wavelengths
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0, 1)
        return frequencies * (blend + (1 - blend) / self.factor)


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN, RoPE scaling by the number of turns in the original context (arXiv:2309.00071)."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    """Turns in the original context above which a frequency is kept."""
    beta_slow: float = 1.0
    """Turns below which it is divided by `factor`."""
    mscale: float | None = None
    """Weight of the logarithm of `factor` in `magnitude`, relative to `mscale_all_dim`. Unset, or
    without the other: `magnitude` is 0.1 ln(factor) + 1, as in the paper."""
    mscale_all_dim: float | None = None
    """Weight of the same in `score_magnitude`."""
    truncate: bool = True
    """Whether the bounds of the interpolation are rounded to whole frequencies."""
    attention_factor: float | None = None
    """Set: `magnitude`."""

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position", "beta_fast", "beta_slow"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"YaRN's {name} ({getattr(self, name)}) must be above 0.")

    @property
    def magnitude(self) -> float:
        """Factor of the rotated values."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_magnitude(self) -> float:
        """Factor of queries and of keys, rotated or not, where `mscale_all_dim` is set (latent
        attention)."""
        return self._growth(self.mscale_all_dim) if self.mscale_all_dim else 1.0

    def _growth(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def stretch(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Divide slow frequencies by `factor`, keep fast ones, and interpolate between them, linear
        in the number of the frequency."""
        width = 2 * len(frequencies)

        def number_with(turns: float) -> float:
            wavelength = self.original_max_position / (turns * 2 * math.pi)
            return width * math.log(wavelength) / (2 * math.log(theta))

        low, high = number_with(self.beta_fast), number_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        numbers = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
        # Equal bounds are one step.
        slow = ((numbers - low) / (high - low or 0.001)).clamp(0, 1)
        return frequencies / self.factor * slow + frequencies * (1 - slow)


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by a factor (arXiv:2306.15595)."""

    factor: float
    kind: Literal["linear"] = "linear"

    @property
    def magnitude(self) -> float:
        """Factor of the rotated values."""
        return 1.0

    def stretch(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Divide all frequencies by `factor`."""
        return frequencies / self.factor


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """A base that grows with sequences longer than a model's maximum. These are refused, so that
    nothing is scaled here."""

    factor: float
    kind: Literal["dynamic"] = "dynamic"

    @property
    def magnitude(self) -> float:
        """Factor of the rotated values."""
        return 1.0

    def stretch(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Return the frequencies."""
        return frequencies


@dataclass(frozen=True, kw_only=True)
class AlphaScaling:
    """A base that is multiplied by alpha^(d / (d - 2)), where d is the rotated width: NTK-aware
    scaling with a fixed alpha, of HunYuan."""

    alpha: float
    factor: float = 1.0
    """Without effect."""
    kind: Literal["ntk_alpha"] = "ntk_alpha"

    @property
    def magnitude(self) -> float:
        """Factor of the rotated values."""
        return 1.0

    def stretch(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Return the frequencies of the larger base."""
        width = 2 * len(frequencies)
        base = theta * self.alpha ** (width / (width - 2))
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
        return base**-exponents


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): a divisor per frequency, and other divisors in sequences that
    are longer than those of pretraining."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position: int
    max_position: int
    """Positions of the scaled model."""
    factor: float | None = None
    """Unset: max_position / original_max_position."""
    attention_factor: float | None = None
    """Set: `magnitude`."""
    kind: Literal["longrope"] = "longrope"

    @property
    def magnitude(self) -> float:
        """Factor of the rotated values."""
        if self.attention_factor is not None:
            return self.attention_factor
        factor = self.factor or self.max_position / self.original_max_position
        if factor <= 1.0:
            return 1.0
        return math.sqrt(1.0 + math.log(factor) / math.log(self.original_max_position))

    def stretch(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Return the frequencies in short sequences."""
        return self._divided(frequencies, "short_factor")

    def stretch_long(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Return the frequencies in sequences of more than `original_max_position` positions."""
        return self._divided(frequencies, "long_factor")

    def _divided(self, frequencies: torch.Tensor, name: str) -> torch.Tensor:
        divisors = getattr(self, name)
        if len(divisors) != len(frequencies):
            raise ConfigError(
                f"LongRoPE's {name} has {len(divisors)} numbers, and {len(frequencies)} are "
                "needed, half of the rotated width of a head."
            )
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32, device="cpu") / frequencies)


Scaling = (
    RopeScaling | YarnScaling | LinearScaling | DynamicScaling | AlphaScaling | LongRopeScaling
)
"""The first is that of a table without a `kind` that fits several."""


@dataclass(frozen=True, kw_only=True)
class RopeBase:
    """The base and the scaling of a rotary embedding."""

    theta: float
    scaling: Scaling | None = None


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding. Layers with equal ones share its cosines and sines."""

    head_dim: int
    """Width of what is rotated."""
    theta: float
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ConfigError(
                f"The rotated width of a head ({self.head_dim}) must be even: RoPE rotates pairs."
            )
        if self.theta <= 1:
            raise ConfigError(f"rope_theta ({self.theta}) must be above 1.")

    def build(self) -> "RotaryEmbedding":
        """Build the module."""
        return RotaryEmbedding(self.head_dim, self.theta, self.scaling)


class RotaryEmbedding(nn.Module):
    """Map positions to the cosine and sine of each rotation, times the scaling's magnitude."""

    frequencies_E: torch.Tensor
    long_frequencies_E: torch.Tensor
    """Those in long sequences, of LongRoPE."""
    length_of: Callable[[torch.Tensor], torch.Tensor | int]
    """Maps the positions of a forward to the length of their sequences. Context parallelism, of
    which a rank has some of the positions, replaces it."""

    def __init__(self, head_dim: int, theta: float, scaling: Scaling | None) -> None:
        super().__init__()
        self._magnitude = 1.0 if scaling is None else scaling.magnitude
        # On the CPU even while the model is built on the meta device: it has no other source.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        frequencies_E = theta**-exponents
        self.length_of = lambda positions_BS: positions_BS.max() + 1
        self.short_length: int | None = None
        """Set: sequences of more positions have other frequencies."""
        if isinstance(scaling, LongRopeScaling):
            self.short_length = scaling.original_max_position
            long_E = scaling.stretch_long(frequencies_E)
            self.register_buffer("long_frequencies_E", long_E, persistent=False)
        if scaling is not None:
            frequencies_E = scaling.stretch(frequencies_E, theta)
        self.register_buffer("frequencies_E", frequencies_E, persistent=False)

    def forward(self, positions_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two float32 tensors [B, S, 1, E/2]."""
        angles = positions_BS[:, :, None, None].float() * self._frequencies(positions_BS)
        if self._magnitude == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self._magnitude, angles.sin() * self._magnitude

    def _frequencies(self, positions_BS: torch.Tensor) -> torch.Tensor:
        if self.short_length is None:
            return self.frequencies_E
        is_long = self.length_of(positions_BS) > self.short_length
        if isinstance(is_long, bool):
            return self.long_frequencies_E if is_long else self.frequencies_E
        # On the device, for which the host does not wait.
        return torch.where(is_long, self.long_frequencies_E, self.frequencies_E)


def rotate(
    x_BSHE: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    adjacent: bool = False,
) -> torch.Tensor:
    """Rotate each pair (x[i], x[i + E/2]) by its angle, in at least float32; the dtype does not
    change. `adjacent`: the pairs are (x[2i], x[2i + 1]), and come out half a head apart. Numbers of
    a head beyond those that there are angles for are not rotated."""
    if cos is None or sin is None:
        return x_BSHE
    width = 2 * cos.shape[-1]
    if width < x_BSHE.shape[-1]:
        turned = rotate(x_BSHE[..., :width], cos, sin, adjacent=adjacent)
        return torch.cat((turned, x_BSHE[..., width:]), dim=-1)
    left, right = (x_BSHE[..., 0::2], x_BSHE[..., 1::2]) if adjacent else x_BSHE.chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return turned.to(x_BSHE.dtype)
