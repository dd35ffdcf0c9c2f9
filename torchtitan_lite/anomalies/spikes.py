"""Spike detection. Layer: above robust."""

from collections.abc import Sequence

import numpy as np

from torchtitan_lite.anomalies.robust import middle_and_deviation


def deviations_above(value: float, before: Sequence[float], least_deviation: float) -> float:
    """Return how many robust standard deviations `value` is above the median of `before`. A
    deviation counts as at least `least_deviation`: numbers that hardly change would make anything a
    spike."""
    middle, deviation = middle_and_deviation(np.array(before))
    return (value - float(middle)) / max(float(deviation), least_deviation)
