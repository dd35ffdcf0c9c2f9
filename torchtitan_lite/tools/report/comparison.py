"""Differences between two runs: their loss, gradient norm and config. Pure."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.tools.report.run_files import RunFiles

COMPARED = ("loss", "grad_norm")
_MEAN_STEPS = 10
"""Steps over which a loss is averaged for a comparison of runs with different steps."""
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class StepDifference:
    """The values of two runs at one step; None if not finite."""

    step: int
    first: float | None
    other: float | None

    @property
    def absolute(self) -> float:
        """Return |a - b|, or infinity if one of the two is not finite."""
        if self.first is None or self.other is None:
            return 0.0 if self.first is self.other else math.inf
        return abs(self.first - self.other)

    @property
    def relative(self) -> float:
        """Return |a - b| / max(|a|, |b|): 0 for equal values, at most 2, infinity if one of the
        two is not finite."""
        if self.first is None or self.other is None or self.first == self.other:
            return self.absolute
        largest = max(abs(self.first), abs(self.other))
        return abs(self.first / largest - self.other / largest)


@dataclass(frozen=True)
class EqualBudget:
    """The losses of two runs after the same tokens, or in the same time: what the shorter of them
    has taken. Each is the mean of the last steps up to there; None if not finite."""

    axis: str
    """"tokens" or "seconds"."""
    amount: float
    first: float | None
    other: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of another run with the first, over their common committed steps."""

    first: str
    other: str
    steps: tuple[int, ...]
    """Common steps, ascending."""
    last_steps: tuple[int | None, int | None]
    """Last committed step of the first and of the other run; None: no committed step."""
    differences: Mapping[str, tuple[StepDifference, ...]]
    """Differences by name in COMPARED, one per common step."""
    budgets: tuple[EqualBudget, ...]
    """Comparisons at equal tokens and in equal time, where both runs record them."""
    config: tuple[tuple[str, str, str], ...]
    """Keys of the config that differ, with both values; an empty text if not set."""

    def first_difference(self, name: str) -> StepDifference | None:
        """Return the values at the first step where the two differ; None if they are equal."""
        return next(
            (difference for difference in self.differences[name] if difference.relative > 0), None
        )

    def largest(self, name: str) -> StepDifference | None:
        """Return the largest relative difference; None without common steps."""
        return max(self.differences[name], key=lambda difference: difference.relative, default=None)

    def exceeds(self, limit: float) -> str | None:
        """Return why the runs differ by more than `limit` or end at different steps, as one
        line; None if they do not."""
        if not self.steps:
            return f"{self.other} and {self.first} have no step in common"
        return "; ".join(filter(None, (self.different_ends(), self._too_large(limit)))) or None

    def different_ends(self) -> str | None:
        """Return the last committed steps of both, as one line; None if they are equal."""
        first, other = self.last_steps
        if first == other:
            return None
        return (
            f"the last committed step of {self.other} is {other}, that of {self.first} is {first}"
        )

    def _too_large(self, limit: float) -> str | None:
        """Describe the largest difference if it exceeds `limit`."""
        differences = [
            (name, worst) for name in COMPARED if (worst := self.largest(name)) is not None
        ]
        name, worst = max(differences, key=lambda largest: largest[1].relative)
        if worst.relative <= limit:
            return None
        return (
            f"{NAMES[name]} of {self.other} differs from {self.first} by {worst.relative:.3g} "
            f"(relative) at step {worst.step}: {_shown(worst.other)} and {_shown(worst.first)}"
        )


def compare(first: RunFiles, other: RunFiles) -> Comparison:
    """Compare `other` with `first`."""
    left, right = ({record.step: record for record in run.merged} for run in (first, other))
    steps = tuple(sorted(left.keys() & right.keys()))
    return Comparison(
        first=first.label,
        other=other.label,
        steps=steps,
        last_steps=(max(left, default=None), max(right, default=None)),
        differences={
            name: tuple(StepDifference(step, left[step][name], right[step][name]) for step in steps)
            for name in COMPARED
        },
        budgets=tuple(_equal_budgets(first, other)),
        config=config_differences(first.config, other.config),
    )


def _equal_budgets(first: RunFiles, other: RunFiles) -> Iterator[EqualBudget]:
    for axis, left, right in (
        ("tokens", first.tokens, other.tokens),
        ("seconds", first.elapsed_s, other.elapsed_s),
    ):
        if left and right:
            amount = min(max(left.values()), max(right.values()))
            losses = (_loss_at(run, used, amount) for run, used in ((first, left), (other, right)))
            yield EqualBudget(axis, amount, *losses)


def _loss_at(run: RunFiles, used: Mapping[int, float], amount: float) -> float | None:
    """Return the mean loss of the last steps that end within `amount`; None if there is none or it
    is not finite."""
    losses = [record["loss"] for record in run.merged if used.get(record.step, math.inf) <= amount]
    finite = [loss for loss in losses[-_MEAN_STEPS:] if loss is not None]
    return sum(finite) / len(finite) if len(finite) == len(losses[-_MEAN_STEPS:]) > 0 else None


def config_differences(
    first: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[tuple[str, str, str], ...]:
    """Return the keys whose values differ, with both values as text."""
    left, right = dict(_flat(first)), dict(_flat(other))
    keys = [*left, *(key for key in right if key not in left)]
    pairs = ((key, left.get(key, ""), right.get(key, "")) for key in keys)
    return tuple(pair for pair in pairs if pair[1] != pair[2])


def _flat(table: Mapping[str, Any], prefix: str = ""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _literal(value)


def _literal(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"
