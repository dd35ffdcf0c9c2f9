"""Whether two sides did the same work: equal losses or results, dtype and threads. Printed for
every case.

Invariant: what does not agree is named, and its row is not met.
"""

from collections.abc import Sequence
from typing import Any

LOSS_TOLERANCE = 1e-5
"""Relative. The same float32 sums in another order; a wrong scale or sample is far beyond it."""


class Agreement:
    """Collects what the sides of a case say of themselves: ours, and the `other`."""

    def __init__(self, title: str, *, other: str = "floor") -> None:
        self._other = other
        self._lines = [title]
        self._faults: list[str] = []

    @property
    def holds(self) -> bool:
        return not self._faults

    def same(self, name: str, ours: Any, other: Any) -> None:
        """Both sides must say exactly the same."""
        self.note(f"{name}: ours {ours}, {self._other} {other}")
        if ours != other:
            self._faults.append(f"{name} differs: ours {ours}, {self._other} {other}")

    def close_losses(self, ours: Sequence[float], other: Sequence[float], *, stride: int) -> None:
        """The losses of the first steps must agree. Shows every `stride`-th, and the last."""
        if len(ours) != len(other) or not ours:
            self._faults.append(
                f"ours has the losses of {len(ours)} steps, {self._other} of {len(other)}"
            )
        for step, (a, b) in enumerate(zip(ours, other, strict=False), start=1):
            if step % stride == 1 % stride or step == len(ours):
                self.note(f"loss of step {step}: ours {a:.7f}, {self._other} {b:.7f}")
            # Written so that nan is a fault.
            if not abs(a - b) <= LOSS_TOLERANCE * abs(b):
                self._faults.append(f"the loss of step {step} differs: ours {a}, {self._other} {b}")

    def small(self, name: str, difference: float, tolerance: float) -> None:
        """A difference of the sides must be within its tolerance."""
        self.note(f"{name}: {difference:.2g} (at most {tolerance:g})")
        # Written so that nan is a fault.
        if not difference <= tolerance:
            self._faults.append(f"{name} is {difference}, above {tolerance}")

    def note(self, line: str) -> None:
        """Show a line with the case."""
        self._lines.append(f"  {line}")

    def text(self) -> str:
        """What was collected, with the faults last."""
        return "\n".join([*self._lines, *(f"  FAILED: {fault}" for fault in self._faults)])
