"""Aids for finding faults, which [debug] switches on: what is off is not there.

They come from outside, as contexts around a step or around the schedule's run, so neither the loop
nor the techniques of `parallel/` ask about them. Layer: above mesh and spec.
"""

from torchtitan_lite.debug.explicit import explicit_redistribution
from torchtitan_lite.debug.schedule import ScheduleInside
from torchtitan_lite.debug.trace import StepTrace, traced_step

__all__ = ["ScheduleInside", "StepTrace", "explicit_redistribution", "traced_step"]
