"""The reduction of a step's numbers, the only place where the host waits for the device.

Each rank's numbers are summed over replicas together with the gradients, then over the ranks of the
replica. Layer: above mesh and checkpoint.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchtitan_lite.checkpoint import NUM_SAVE_SIGNALS
from torchtitan_lite.mesh import Mesh

_OF_REPLICA, _OF_STEP = 2, 5
"""Numbers summed over one replica, and over all."""


class Totals(NamedTuple):
    """Sums over all ranks."""

    squares: float
    """Squared gradient norm."""
    leave: float
    """Ranks of this replica that were asked to leave."""
    loss: float
    """Loss, summed over target tokens."""
    targets: float
    num_ranks: float
    places: float
    """Sum of the ranks' data cursors."""
    steps: float
    """Sum of the ranks' committed steps."""
    signals: torch.Tensor
    """Signals of checkpoint managers."""
    times: torch.Tensor
    """Per-rank work times."""
    router_counts: torch.Tensor


@dataclass(frozen=True)
class Numbers:
    """This rank's numbers."""

    of_step: torch.Tensor
    """float64, summed over replicas in place."""
    num_times: int

    def totals(self, square_norm: torch.Tensor, leave: bool, mesh: Mesh) -> Totals:
        """Sum over the ranks of this replica. `square_norm` is of this rank's shards of the
        gradients, summed over replicas. Every rank must call it."""
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
    """Return this rank's numbers of a step that began at sample `cursor` after `step` committed
    steps; all tensors are float64, on one device."""
    device = loss_sum.device
    own = [loss_sum, *(number(one, device) for one in (num_targets, 1, cursor, step))]
    return Numbers(torch.cat([torch.stack(own), signals, times, router_counts]), len(times))


def number(value: float, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting."""
    return torch.tensor(float(value), dtype=torch.float64).to(device, non_blocking=True)
