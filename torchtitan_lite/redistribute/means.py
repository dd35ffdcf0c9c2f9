"""What an exchange may use. Layer: above cost."""

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist

from torchtitan_lite.errors import RedistributionError
from torchtitan_lite.redistribute.cost import Costs, default_costs

Transport = Literal["shared_memory", "collective"]

BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, kw_only=True)
class Means:
    """What an exchange may use."""

    bucket_bytes: int = BUCKET_BYTES
    """Temporary memory is at most twice that."""
    transport: Transport | None = None
    """None takes shared memory where there is some."""
    costs: Costs | None = None
    """Of this machine; None takes the default figures for the kind of device."""

    def costs_on(self, device: torch.device) -> Costs:
        """The figures to plan with, which must be the same on all ranks."""
        if self.costs is not None:
            return self.costs
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        return _default_costs(device.type, _ranks_per_node(world_size))

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1 << 14:
            raise RedistributionError(
                f"bucket_bytes = {self.bucket_bytes} is too little: at least {1 << 14} are needed."
            )


DEFAULT_MEANS = Means()


def _ranks_per_node(world_size: int) -> int:
    """As torchrun tells it; 0, all on one node, where nodes have different numbers of ranks, which
    all ranks see alike."""
    on_node = os.environ.get("LOCAL_WORLD_SIZE", "")
    nodes = os.environ.get("GROUP_WORLD_SIZE", "")
    if not (on_node.isdigit() and nodes.isdigit()):
        return 0
    even = int(on_node) * int(nodes) == world_size and int(nodes) > 1
    return int(on_node) if even else 0


@lru_cache
def _default_costs(device_type: str, ranks_per_node: int) -> Costs:
    return default_costs(device_type).on_nodes_of(ranks_per_node)
