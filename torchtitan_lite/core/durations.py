"""Durations: estimated from past steps, and formatted for display."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

_RECENT_STEPS = 50


def recent_steps() -> deque[float]:
    """Return an empty list for the seconds of the most recent steps, which drops the oldest
    ones. `time_left_s` estimates from it."""
    return deque(maxlen=_RECENT_STEPS)


def time_left_s(recent_step_s: Iterable[float], num_steps_left: int) -> float | None:
    """Estimate the seconds until the end of the last step; None before the first step.

    Uses the median, so that a single slow step (a compilation, a save) has no effect.
    """
    times_s = list(recent_step_s)
    return median(times_s) * num_steps_left if times_s else None


def clock(seconds: float | None) -> str:
    """Format seconds as `0:42`, `1:02:03`, `2d 03:04:05`; `?` for None, infinity and NaN."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
