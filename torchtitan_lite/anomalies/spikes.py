"""Whether a number is far above those before it. Layer: imports nothing of the project.

Median and median distance, so that what has spiked before does not hide the next: Hampel, "The
influence curve and its role in robust estimation", 1974.
"""

from collections.abc import Sequence
from statistics import median

_PER_DEVIATION = 1.4826
"""Standard deviations of a normal distribution in its median distance from the median."""


def deviations_above(value: float, before: Sequence[float], least_deviation: float) -> float:
    """How many robust standard deviations `value` lies above the median of `before`. A deviation
    counts as `least_deviation` at least: numbers that hardly change would make a spike of any."""
    middle = median(before)
    deviation = _PER_DEVIATION * median(abs(one - middle) for one in before)
    return (value - middle) / max(deviation, least_deviation)
