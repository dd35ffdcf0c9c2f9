"""How the next token is chosen from its logits. Layer: above errors and rng.

Invariant: the draws of a sequence depend on the seed and on its own number alone, not on what else
is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_lite import rng
from torchtitan_lite.errors import ConfigError, UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What the draws follow."""

    temperature: float = 0.7
    """Logits are divided by it; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens that make up this share of the probability are drawn (nucleus
    sampling, arXiv:1904.09751)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"The temperature ({self.temperature}) must be a number of at least 0; 0 takes "
                "the likeliest token."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top-p ({self.top_p}) must be above 0 and at most 1; 1 draws from all tokens."
            )

    def draws_of(self, sample: int) -> torch.Generator:
        """The draws of a prompt's sample of this number."""
        return rng.generator(self.seed, "generate", sample)

    def next_ids(self, logits_BV: torch.Tensor, draws: Sequence[torch.Generator]) -> list[int]:
        """The next token of each sequence, whose `draws` move on. Makes the host wait."""
        wide = torch.promote_types(logits_BV.dtype, torch.float32)
        logits_BV = logits_BV.to("cpu", wide)
        if logits_BV.isnan().any():
            raise UserError(
                "The model gives logits that are not numbers: its weights are not finite, or the "
                "dtype is too narrow for them. Give --dtype float32, or another checkpoint."
            )
        if self.temperature == 0:
            return logits_BV.argmax(-1).tolist()
        # The greatest becomes 0, so that no temperature makes it infinite.
        scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / self.temperature
        shares_BV = likeliest(scaled_BV.softmax(-1), self.top_p)
        return [
            int(torch.multinomial(shares_V, 1, generator=draw))
            for shares_V, draw in zip(shares_BV, draws, strict=True)
        ]


def likeliest(shares_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """The fewest of the greatest shares that make up `top_p` in sum; the others become 0."""
    if top_p == 1:
        return shares_BV
    falling_BV, order_BV = shares_BV.sort(stable=True, dim=-1, descending=True)
    before_BV = falling_BV.cumsum(-1) - falling_BV
    kept_BV = falling_BV.masked_fill(before_BV >= top_p, 0)
    return torch.zeros_like(shares_BV).scatter(-1, order_BV, kept_BV)
