"""Middle and scatter of numbers of which some are far off. Layer: imports nothing of the project.

Median and median distance, so that what has spiked before does not hide the next: Hampel, "The
influence curve and its role in robust estimation", 1974.
"""

import numpy as np

_PER_DEVIATION = 1.4826
"""Standard deviations of a normal distribution in its median distance from the median."""


def middle_and_deviation(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The median over the first dim, and what would be the standard deviation if only a few were
    not normally distributed."""
    middle = np.median(numbers, axis=0)
    return middle, _PER_DEVIATION * np.median(np.abs(numbers - middle), axis=0)
