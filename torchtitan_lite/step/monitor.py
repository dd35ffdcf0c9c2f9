"""The decision about each step: commit, abort, skip, stop or roll back.

Layer: above anomalies, phases, replay, totals and work_times.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from torchtitan_lite.anomalies import ABORT, Action, AnomalyDetector, Decision, History
from torchtitan_lite.replica import ReplicaEvent, Replicas, Share
from torchtitan_lite.spec import Microbatch
from torchtitan_lite.step.replay import Replay
from torchtitan_lite.step.totals import StepTotals
from torchtitan_lite.step.work_times import WorkTimes


class StepMonitor:
    """Observes each step, and decides about it by the totals of all ranks."""

    def __init__(
        self, detector: AnomalyDetector, work_times: WorkTimes, replay: Replay | None
    ) -> None:
        """Without `replay`, anomalies are attributed to the data."""
        self.detector, self.work_times = detector, work_times
        self._replay = replay

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Observe this rank's own work: loading, forward and backward."""
        self.work_times.begin()
        if self._replay is not None:
            self._replay.begin()
        yield
        self.work_times.end()

    def decide(
        self,
        totals: StepTotals,
        loss: torch.Tensor,
        microbatches: Sequence[Microbatch],
        history: History,
        share: Share,
        replicas: Replicas,
    ) -> tuple[Decision, list[ReplicaEvent]]:
        """Let the replicas vote, and decide about the step; recompute an anomalous one. `loss` is
        this rank's part of the loss. All ranks decide alike. Returns the decision, and events of
        slow ranks. Every rank must call it."""
        is_complete = replicas.should_commit(totals.num_ranks, totals.cursors, totals.steps)
        num_microbatches = len(microbatches)
        events = self.work_times.record(totals.work_times, num_microbatches, is_valid=is_complete)
        if not is_complete:
            return ABORT, events
        decision = self.detector.decide(totals.mean_loss, totals.grad_norm, history)
        if decision.is_anomalous and self._replay is not None:
            differing = self._replay.differing(loss, microbatches, share, replicas)
            if differing is None:
                return ABORT, events
            if differing:
                decision = Decision(Action.ABORT, faulty_ranks=tuple(differing))
        return decision, events
