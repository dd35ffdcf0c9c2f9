"""Dropout whose mask depends on seed, step, sample and position, not on the rank."""

import torch
from torch import nn

from torchtitan_lite.core.rng import mix_tensor, uniform
from torchtitan_lite.nn.draws import site_keys


class KeyedDropout(nn.Module):
    """Dropout in training mode. `site` is the `Site` of its draws."""

    def __init__(self, share: float, site: int) -> None:
        super().__init__()
        self.share = share
        self.site = site

    def forward(
        self, x_BSD: torch.Tensor, rng_keys_B: torch.Tensor, positions_BS: torch.Tensor
    ) -> torch.Tensor:
        """Apply the mask to `x_BSD`; return it unchanged if nothing is dropped. `rng_keys_B` are
        those of the layer."""
        if not self.training or self.share == 0.0:
            return x_BSD
        site_keys_B = site_keys(rng_keys_B, self.site)
        position_keys_BS = mix_tensor(site_keys_B[:, None] + positions_BS)
        features_D = torch.arange(x_BSD.shape[-1], device=x_BSD.device)
        kept = uniform(position_keys_BS[:, :, None] + features_D) >= self.share
        return x_BSD * kept / (1 - self.share)
