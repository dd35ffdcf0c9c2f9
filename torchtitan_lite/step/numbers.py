"""The one exchange of numbers of a step, and the one place where the host waits for the device.

Each rank adds what it has counted, first to that of its peers in other replicas, together with the
gradients, then to that of the other ranks of its replica. Layer: above mesh and checkpoint.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchtitan_lite.checkpoint import NUM_SAVE_SIGNALS
from torchtitan_lite.mesh import Mesh

_OF_REPLICA, _OF_STEP = 2, 5
"""Numbers that are added up over one replica, and over all."""


class Totals(NamedTuple):
    """What all ranks have counted."""

    squares: float
    """Of the gradients."""
    leave: float
    """Ranks of this replica that were asked to."""
    loss: float
    """Summed over target tokens."""
    targets: float
    num_ranks: float
    places: float
    """The sum of the samples at which the ranks were."""
    steps: float
    """The sum of the steps that they had committed."""
    signals: torch.Tensor
    """Of the checkpoints."""
    times: torch.Tensor
    """That the ranks have worked."""
    router_counts: torch.Tensor


@dataclass(frozen=True)
class Numbers:
    """This rank's."""

    of_step: torch.Tensor
    """float64, to be added up over replicas in place."""
    num_times: int

    def totals(self, square_norm: torch.Tensor, leave: bool, mesh: Mesh) -> Totals:
        """Add everything up over the ranks of this replica. `square_norm` is that of this rank's
        part of the gradients, summed over replicas. Every rank must call it."""
        device = self.of_step.device
        of_replica = torch.stack([square_norm.to(device), number(leave, device)])
        totals = mesh.sum(torch.cat([of_replica, self.of_step]))
        lengths = [_OF_REPLICA + _OF_STEP, NUM_SAVE_SIGNALS, self.num_times]
        numbers, *rest = totals.split([*lengths, len(totals) - sum(lengths)])
        return Totals(*numbers.tolist(), *rest)


def counted(
    loss_sum: torch.Tensor,
    num_targets: int,
    *,
    cursor: int,
    step: int,
    signals: torch.Tensor,
    times: torch.Tensor,
    router_counts: torch.Tensor,
) -> Numbers:
    """What this rank has counted in a step that began at the sample `cursor` after `step` committed
    steps; all tensors are float64, and on one device."""
    device = loss_sum.device
    own = [loss_sum, *(number(one, device) for one in (num_targets, 1, cursor, step))]
    return Numbers(torch.cat([torch.stack(own), signals, times, router_counts]), len(times))


def number(value: float, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for it."""
    return torch.tensor(float(value), dtype=torch.float64).to(device, non_blocking=True)
