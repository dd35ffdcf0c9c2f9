"""What a checkpoint saves, as its owner hands it over. Layer: imports torch only."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

PARTS: tuple[str, ...] = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state", "rng")
"""The parts of a training state, by the names that `exclude_from_loading` uses."""


class State(Protocol):
    """All that a restart needs."""

    @property
    def step(self) -> int:
        """Number of committed steps."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name, `part.` first; DTensors where they are sharded."""
        ...

    def values(self) -> dict[str, Any]:
        """The rest as plain JSON values, by part."""
        ...

    def allocate(self, slots: Mapping[str, tuple[int, ...]]) -> None:
        """Make the tensors that exist only after a first step, given all saved names and their
        global shapes, so that `tensors` holds them to be filled."""
        ...

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take back what `values` returned, or those parts of it that are given."""
        ...
