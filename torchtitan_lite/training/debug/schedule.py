"""A pipeline schedule that runs inside a context."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from torchtitan_lite.nn.spec import Microbatch, PipelineSchedule


class ScheduleInside:
    """Wraps `schedule`: every run of forward and backward is inside a context of its own. See
    `spec.PipelineSchedule`."""

    def __init__(
        self, schedule: PipelineSchedule, context: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._schedule = schedule
        self._context = context
        self.min_microbatches = schedule.min_microbatches

    def run(
        self,
        microbatches: Sequence[Microbatch],
        *,
        backward: bool,
        before_last: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """See `spec.PipelineSchedule`."""
        with self._context():
            return self._schedule.run(microbatches, backward=backward, before_last=before_last)
