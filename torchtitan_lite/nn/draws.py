"""Keys of the random draws in a model's forward.

Invariant: a draw is a function of seed, step, sample, layer, site and, within a sample, position
and feature. It is the same on every mesh and in a recomputation.
"""

from enum import IntEnum, unique

import torch

from torchtitan_lite.core.rng import mix_tensor


@unique
class Site(IntEnum):
    """The draws of a block. A new draw gets a new number, and numbers never change: a run that
    resumes must draw as before."""

    ATTENTION_DROPOUT = 0
    FEED_FORWARD_DROPOUT = 1


def layer_keys(rng_keys_B: torch.Tensor, num_layers: int) -> tuple[torch.Tensor, ...]:
    """Return the keys of each layer, [B], from those of the samples: in few operations, because
    each layer would need a dozen of its own."""
    layers = torch.arange(num_layers, device=rng_keys_B.device)
    return mix_tensor(rng_keys_B + layers[:, None]).unbind()


def site_keys(rng_keys_B: torch.Tensor, site: int) -> torch.Tensor:
    """Return the keys of a site, [B], from those of its layer."""
    return mix_tensor(rng_keys_B + site)
