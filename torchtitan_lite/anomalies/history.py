"""The history on which the decision about a step depends.

It is part of the training state: a healing replica and a resumed run must decide as the others do.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_MOST_RETURNS = 64


@dataclass
class History:
    """Recent losses, gradient norms and roll backs."""

    losses: list[float] = field(default_factory=list)
    """Losses of the newest committed steps within the window, oldest first."""
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norms of the same steps."""
    refused_in_a_row: int = 0
    roll_backs_in_a_row: int = 0
    furthest: int = 0
    """Step at which the last roll back began; beyond it the count of roll backs restarts."""
    returns: list[list[int]] = field(default_factory=list)
    """(step, cursor) at which training continued after each roll back."""

    def committed(self, step: int, loss: float, grad_norm: float, *, window: int) -> None:
        """Record a committed step; `window` is the number to keep."""
        self.losses = [*self.losses, loss][-window:] if window else []
        self.grad_norms = [*self.grad_norms, grad_norm][-window:] if window else []
        self.refused_in_a_row = 0
        if step > self.furthest:
            self.roll_backs_in_a_row = 0

    def refused(self) -> None:
        """Record a skipped step."""
        self.refused_in_a_row += 1

    def rolled_back(self, earlier: "History", *, at: int, to: int, cursor: int) -> None:
        """Record a roll back from step `at` to step `to`, whose history was `earlier`; the next
        sample is `cursor`."""
        self.losses, self.grad_norms = earlier.losses, earlier.grad_norms
        self.roll_backs_in_a_row += 1
        self.furthest = max(self.furthest, at)
        self.returns = [*self.returns, [to, cursor]][-_MOST_RETURNS:]

    def has_left_behind(self, step: int, cursor: int) -> bool:
        """Whether a state of this run was abandoned by a roll back."""
        return any(step > to and cursor <= at for to, at in self.returns)

    def forget_rows(self) -> None:
        """Reset the counts of consecutive anomalies, because the run ends."""
        self.refused_in_a_row = self.roll_backs_in_a_row = 0

    def values(self) -> dict[str, Any]:
        """Return JSON values, which do not change later."""
        return asdict(self)

    @staticmethod
    def of(values: Mapping[str, Any]) -> "History":
        """Restore from `values`; an earlier release may have written fewer."""
        known = {one.name for one in fields(History)}
        return History(**{name: value for name, value in values.items() if name in known})
