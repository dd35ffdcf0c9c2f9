"""Debugging aids, switched on by [debug]; a disabled one costs nothing.

Each is a context around a step or around the schedule's run, so neither the training loop nor
`parallel/` refers to it.
"""

from torchtitan_lite.training.debug.explicit import explicit_redistribution
from torchtitan_lite.training.debug.schedule import ScheduleInside
from torchtitan_lite.training.debug.trace import StepTracer, traced_step

__all__ = ["ScheduleInside", "StepTracer", "explicit_redistribution", "traced_step"]
