"""Values reduced across ranks once per step: the only place where the host waits for the device.

Each rank's values are summed over replicas together with the gradients, then over the ranks of the
replica.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from torchtitan_lite.checkpoint import NUM_SAVE_SIGNALS
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.fault_tolerance.replica import Replicas
from torchtitan_lite.optim import local_gradients, square_norm


class StepTotals(NamedTuple):
    """Sums over all ranks of all replicas, unless stated otherwise."""

    squared_norm: float
    """Squared norm of the gradients of `loss`."""
    num_stop_requests: float
    """Ranks of this replica that were asked to stop, in whichever way."""
    num_signaled: float
    """Ranks of this replica that were asked to by a signal."""
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
    """See `CheckpointManager.local_signals`; on the CPU."""
    work_times: torch.Tensor
    """See `WorkTimes.local_values`; on the CPU."""
    rank_flags: torch.Tensor
    """See `monitor.local_flags`; on the CPU."""
    router_counts: torch.Tensor
    """See `RouterBalance.counts`; on the CPU."""

    @property
    def mean_loss(self) -> float:
        """Mean loss per target token; NaN without targets."""
        return self.loss / self.num_targets if self.num_targets else math.nan

    @property
    def grad_norm(self) -> float:
        """Norm of the gradients of the mean loss; NaN without targets."""
        is_number = self.num_targets and self.squared_norm >= 0
        return math.sqrt(self.squared_norm) / self.num_targets if is_number else math.nan


class PendingTotals:
    """Totals on the device, and their asynchronous copy to the host. The host waits for the copy in
    `read` and nowhere else, and not for the work that follows it on the device."""

    def __init__(
        self, totals: torch.Tensor, num_work_times: int, num_flags: int, token_copies: int
    ) -> None:
        """`token_copies`: ranks with the same tokens."""
        self._totals = totals
        self._num_work_times, self._num_flags = num_work_times, num_flags
        self._token_copies = token_copies
        # Page-locked, because it does not block.
        self._on_host = totals.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if totals.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def divisor_and_skip(self, max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the gradients must be divided by to be those of the mean loss, of a norm of
        at most `max_norm`, and 1 if the loss or the norm is not finite. Both are 0-d float32."""
        squared_norm, _, _, loss, num_targets = self._totals[:5]
        num_targets = num_targets / self._token_copies
        norm = squared_norm.sqrt() / num_targets
        divisor = num_targets * ((norm + NORM_EPS) / max_norm).clamp_min(1)
        # Without targets the norm is not finite.
        is_finite = loss.isfinite() & norm.isfinite()
        return divisor.float(), 1 - is_finite.float()

    def read(self) -> StepTotals:
        """Return the totals on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        lengths = [_OF_REPLICA + _OF_STEP, NUM_SAVE_SIGNALS, self._num_work_times, self._num_flags]
        scalars, *rest = self._on_host.split([*lengths, len(self._on_host) - sum(lengths)])
        summed = StepTotals(*scalars.tolist(), *rest)
        # Ranks with the same tokens count the same targets; their parts of the loss add up to one.
        return summed._replace(num_targets=summed.num_targets / self._token_copies)


NORM_EPS = 1e-6
"""Added to the gradient norm when gradients are clipped, as in `clip_grad_norm_`."""
_OF_REPLICA, _OF_STEP = 3, 5
"""Numbers at the start of `StepTotals` that are summed over one replica, and over all."""


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """This rank's values. All tensors are float64."""

    loss: torch.Tensor
    """0-d, on the device."""
    num_targets: int
    cursor: int
    step: int
    save_signals: torch.Tensor
    """Signals of checkpointing, on the CPU."""
    work_times: torch.Tensor
    """Work times, on the CPU."""
    rank_flags: torch.Tensor
    """Flags of the ranks, on the device."""
    router_counts: torch.Tensor
    """Token counts of routers, on the device."""


def reduce_step(
    values: StepValues,
    parameters: Sequence[nn.Parameter],
    replicas: Replicas,
    mesh: Mesh,
    stop: StopRequest,
) -> PendingTotals:
    """Sum the gradients of `parameters` over replicas, and `values` over all ranks. Every rank must
    call it."""
    device = values.loss.device
    numbers = _vector([values.num_targets, 1, values.cursor, values.step])
    on_host = torch.cat([numbers, values.save_signals, values.work_times])
    packed = torch.cat(
        [values.loss[None], _to(device, on_host), values.rank_flags, values.router_counts]
    )
    replicas.reduce(parameters, packed)
    squared_norm = _to(device, square_norm(local_gradients(parameters))[None])
    # Read late: a request may arrive during the wait for other replicas.
    stop_requests = _to(device, _vector([stop.requested, stop.was_signaled]))
    totals = mesh.all_reduce_(torch.cat([squared_norm, stop_requests, packed]))
    num_flags = len(values.rank_flags)
    return PendingTotals(totals, len(values.work_times), num_flags, mesh.degrees.token_copies)


def _vector(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _to(device: torch.device, values: torch.Tensor) -> torch.Tensor:
    """Copy to the device without waiting."""
    return values.to(device, non_blocking=True)
