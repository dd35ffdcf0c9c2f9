"""Values reduced across ranks once per step: the only place where the host waits for the device.

Each rank's values are summed over replicas together with the gradients, then over the ranks of the
replica. Layer: above mesh, optim, checkpoint and replica.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from torchtitan_lite.checkpoint import NUM_SAVE_SIGNALS
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.optim import local_gradients, square_norm
from torchtitan_lite.preemption import StopRequest
from torchtitan_lite.replica import Replicas


class StepTotals(NamedTuple):
    """Sums over all ranks of all replicas, unless stated otherwise."""

    squared_norm: float
    """Squared norm of the gradients of `loss`."""
    num_stop_requests: float
    """Ranks of this replica that were asked to stop."""
    loss: float
    """Loss, in nats, summed over target tokens."""
    num_targets: float
    """Target tokens."""
    num_ranks: float
    cursor_sum: float
    """Sum of the ranks' data cursors."""
    step_sum: float
    """Sum of the ranks' committed steps."""
    save_signals: torch.Tensor
    """See `CheckpointManager.local_signals`."""
    work_times: torch.Tensor
    """See `WorkTimes.local_values`."""
    router_counts: torch.Tensor
    """See `RouterBalance.counts`."""

    @property
    def mean_loss(self) -> float:
        """Mean loss per target token; NaN without targets."""
        return self.loss / self.num_targets if self.num_targets else math.nan

    @property
    def grad_norm(self) -> float:
        """Norm of the gradients of the mean loss; NaN without targets."""
        is_number = self.num_targets and self.squared_norm >= 0
        return math.sqrt(self.squared_norm) / self.num_targets if is_number else math.nan


_OF_REPLICA, _OF_STEP = 2, 5
"""Numbers at the start of `StepTotals` that are summed over one replica, and over all."""


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """This rank's values. All tensors are float64, on one device."""

    loss: torch.Tensor
    num_targets: int
    cursor: int
    step: int
    save_signals: torch.Tensor
    work_times: torch.Tensor
    router_counts: torch.Tensor


def reduce_step(
    values: StepValues,
    parameters: Sequence[nn.Parameter],
    replicas: Replicas,
    mesh: Mesh,
    stop: StopRequest,
) -> tuple[StepTotals, list[tuple[torch.Tensor, int]]]:
    """Sum the gradients of `parameters` over replicas, and `values` over all ranks. Returns the
    totals, and the gradients as `local_gradients` does. Every rank must call it."""
    device = values.loss.device
    numbers = [values.num_targets, 1, values.cursor, values.step]
    packed = torch.cat(
        [
            torch.stack([values.loss, *(_scalar(one, device) for one in numbers)]),
            values.save_signals,
            values.work_times,
            values.router_counts,
        ]
    )
    replicas.reduce(parameters, packed)
    gradients = local_gradients(parameters)
    squared_norm = square_norm(gradients).to(device)
    # Read late: a request may arrive during the wait for other replicas.
    of_replica = torch.stack([squared_norm, _scalar(stop.requested, device)])
    totals = mesh.all_reduce_(torch.cat([of_replica, packed]))
    lengths = [_OF_REPLICA + _OF_STEP, NUM_SAVE_SIGNALS, len(values.work_times)]
    scalars, *rest = totals.split([*lengths, len(values.router_counts)])
    summed = StepTotals(*scalars.tolist(), *rest)
    # Ranks with the same tokens count the same targets; their parts of the loss add up to one.
    num_targets = summed.num_targets / mesh.degrees.token_copies
    return summed._replace(num_targets=num_targets), gradients


def _scalar(value: float, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting."""
    return torch.tensor(float(value), dtype=torch.float64).to(device, non_blocking=True)
