"""Per-rank work times, before waiting for other ranks, known to all ranks.

They are part of the reduction of a step: a position per rank of each replica, to which all others
add zeros. Layer: above anomalies, mesh and replica.
"""

import time

import torch

from torchtitan_lite.anomalies.slow_ranks import RankWork, SlowRankDetector
from torchtitan_lite.events import StepEvent
from torchtitan_lite.log import logger
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.replica import Share

_NUMBERS = 3
"""Numbers per rank: replica, microbatches, seconds."""


class WorkTimes:
    """Measures this rank's work time and detects slow ranks. Each step reports the times of the
    previous one, because a device has not finished a step when its numbers are collected."""

    def __init__(self, mesh: Mesh, replica: int) -> None:
        """`replica` is the number of this replica."""
        self._mesh, self._replica = mesh, replica
        self._slow_ranks = SlowRankDetector()
        self._ranks_of_stage = mesh.world_size // mesh.degrees.pp
        self._on_gpu = mesh.device.kind == "cuda"
        self._began = self._ended = self._now()
        self._last_work = (0.0, 0.0, 0.0)
        self._reduced, self._totals_s = self._began, time.perf_counter()
        self._anchor = (self._began, time.perf_counter())
        """The same moment on the device's and on the host's clock."""

    def begin(self) -> None:
        """Start of own work."""
        self._began = self._now()

    def end(self) -> None:
        """End of own work."""
        self._ended = self._now()

    def mark_reduction(self) -> None:
        """Record the end of the reduction on the device's stream."""
        self._reduced = self._now()

    def mark_totals(self) -> None:
        """Record that the host has the totals: the device has just finished the reduction."""
        self._totals_s = time.perf_counter()

    def local_values(self, share: Share) -> torch.Tensor:
        """Return this rank's values for the reduction: float64 [participants * ranks * 3],
        on the CPU."""
        length = share.count * self._mesh.world_size * _NUMBERS
        numbers = torch.zeros(length, dtype=torch.float64)
        if share.index >= 0:
            start = (share.index * self._mesh.world_size + self._mesh.rank) * _NUMBERS
            numbers[start : start + _NUMBERS] = torch.tensor(self._last_work, dtype=torch.float64)
        return numbers

    def record(
        self, totals: torch.Tensor, num_microbatches: int, *, is_valid: bool
    ) -> list[StepEvent]:
        """Record the sums of `local_values` over all ranks if they are valid, once the device has
        finished the step, in which this rank's work was `num_microbatches`. Returns events of slow
        ranks."""
        self._last_work = (float(self._replica), float(num_microbatches), self._seconds())
        if not is_valid or len(totals) == _NUMBERS:
            return []
        work = [
            RankWork(
                replica=round(replica),
                rank=place % self._mesh.world_size,
                stage=place % self._mesh.world_size // self._ranks_of_stage,
                microbatches=round(microbatches),
                seconds=seconds,
            )
            for place, (replica, microbatches, seconds) in enumerate(
                totals.view(-1, _NUMBERS).tolist()
            )
        ]
        changes = self._slow_ranks.step(work)
        for one in changes if self._mesh.is_leader else ():
            logger.warning(
                "Rank %d of replica %d %s: its work takes %.2f times that of the others.",
                one.rank,
                one.replica,
                "is slow" if one.is_slow else "is no longer slow",
                one.times_slower,
            )
        return [
            StepEvent("slow_rank" if one.is_slow else "slow_rank_ended", vars(one))
            for one in changes
        ]

    def device_ended_ago_s(self) -> float | None:
        """Return the seconds from the end of this rank's work on the device to `mark_totals`; None
        without a GPU. Must be called once per step, after `mark_totals`."""
        anchor, anchor_s = self._anchor
        if isinstance(anchor, float | int) or isinstance(self._ended, float | int):
            return None
        ended_s = anchor_s + anchor.elapsed_time(self._ended) / 1000
        self._anchor = (self._reduced, self._totals_s)
        return max(0.0, self._totals_s - ended_s)

    def _now(self) -> "float | torch.cuda.Event":
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self) -> float:
        if isinstance(self._began, float) and isinstance(self._ended, float):
            return self._ended - self._began
        assert isinstance(self._began, torch.cuda.Event)
        assert isinstance(self._ended, torch.cuda.Event)
        return self._began.elapsed_time(self._ended) / 1000
