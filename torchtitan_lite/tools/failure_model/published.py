"""Comparison of the model with published results."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchtitan_lite.tools.failure_model.published_cases import CONSTANTS, PublishedCase
from torchtitan_lite.tools.failure_model.scenario import Scenario
from torchtitan_lite.tools.failure_model.simulation import predict
from torchtitan_lite.tools.failure_model.strategies import STRATEGIES

_BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}


@dataclass(frozen=True, kw_only=True)
class PublishedComparison:
    """A published result next to its prediction."""

    case: PublishedCase
    predicted: float

    @property
    def deviation(self) -> float:
        """Deviation of the prediction: percentage points of a share, or percent of a time."""
        published = self.case.published
        if self.case.unit == "%":
            return self.predicted - published
        return (self.predicted / published - 1) * 100

    @property
    def deviation_text(self) -> str:
        """The deviation with its unit."""
        unit = "points" if self.case.unit == "%" else "%"
        return f"{self.deviation:+.1f} {unit}"


def compare(
    cases: Iterable[PublishedCase], *, failures: int, seed: int
) -> list[PublishedComparison]:
    """Predict the published results, over the time of about `failures` failures each."""
    return [
        PublishedComparison(case=case, predicted=_predicted(case, failures, seed)) for case in cases
    ]


def _predicted(case: PublishedCase, failures: int, seed: int) -> float:
    scenario = replace(Scenario(), **CONSTANTS, **case.inputs)
    (prediction,) = predict(
        scenario, [_BY_NAME[case.strategy]], case.num_ranks, failures=failures, seed=seed
    )
    if case.unit == "%":
        return prediction.shares.goodput * 100
    return case.num_steps / prediction.num_steps * prediction.hours * 60
