"""Write docs/failures.md, its picture and the measured figures of the failure model, or check them.

python -m scripts.failure_page [--check]

The figures come from benchmarks/results/, the predictions from the model with its defaults, and the
comparison with real runs from benchmarks/results/failures.json, if there is one.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from scripts.benchmark_page import RESULTS, ROOT, Result, read_results
from scripts.failure_figures import MODULE, measurements, module_text
from torchtitan_lite.tools.failure_model import (
    CASES,
    STRATEGIES,
    Prediction,
    PublishedComparison,
    Scenario,
    compare,
    described,
    goodput_picture,
    predict,
)

PAGE = ROOT / "docs" / "failures.md"
PICTURE = ROOT / "docs" / "images" / "failures.svg"
_TEMPLATE = Path(__file__).with_name("failure_page.md")
_SIZES = (8, 64, 512, 4096, 16384, 32768, 65536, 100_000)
_NUM_FAILURES = 1000
_VARIED = 16384
"""Number of ranks for which inputs are varied."""
_VARIATIONS: Sequence[tuple[str, Mapping[str, float]]] = (
    ("the defaults", {}),
    ("failures three times as often", {"mtbf_h": 16_892.0}),
    ("failures never lose a machine", {"machine_share": 0.0}),
    ("600 s to detect a failure (a collective's timeout)", {"detect_s": 600.0}),
    ("no time to set up process groups", {"group_setup_s_per_1k_ranks": 0.0}),
    ("no reserve machines", {"reserve_share": 0.0}),
    ("snapshots every 4 steps (the product's default here)", {"snapshot_interval_steps": 4}),
    ("saves to storage every 600 steps", {"save_interval_steps": 600}),
    ("storage of 10 GiB/s", {"storage_gib_per_s": 10.0}),
    ("copies to buddies at 1,000 MiB/s per rank", {"buddy_mib_per_s": 1000.0}),
)


def main() -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/failures.md and its figures.")
    parser.add_argument("--check", action="store_true", help="only check that they are up to date")
    options = parser.parse_args()
    results = read_results(RESULTS)
    module = module_text(measurements(results))
    if MODULE.read_text(encoding="utf-8") != module:
        if options.check:
            print(
                f"{MODULE.relative_to(ROOT)} is not up to date: run `make docs`.", file=sys.stderr
            )
            return 1
        MODULE.write_text(module, encoding="utf-8")
        # The model in this process has the earlier figures.
        print(f"{MODULE.relative_to(ROOT)} has changed: run this command again.", file=sys.stderr)
        return 1
    predictions = page_predictions()
    text = page(predictions, results, page_comparisons())
    texts = {PAGE: text, PICTURE: picture(predictions)}
    status = 0
    for path, text in texts.items():
        if not options.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path.relative_to(ROOT)} is not up to date: run `make docs`.", file=sys.stderr)
            status = 1
    return status


def page_predictions() -> list[Prediction]:
    """Return the predictions of the page and its picture."""
    return [
        prediction
        for num_ranks in _SIZES
        for prediction in predict(Scenario(), STRATEGIES, num_ranks, failures=_NUM_FAILURES, seed=0)
    ]


def page_comparisons() -> list[PublishedComparison]:
    """Return the comparison with published results that the page shows."""
    return compare(CASES, failures=_NUM_FAILURES, seed=0)


def picture(predictions: Sequence[Prediction]) -> str:
    """Return the picture of the page."""
    hours = Scenario().mtbf_h
    return goodput_picture(predictions, f"Goodput, one failure per {hours:,.0f} h and rank")


def page(
    predictions: Sequence[Prediction],
    results: Mapping[str, Result],
    comparisons: Sequence[PublishedComparison],
) -> str:
    """Return the text of the page."""
    parts = {
        "goodput": _goodput(predictions),
        "parts": _parts(
            [prediction for prediction in predictions if prediction.num_ranks == _SIZES[-1]]
        ),
        "varied": _varied(),
        "inputs": _inputs(),
        "published": _published(comparisons),
        "validation": validation(results.get("failures")),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"{{{name}}}", part)
    return text


def validation(result: Result | None) -> str:
    """Return what is known about the model's agreement with real runs."""
    if result is None:
        return (
            "No comparison on an otherwise idle machine has been recorded yet, so the agreement "
            "with real runs is not established."
        )
    lines = ["| run | measured | predicted | deviation |", "|---|---|---|---|"]
    deviations = []
    for row in result.rows:
        if "peer" in row:
            deviation = row["ours"] / row["peer"] - 1
            if row["metric"].startswith("lost time"):
                deviations.append(abs(deviation))
            lines.append(
                f"| {row['case']}, {row['metric'].partition(';')[0]} | {row['ours']:.1f} s | "
                f"{row['peer']:.1f} s | {deviation * 100:+.1f} % |"
            )
    is_met = "met" if max(deviations) <= 0.05 else "missed"
    environment = result.environment or {}
    machine = f"Machine: {environment.get('machine', 'not recorded')}. "
    return "\n".join(
        [
            *lines,
            "",
            f"{machine}The goal, at most 5 % of the lost time, is {is_met} in this run.",
        ]
    )


def _goodput(predictions: Sequence[Prediction]) -> str:
    lines = [_row("ranks", *(strategy.title for strategy in STRATEGIES)), "|---" * 6 + "|"]
    for num_ranks in _SIZES:
        of_size = [prediction for prediction in predictions if prediction.num_ranks == num_ranks]
        lines.append(
            _row(f"{num_ranks:,}", *(_percent(prediction.shares.goodput) for prediction in of_size))
        )
    return "\n".join(lines)


def _parts(predictions: Sequence[Prediction]) -> str:
    names = list(predictions[0].shares.shares())
    lines = [_row("strategy", *names), "|---" * (len(names) + 1) + "|"]
    for prediction in predictions:
        shares = prediction.shares.shares()
        lines.append(_row(prediction.strategy.title, *(_percent(shares[name]) for name in names)))
    return "\n".join(lines)


def _varied() -> str:
    lines = [
        _row(f"{_VARIED:,} ranks", *(strategy.title for strategy in STRATEGIES)),
        "|---" * 6 + "|",
    ]
    for name, changes in _VARIATIONS:
        scenario = replace(Scenario(), **changes)
        predicted = predict(scenario, STRATEGIES, _VARIED, failures=_NUM_FAILURES, seed=0)
        lines.append(_row(name, *(_percent(prediction.shares.goodput) for prediction in predicted)))
    return "\n".join(lines)


def _inputs() -> str:
    lines = ["| input | default | source |", "|---|---|---|"]
    lines += [
        _row(f"`{name}`", f"{value:g}", source) for name, value, source in described(Scenario())
    ]
    return "\n".join(lines)


def _published(comparisons: Sequence[PublishedComparison]) -> str:
    """Return published results next to the predictions, and the inputs of each."""
    lines = ["| result | published | predicted | deviation | why |", "|---" * 5 + "|"]
    for number, comparison in enumerate(comparisons, start=1):
        case, unit = comparison.case, comparison.case.unit
        lines.append(
            _row(
                f"{number}. {case.name} ([source]({case.source}))",
                f"{case.published:.0f} {unit}",
                f"{comparison.predicted:.1f} {unit}",
                comparison.deviation_text,
                case.reason,
            )
        )
    inputs = ["| row | inputs that the source states | assumed |", "|---" * 3 + "|"]
    inputs += [
        _row(f"{number}", comparison.case.stated, comparison.case.assumed)
        for number, comparison in enumerate(comparisons, start=1)
    ]
    return "\n".join([*lines, "", *inputs])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


if __name__ == "__main__":
    sys.exit(main())
