"""How often a snapshot is taken. Layer: imports nothing of the project."""

import math

MOST_OF_A_STEP = 0.03
"""What snapshots may cost of a step's time, where no interval is given."""


class SnapshotInterval:
    """Steps between two snapshots: given, or as few as cost at most 3 % of a step.

    Every rank measures; since all see the sums of all, they come to the same.
    """

    def __init__(self, given: int) -> None:
        """-1: by cost; 0: no snapshots."""
        self._given = given
        self._copy_s = self._step_s = 0.0
        """Seconds of a copy and of a step, summed over ranks; the least of late ones, since what
        else a machine does makes single ones longer."""
        self.steps = max(given, 1)

    @property
    def is_given(self) -> bool:
        """Whether snapshots are taken for their own sake."""
        return self._given != 0

    def measured(self, copy_s: float, step_s: float) -> None:
        """Take note of a snapshot and a step, both summed over all ranks."""
        if self._given != -1 or copy_s <= 0 or step_s <= 0:
            return
        self._copy_s = min(copy_s, self._copy_s * 1.1) if self._copy_s else copy_s
        self._step_s = min(step_s, self._step_s * 1.1) if self._step_s else step_s
        self.steps = max(1, math.ceil(self._copy_s / (MOST_OF_A_STEP * self._step_s)))

    def due(self, steps_since: int) -> bool:
        """Whether one is due so many steps after the last."""
        return self.is_given and steps_since >= self.steps
