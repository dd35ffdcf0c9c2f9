"""Sampling of the next token from its logits.

Invariant: the random draws of a sequence depend on the seed and its index alone, not on the rest of
the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_lite.core import rng
from torchtitan_lite.core.errors import ConfigError, UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Parameters of sampling."""

    temperature: float = 0.7
    """Divides the logits; 0 selects the most likely token."""
    top_p: float = 1.0
    """Nucleus sampling (arXiv:1904.09751): draw from the most likely tokens with this cumulative
    probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"The temperature ({self.temperature}) must be a number of at least 0; 0 takes "
                "the most likely token."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top-p ({self.top_p}) must be above 0 and at most 1; 1 draws from all tokens."
            )

    def random_draws(self, sample: int) -> torch.Generator:
        """Return the random draws of a prompt's sample with this index."""
        return rng.generator(self.seed, "generate", sample)

    def next_ids(self, logits_BV: torch.Tensor, draws: Sequence[torch.Generator]) -> list[int]:
        """Return the next token of each sequence, and advance its `draws`. Blocks the host."""
        wide = torch.promote_types(logits_BV.dtype, torch.float32)
        logits_BV = logits_BV.to("cpu", wide)
        if logits_BV.isnan().any():
            raise UserError(
                "The model gives logits that are not numbers: its weights are not finite, or the "
                "dtype is too narrow for them. Use dtype float32, or another checkpoint."
            )
        if self.temperature == 0:
            return logits_BV.argmax(-1).tolist()
        # The maximum becomes 0, so that no temperature makes it infinite.
        scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / self.temperature
        shares_BV = top_p_filter(scaled_BV.softmax(-1), self.top_p)
        return [
            int(torch.multinomial(shares_V, 1, generator=draw))
            for shares_V, draw in zip(shares_BV, draws, strict=True)
        ]


def top_p_filter(shares_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest greatest probabilities whose sum reaches `top_p`; the others become 0."""
    if top_p == 1:
        return shares_BV
    falling_BV, order_BV = shares_BV.sort(stable=True, dim=-1, descending=True)
    before_BV = falling_BV.cumsum(-1) - falling_BV
    kept_BV = falling_BV.masked_fill(before_BV >= top_p, 0)
    return torch.zeros_like(shares_BV).scatter(-1, order_BV, kept_BV)
