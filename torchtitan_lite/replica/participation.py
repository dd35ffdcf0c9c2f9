"""Who takes part in a step, and what those who do agree on. Layer: imports torch only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class Share:
    """This replica's place among those that take part in a step."""

    index: int
    count: int


class Replicas(Protocol):
    """The replicas of the job, as one of them sees them."""

    def agree(self, committed_steps: int) -> Share:
        """Settle who takes part in the step after `committed_steps`."""
        ...

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add the local shards of gradients, and counts, over the replicas in place. A rank's
        peers in other replicas hold the same shards."""
        ...

    def vote(self, in_favour: bool) -> bool:
        """Whether all that take part commit the step."""
        ...


class SingleReplica:
    """Fault tolerance switched off: one replica, which agrees with itself."""

    def agree(self, committed_steps: int) -> Share:
        return Share(index=0, count=1)

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        return None

    def vote(self, in_favour: bool) -> bool:
        return in_favour
