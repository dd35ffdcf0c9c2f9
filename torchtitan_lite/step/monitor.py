"""The decision about each step: commit, abort, skip, stop or roll back.

Layer: above anomalies, phases, replay, totals and work_times.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from torchtitan_lite.anomalies import ABORT, Action, AnomalyDetector, Decision, History
from torchtitan_lite.events import StepEvent
from torchtitan_lite.phases import Phase, Phases
from torchtitan_lite.replica import Replicas, Share
from torchtitan_lite.spec import Microbatch
from torchtitan_lite.step.replay import Replay
from torchtitan_lite.step.totals import StepTotals
from torchtitan_lite.step.work_times import WorkTimes


class StepMonitor:
    """Observes each step, and decides about it by the totals of all ranks."""

    def __init__(
        self,
        detector: AnomalyDetector,
        work_times: WorkTimes,
        replay: Replay | None,
        phases: Phases,
    ) -> None:
        """Without `replay`, anomalies are attributed to the data."""
        self.detector, self.work_times, self._phases = detector, work_times, phases
        self._replay = replay

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

    def decide(
        self,
        totals: StepTotals,
        loss: torch.Tensor,
        microbatches: Sequence[Microbatch],
        history: History,
        share: Share,
        replicas: Replicas,
        *,
        is_complete: bool,
    ) -> tuple[Decision, list[StepEvent]]:
        """Decide about the step, and recompute an anomalous one. `loss` is this rank's part of the
        loss; `is_complete` is the result of the replicas' vote. All ranks decide identically.
        Returns the decision, and events of slow ranks. Every rank must call it."""
        ended_ago_s = self.work_times.device_ended_ago_s()
        if ended_ago_s is not None:
            # The host ran ahead: it waited in the reduction for the device's backward.
            self._phases.device_worked(Phase.COMPUTE, ended_ago_s)
        num_microbatches = len(microbatches)
        events = self.work_times.record(totals.work_times, num_microbatches, is_valid=is_complete)
        if not is_complete:
            return ABORT, events
        decision = self.detector.decide(totals.mean_loss, totals.grad_norm, history)
        if decision.is_anomalous and self._replay is not None:
            differing = self._replay.find_mismatching_ranks(loss, microbatches, share, replicas)
            if differing is None:
                return ABORT, events
            if differing:
                decision = Decision(Action.ABORT, faulty_ranks=tuple(differing))
        return decision, events
