"""`torchtitan-lite estimate --failures`: goodput under failures."""

import argparse
import json
import sys
from collections.abc import Sequence

from torchtitan_lite.core.errors import UserError
from torchtitan_lite.tools.failure_model import (
    CASES,
    STRATEGIES,
    Prediction,
    Scenario,
    as_values,
    compare,
    goodput_picture,
    input_lines,
    overridden,
    parts,
    predict,
    predict_trace,
    published_lines,
    read_trace,
    table,
)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print the predictions. Returns the exit status."""
    if options.published:
        comparisons = compare(CASES, failures=options.num_failures, seed=options.seed)
        print("\n".join(published_lines(comparisons)))
        print("\ndocs/failures.md lists what each source states and what is assumed.")
        return 0
    try:
        scenario = overridden(Scenario(), dict(options.set))
        if options.trace is not None:
            trace = read_trace(options.trace)
            predictions = predict_trace(scenario, STRATEGIES, trace)
            print(
                f"Goodput on {options.trace}: {trace.duration_s / 3600:.1f} h, "
                f"{trace.num_losses} machines lost, at most {trace.most_machines} at a time"
            )
        else:
            predictions = _predictions(scenario, options)
            print(
                f"Goodput under failures: one per {scenario.mtbf_h:,g} h and rank, "
                f"about {options.num_failures:,} for each number of ranks"
            )
        print("\n".join(["", *table(predictions)]))
        largest = [
            prediction
            for prediction in predictions
            if prediction.num_ranks == predictions[-1].num_ranks
        ]
        print("\n".join(["", f"Time on {largest[0].num_ranks:,} ranks", *parts(largest)]))
        print("\n".join(["", *(f"{strategy.name}: {strategy.title}" for strategy in STRATEGIES)]))
        print("\n".join(["", "Inputs (--set NAME=VALUE)", *input_lines(scenario)]))
        if options.failure_plot is not None:
            picture = goodput_picture(predictions, "Goodput under failures")
            options.failure_plot.write_text(picture, encoding="utf-8")
            print(f"\nWrote {options.failure_plot}")
        if options.json is not None:
            values = as_values(scenario, predictions, seed=options.seed)
            options.json.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"estimate --failures: {error}", file=sys.stderr)
        return 2
    return 0


def _predictions(scenario: Scenario, options: argparse.Namespace) -> list[Prediction]:
    return [
        prediction
        for num_ranks in options.ranks
        for prediction in predict(
            scenario, STRATEGIES, num_ranks, failures=options.num_failures, seed=options.seed
        )
    ]
