"""Predictions as text and as plain values."""

from collections.abc import Iterable, Sequence
from typing import Any

from torchtitan_lite.tools.failure_model.published import PublishedComparison
from torchtitan_lite.tools.failure_model.scenario import Scenario, described
from torchtitan_lite.tools.failure_model.simulation import Prediction


def table(predictions: Sequence[Prediction], *, first: str = "ranks") -> list[str]:
    """Return the goodput by number of ranks and strategy, in lines."""
    strategies = list(dict.fromkeys(prediction.strategy for prediction in predictions))
    rows = [[first, *(strategy.name for strategy in strategies)]]
    for num_ranks in dict.fromkeys(prediction.num_ranks for prediction in predictions):
        by_strategy = {
            prediction.strategy: prediction
            for prediction in predictions
            if prediction.num_ranks == num_ranks
        }
        rows.append(
            [
                f"{num_ranks:,}",
                *(f"{by_strategy[strategy].shares.goodput:.2%}" for strategy in strategies),
            ]
        )
    return _aligned(rows)


def parts(predictions: Sequence[Prediction]) -> list[str]:
    """Return where the time of each prediction goes, in lines."""
    rows = [["strategy", *predictions[0].shares.shares()]]
    for prediction in predictions:
        rows.append(
            [prediction.strategy.name, *(f"{x:.2%}" for x in prediction.shares.shares().values())]
        )
    return _aligned(rows)


def input_lines(scenario: Scenario) -> list[str]:
    """Return the inputs with their sources, in lines."""
    return _aligned(
        [[name, f"{value:g}", source] for name, value, source in described(scenario)], left=(0, 2)
    )


def published_lines(comparisons: Iterable[PublishedComparison]) -> list[str]:
    """Return published results next to the predictions, in lines."""
    rows = [["published result", "published", "predicted", "deviation"]]
    rows += [
        [
            comparison.case.name,
            f"{comparison.case.published:.0f} {comparison.case.unit}",
            f"{comparison.predicted:.1f} {comparison.case.unit}",
            comparison.deviation_text,
        ]
        for comparison in comparisons
    ]
    return _aligned(rows)


def as_values(scenario: Scenario, predictions: Iterable[Prediction], **more: Any) -> dict[str, Any]:
    """Return everything for a JSON file; times without an end are null."""
    return {
        **more,
        "inputs": {
            name: {"value": value if value != float("inf") else None, "source": source}
            for name, value, source in described(scenario)
        },
        "predictions": [
            {
                "strategy": prediction.strategy.name,
                "ranks": prediction.num_ranks,
                "hours": prediction.hours,
                "goodput": prediction.shares.goodput,
                "shares": prediction.shares.shares(),
                "save_interval_s": prediction.times.save_interval_s,
                "snapshot_interval_s": prediction.times.snapshot_interval_s,
                "buddy_interval_s": prediction.times.buddy_interval_s,
            }
            for prediction in predictions
        ],
    }


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
