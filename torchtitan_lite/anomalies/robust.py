"""Robust location and scale: median and median distance, so that one spike does not hide the next
(Hampel, "The influence curve and its role in robust estimation", 1974)."""

import numpy as np

_PER_DEVIATION = 1.4826
"""Standard deviation of a normal distribution per median distance from the median."""


def middle_and_deviation(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the median over the first dim, and the robust estimate of the standard deviation."""
    middle = np.median(numbers, axis=0)
    return middle, _PER_DEVIATION * np.median(np.abs(numbers - middle), axis=0)
