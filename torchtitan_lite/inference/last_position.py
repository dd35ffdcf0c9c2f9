"""Logits of one position of each sequence: those of a whole prompt would take more memory than the
model. Layer: above nn.
"""

from typing import Any

import torch
from torch import nn

from torchtitan_lite.nn.decoder import OutputProjection


class LastPosition:
    """Lets a model project one position of each sequence onto the vocabulary."""

    def __init__(self, model: nn.Module) -> None:
        """From now on `model` gives logits [B, 1, V]."""
        self._places_B = torch.zeros(0, dtype=torch.int64)
        for module in model.modules():
            if isinstance(module, OutputProjection):
                module.register_forward_pre_hook(self._take)

    def wanted(self, places_B: torch.Tensor) -> None:
        """Say which one, by its place in the next forward pass."""
        self._places_B = places_B

    def _take(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_BSD = inputs[0]
        rows_B = torch.arange(len(hidden_BSD), device=hidden_BSD.device)
        return hidden_BSD[rows_B, self._places_B][:, None], *inputs[1:]
