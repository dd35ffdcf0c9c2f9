"""Samples that a disturbed run has lost or used twice.

Of the product it is known by its losses: each is a sum over all samples of a step, by weights that
come from all samples before, so that one which is left out, used twice or used in another step
shows from there on. The peer on torchft says which batch of its own data it used in each step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.recovery_reader import Told

TOLERANCE = 2e-4
"""Relative, float32 over hundreds of steps: the same terms are added in another order by those who
are there. One other sample of a few hundred tokens moves a loss by more than ten times that."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of a run's steps from those of an undisturbed one."""

    compared: int
    """Steps that both have."""
    wrong: int
    """With another loss, or another number of targets."""
    furthest: float
    """Relative difference of a loss."""


def difference(told: Sequence[Told], straight: Sequence[Told]) -> Difference:
    """Every line is compared, of steps that were taken twice too."""
    expected = {one.step: one for one in straight}
    pairs = [(one, expected[one.step]) for one in told if one.step in expected]
    off = [_off(one, wanted) for one, wanted in pairs]
    return Difference(
        compared=len({one.step for one, _ in pairs}),
        wrong=sum(not value <= TOLERANCE for value in off),
        furthest=max(off, default=float("nan")),
    )


def _off(one: Told, wanted: Told) -> float:
    if one.values["num_target_tokens"] != wanted.values["num_target_tokens"]:
        return float("inf")
    loss = wanted.values["loss"]
    return abs(one.values["loss"] - loss) / abs(loss)


def batches_lost_and_repeated(told: Sequence[Told]) -> tuple[int, int]:
    """Of the peer's batches: up to the last that a replica has used, those that no step used, and
    the uses of others beyond the first."""
    lost = repeated = 0
    for replica in {one.replica for one in told}:
        # One that healed meanwhile added nothing.
        took_part = [one for one in told if one.replica == replica and one.values["took_part"]]
        used = [one.values["batch"] for one in took_part]
        lost += max(used) + 1 - len(set(used))
        repeated += len(used) - len(set(used))
    return lost, repeated
