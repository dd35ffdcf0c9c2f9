"""Whether a number is far above those before it. Layer: above robust."""

from collections.abc import Sequence

import numpy as np

from torchtitan_lite.anomalies.robust import middle_and_deviation


def deviations_above(value: float, before: Sequence[float], least_deviation: float) -> float:
    """How many robust standard deviations `value` lies above the median of `before`. A deviation
    counts as `least_deviation` at least: numbers that hardly change would make a spike of any."""
    middle, deviation = middle_and_deviation(np.array(before))
    return (value - float(middle)) / max(float(deviation), least_deviation)
