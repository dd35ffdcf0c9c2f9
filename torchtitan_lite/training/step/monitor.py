"""The decision about each step: commit, abort, skip, stop or roll back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from torchtitan_lite.core.diagnosis import Cause, Diagnosis, report_diagnosis
from torchtitan_lite.core.events import StepEvent
from torchtitan_lite.core.phases import Phase, Phases
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.fault_tolerance.replica import Replicas, Share
from torchtitan_lite.nn.spec import Microbatch
from torchtitan_lite.training.anomalies import (
    ABORT,
    AnomalyDetector,
    Decision,
    StepAction,
    StepStatistics,
)
from torchtitan_lite.training.step.replay import Replay
from torchtitan_lite.training.step.state_check import StateCheck
from torchtitan_lite.training.step.totals import StepTotals
from torchtitan_lite.training.step.work_times import WorkTimes

_DAMAGED, _NON_FINITE, _HAS_LOSS = 1, 2, 4
"""Flags of single ranks, known to all ranks with the reduction of a step: damaged state, and a loss
of its own that is not finite. A position per rank of each replica, to which all others add zeros.
They stay on the device, so that the host does not wait."""


class StepMonitor:
    """Observes each step, and decides about it by the totals of all ranks."""

    def __init__(
        self,
        detector: AnomalyDetector,
        work_times: WorkTimes,
        replay: Replay | None,
        phases: Phases,
        mesh: Mesh,
        state_check: StateCheck | None = None,
    ) -> None:
        """Without `replay`, anomalies are attributed to the data; without `state_check`, state that
        changes in memory is not found."""
        self.detector, self.work_times, self._phases = detector, work_times, phases
        self._replay, self._state_check, self._mesh = replay, state_check, mesh

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Time this rank's own work: loading, forward and backward."""
        self.work_times.begin()
        yield
        self.work_times.end()

    def begin_forward(self) -> None:
        """Start to record what a recomputation of the step needs."""
        if self._replay is not None:
            self._replay.begin()

    def end_backward(self, parameters: Sequence[nn.Parameter], share: Share) -> None:
        """Record what a recomputation of the step is compared with."""
        if self._replay is not None and share.count == 1:
            # Several replicas sum gradients while backward computes others.
            self._replay.record_local_gradients(parameters)

    def rank_flags(
        self, loss: torch.Tensor, tensors: Callable[[], Mapping[str, torch.Tensor]], share: Share
    ) -> torch.Tensor:
        """Return this rank's flags for the reduction: see `local_flags`. `tensors`
        returns the state, before its update."""
        check = self._state_check
        is_damaged = None if check is None else check.compare(tensors())
        return local_flags(loss, is_damaged, share, self._mesh)

    def end_step(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Record the state that the next step begins with."""
        if self._state_check is not None:
            self._state_check.seal(tensors())

    def decide(
        self,
        totals: StepTotals,
        loss: torch.Tensor,
        microbatches: Sequence[Microbatch],
        statistics: StepStatistics,
        share: Share,
        replicas: Replicas,
        *,
        number: int,
        is_complete: bool,
    ) -> tuple[Decision, list[StepEvent]]:
        """Decide about the step, and recompute an anomalous one. `loss` is this rank's part of the
        loss, `number` that of the step; `is_complete` is the result of the replicas' vote. All
        ranks decide identically. Returns the decision, and events of slow ranks. Every rank must
        call it."""
        ended_ago_s = self.work_times.device_ended_ago_s()
        if ended_ago_s is not None:
            # The host ran ahead: it waited in the reduction for the device's backward.
            self._phases.device_worked(Phase.COMPUTE, ended_ago_s)
        num_microbatches = len(microbatches)
        events = self.work_times.record(totals.work_times, num_microbatches, is_valid=is_complete)
        if not is_complete:
            return ABORT, events
        own = share.index * self._mesh.world_size + self._mesh.rank
        check = self._state_check
        if check is not None and (damaged := damaged_ranks(totals.rank_flags)):
            if own in damaged:
                self._report(Cause.MEMORY_CORRUPTION, check.describe())
            return Decision(
                StepAction.ABORT, faulty_ranks=tuple(damaged), has_damaged_state=True
            ), events
        decision = self.detector.decide(totals.mean_loss, totals.grad_norm, statistics)
        if decision.is_anomalous and self._replay is not None:
            differing = self._replay.find_mismatching_ranks(loss, microbatches, share, replicas)
            if differing is None:
                return ABORT, events
            if differing:
                decision = Decision(StepAction.ABORT, faulty_ranks=tuple(differing))
                if own in differing:
                    text = "it computes an anomalous step differently a second time"
                    self._report(Cause.WRONG_COMPUTATION, text)
        if decision.is_anomalous and own in non_finite_ranks(totals.rank_flags):
            text = f"its own part of the loss is not finite at step {number}"
            self._report(Cause.NON_FINITE, text)
        return decision, events

    def _report(self, cause: Cause, text: str) -> None:
        report_diagnosis(Diagnosis(cause=cause, text=text, rank=self._mesh.rank))


def local_flags(
    loss: torch.Tensor, is_damaged: torch.Tensor | None, share: Share, mesh: Mesh
) -> torch.Tensor:
    """Return this rank's flags for the reduction: float64 [participants * ranks], on the device.
    `loss` is its part of the loss; `is_damaged` is 0-d, 1 if its state has changed in memory."""
    flags = torch.zeros(share.count * mesh.world_size, dtype=torch.float64, device=loss.device)
    if share.index >= 0:
        own = _NON_FINITE * ~loss.detach().isfinite()
        # The other stages of a pipeline have none.
        own = own + _HAS_LOSS * (loss.detach() != 0)
        if is_damaged is not None:
            own = own + _DAMAGED * is_damaged
        flags[share.index * mesh.world_size + mesh.rank] = own
    return flags


def damaged_ranks(flags: torch.Tensor) -> list[int]:
    """Return the ranks whose state is damaged, by index among all ranks of all replicas."""
    return [rank for rank, flag in enumerate(flags.tolist()) if int(flag) & _DAMAGED]


def non_finite_ranks(flags: torch.Tensor) -> list[int]:
    """Return the ranks whose own loss is not finite, by index as above, if it is one rank or a
    minority of those with a loss. Else the fault is in what all have, such as the weights."""
    ranks = [rank for rank, flag in enumerate(flags.tolist()) if int(flag) & _NON_FINITE]
    num_losses = sum(int(flag) & _HAS_LOSS > 0 for flag in flags.tolist())
    return ranks if len(ranks) == 1 or 2 * len(ranks) < num_losses else []
