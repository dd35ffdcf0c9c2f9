"""Per-rank work times, without waiting for other ranks, known to all ranks.

They are part of the reduction of a step: a position per rank of each replica, to which all others
add zeros.
"""

import time
from collections.abc import Sequence

import torch

from torchtitan_lite.core.diagnosis import WRITER, Cause, Diagnosis, report_diagnosis
from torchtitan_lite.core.events import StepEvent
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.torch_compat import CollectiveWaits
from torchtitan_lite.fault_tolerance.replica import Share
from torchtitan_lite.training.anomalies.slow_ranks import RankWork, SlowRank, SlowRankDetector
from torchtitan_lite.training.anomalies.slow_storage import SlowStorageDetector

_NUMBERS = 6
"""Numbers per rank: replica, microbatches, seconds of work, of these waiting for data, and seconds
and bytes of the last write of a checkpoint."""


class WorkTimes:
    """Measures this rank's work time and detects slow ranks. Each step reports the times of the
    previous one, because a device has not finished a step when its numbers are collected."""

    def __init__(self, mesh: Mesh, replica: int, waits: CollectiveWaits | None = None) -> None:
        """`replica` is the number of this replica. `waits` measures the host's waiting in
        collectives; without it, that counts as work."""
        self._mesh, self._replica, self._waits = mesh, replica, waits
        self._slow_ranks, self._slow_storage = SlowRankDetector(), SlowStorageDetector()
        self._data_s = self._data_before_s = 0.0
        """Seconds of this step in which this rank waited for data: during its work, and between the
        steps."""
        self._waited_s = 0.0
        self._ranks_of_stage = mesh.world_size // mesh.degrees.pp
        self._on_gpu = mesh.device.kind == "cuda"
        self._began = self._ended = self._now()
        self._last_work = (float(replica), 0.0, 0.0, 0.0)
        self._reduced, self._totals_s = self._began, time.perf_counter()
        self._anchor = (self._began, time.perf_counter())
        """The same moment on the device's and on the host's clock."""

    def begin(self) -> None:
        """Start of own work."""
        self._waited_s = self._total_wait_s()
        self._began = self._now()

    def end(self) -> None:
        """End of own work."""
        self._ended = self._now()
        self._waited_s = self._total_wait_s() - self._waited_s

    def waited_for_data(self, seconds: float, before_s: float) -> None:
        """Record how long this rank waited for data: `seconds` of its work, and `before_s` since
        its last work."""
        self._data_s, self._data_before_s = seconds, before_s

    def _total_wait_s(self) -> float:
        return 0.0 if self._waits is None else self._waits.seconds

    def mark_reduction(self) -> None:
        """Record the end of the reduction on the device's stream."""
        self._reduced = self._now()

    def mark_totals(self) -> None:
        """Record that the host has the totals: the device has just finished the reduction."""
        self._totals_s = time.perf_counter()

    def local_values(self, share: Share, last_write: tuple[float, int]) -> torch.Tensor:
        """Return this rank's values for the reduction: float64 [participants * ranks * 6],
        on the CPU. `last_write` has the seconds and bytes of its last write of a checkpoint; 0:
        none."""
        length = share.count * self._mesh.world_size * _NUMBERS
        numbers = torch.zeros(length, dtype=torch.float64)
        if share.index >= 0:
            start = (share.index * self._mesh.world_size + self._mesh.rank) * _NUMBERS
            values = (*self._last_work, *last_write)
            numbers[start : start + _NUMBERS] = torch.tensor(values, dtype=torch.float64)
        return numbers

    def record(
        self, totals: torch.Tensor, num_microbatches: int, *, is_valid: bool
    ) -> list[StepEvent]:
        """Record the sums of `local_values` over all ranks if they are valid, once the device has
        finished the step, in which this rank's work was `num_microbatches`. Returns events of slow
        ranks."""
        self._last_work = (
            float(self._replica),
            float(num_microbatches),
            max(self._seconds() - self._waited_s, 0.0) + self._data_before_s,
            self._data_s + self._data_before_s,
        )
        if not is_valid or len(totals) == _NUMBERS:
            return []
        work = [
            RankWork(
                replica=round(replica),
                rank=place % self._mesh.world_size,
                stage=place % self._mesh.world_size // self._ranks_of_stage,
                microbatches=round(microbatches),
                seconds=seconds,
                data_s=data_s,
            )
            for place, (replica, microbatches, seconds, data_s, *_) in enumerate(
                totals.view(-1, _NUMBERS).tolist()
            )
        ]
        changes = self._slow_ranks.step(work)
        writes = {
            (entry.replica, entry.rank): (seconds, num_bytes)
            for entry, (*_, seconds, num_bytes) in zip(
                work, totals.view(-1, _NUMBERS).tolist(), strict=True
            )
        }
        slow_writers = self._slow_storage.step(writes)
        # One of all ranks reports.
        if self._mesh.is_leader and work[0].replica == self._replica:
            self._report(changes, slow_writers)
        return [
            StepEvent("slow_rank" if change.is_slow else "slow_rank_ended", vars(change))
            for change in changes
        ]

    def _report(
        self, changes: Sequence[SlowRank], slow_writers: Sequence[tuple[tuple[int, int], float]]
    ) -> None:
        for change in changes:
            text = f"its work takes {change.times_slower:.2f} times that of the others"
            if change.is_slow:
                cause = Cause.SLOW_DATA if change.waits_for_data else Cause.SLOW_RANK
                text += ", because it waits for data" if change.waits_for_data else ""
                report_diagnosis(
                    Diagnosis(cause=cause, text=text, rank=change.rank, replica=change.replica)
                )
            else:
                logger.warning(
                    "Rank %d of replica %d is no longer slow: %s.",
                    change.rank,
                    change.replica,
                    text,
                )
        for (replica, rank), times in slow_writers:
            text = f"its last writes of checkpoints took {times:.1f} times those of the others"
            report_diagnosis(
                Diagnosis(
                    cause=Cause.SLOW_STORAGE,
                    text=text,
                    rank=rank,
                    replica=replica,
                    process=WRITER,
                )
            )

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
