"""Costs of messages on a machine, which decide whether nodes forward data, and the options of an
exchange. The defaults are typical values.
"""

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist

from torchtitan_lite.core.errors import RedistributionError
from torchtitan_lite.distributed.redistribute.planning.placements import Nodes

Transport = Literal["shared_memory", "collective"]

BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, kw_only=True)
class Link:
    """Time per message, of its sender and its receiver."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a machine. A node shares memory, or a fast link."""

    round_s: float
    """Time to start and to complete a round of an exchange."""
    within: Link
    between: Link
    ranks_per_node: int = 0
    """Ranks per node; 0: all ranks are on one node."""

    def nodes(self, *, relay: bool = False) -> Nodes | None:
        """Nodes of the ranks; None if all are on one node."""
        return Nodes(self.ranks_per_node, relay) if self.ranks_per_node else None

    def with_ranks_per_node(self, ranks: int) -> "Costs":
        """Return the same costs with another number of ranks per node."""
        return replace(self, ranks_per_node=ranks)


CPU = Costs(
    round_s=1e-4,
    within=Link(latency_s=5e-6, bytes_per_s=2.5e9),
    between=Link(latency_s=5e-5, bytes_per_s=1e9),
)
"""Ranks that share memory, and Ethernet between machines."""

CUDA = Costs(
    round_s=3e-5,
    within=Link(latency_s=2e-6, bytes_per_s=2.5e11),
    between=Link(latency_s=1e-5, bytes_per_s=4e10),
)
"""NVLink within a machine, a 400 Gb/s network between machines. From data sheets, not measured."""


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options of an exchange."""

    bucket_bytes: int = BUCKET_BYTES
    """Bucket size; temporary memory is at most twice that."""
    transport: Transport | None = None
    """Transport; None: shared memory if possible."""
    costs: Costs | None = None
    """Costs of this machine; None: defaults for the kind of device."""

    def costs_on(self, device: torch.device) -> Costs:
        """Return the costs for planning, which must be equal on all ranks."""
        if self.costs is not None:
            return self.costs
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        return _default_costs(device.type, _ranks_per_node(world_size))

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1 << 14:
            raise RedistributionError(
                f"bucket_bytes = {self.bucket_bytes} is too little: at least {1 << 14} are needed."
            )


DEFAULT_OPTIONS = ExchangeOptions()


def default_costs(device_type: str) -> Costs:
    """Return the costs for a kind of device."""
    return CUDA if device_type == "cuda" else CPU


def _ranks_per_node(world_size: int) -> int:
    """Return the ranks per node as set by torchrun; 0 if nodes have different numbers of ranks,
    which all ranks see alike."""
    on_node = os.environ.get("LOCAL_WORLD_SIZE", "")
    nodes = os.environ.get("GROUP_WORLD_SIZE", "")
    if not (on_node.isdigit() and nodes.isdigit()):
        return 0
    even = int(on_node) * int(nodes) == world_size and int(nodes) > 1
    return int(on_node) if even else 0


@lru_cache
def _default_costs(device_type: str, ranks_per_node: int) -> Costs:
    return default_costs(device_type).with_ranks_per_node(ranks_per_node)
