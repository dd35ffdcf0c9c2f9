"""How long the sides of a comparison take turns. Light, since the parent of the runs imports it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Turns:
    """After how many steps the sides take turns."""

    warmup_steps: int
    """Length of the first turn."""
    steps: int
    """Length of the others."""
    count: int
    """Turns of each side after the warm-up."""

    @property
    def total_steps(self) -> int:
        return self.warmup_steps + self.steps * self.count

    def ends_after(self, step: int) -> bool:
        return step >= self.warmup_steps and (step - self.warmup_steps) % self.steps == 0
