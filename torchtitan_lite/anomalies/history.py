"""What the judgement of a step depends on beside the step. Layer: imports nothing of the project.

It is part of the training state: a replica that heals and a run that resumes must decide as the
others do.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_MOST_RETURNS = 64


@dataclass
class History:
    """Of the steps up to now."""

    losses: list[float] = field(default_factory=list)
    """Of the newest committed steps, oldest first, as many as are compared with."""
    grad_norms: list[float] = field(default_factory=list)
    """Of the same steps."""
    refused_in_a_row: int = 0
    roll_backs_in_a_row: int = 0
    furthest: int = 0
    """The step at which the last roll back began. Beyond it the row has ended."""
    returns: list[list[int]] = field(default_factory=list)
    """Of each roll back: the step that it led to, and the place in the order of samples at which
    training went on."""

    def committed(self, step: int, loss: float, grad_norm: float, *, window: int) -> None:
        """`step` was committed; `window` is how many are compared with."""
        self.losses = [*self.losses, loss][-window:] if window else []
        self.grad_norms = [*self.grad_norms, grad_norm][-window:] if window else []
        self.refused_in_a_row = 0
        if step > self.furthest:
            self.roll_backs_in_a_row = 0

    def refused(self) -> None:
        """A step was."""
        self.refused_in_a_row += 1

    def rolled_back(self, earlier: "History", *, at: int, to: int, cursor: int) -> None:
        """The state has returned from step `at` to step `to`, when its history was `earlier`; the
        next sample is `cursor`."""
        self.losses, self.grad_norms = earlier.losses, earlier.grad_norms
        self.roll_backs_in_a_row += 1
        self.furthest = max(self.furthest, at)
        self.returns = [*self.returns, [to, cursor]][-_MOST_RETURNS:]

    def has_left_behind(self, step: int, cursor: int) -> bool:
        """Whether a state of this run lies on a way that a roll back has left."""
        return any(step > to and cursor <= at for to, at in self.returns)

    def forget_rows(self) -> None:
        """The run ends here: whoever starts it again has seen why."""
        self.refused_in_a_row = self.roll_backs_in_a_row = 0

    def values(self) -> dict[str, Any]:
        """As JSON values, none of which changes later."""
        return asdict(self)

    @staticmethod
    def of(values: Mapping[str, Any]) -> "History":
        """From what `values` gave. A release before may have written less."""
        known = {one.name for one in fields(History)}
        return History(**{name: value for name, value in values.items() if name in known})
