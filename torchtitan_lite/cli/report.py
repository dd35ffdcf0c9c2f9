"""`torchtitan-lite report`: one HTML page about one run, or a comparison of several."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_lite.core.errors import UserError
from torchtitan_lite.core.outputs import find_output_folder
from torchtitan_lite.tools.report import (
    Comparison,
    check_samples,
    compare,
    encodable,
    read_run,
    unique_labels,
    write_page,
)

_DIFFERS, _FAILED = 1, 2
"""Exit statuses: the runs differ (--fail-above); there is no report."""


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Write the page, or check the samples. Returns 0, 1 if the runs differ by more than
    --fail-above or end at different steps, or if a sample was lost or used twice, 2 for errors."""
    try:
        _check(options)
        options.runs = [find_output_folder(folder) for folder in options.runs]
        if options.check_samples:
            return _check_samples(options.runs)
        runs = unique_labels([read_run(folder) for folder in options.runs])
        comparisons = [compare(runs[0], compared) for compared in runs[1:]]
        output = options.output or options.runs[0] / "report.html"
        write_page(output, runs, comparisons)
    except UserError as error:
        print(f"report: {error}", file=sys.stderr)
        return _FAILED
    num_problems = sum(len(run.problems) for run in runs)
    if num_problems:
        first = next(run.problems[0] for run in runs if run.problems)
        count = f"{num_problems} problem{'s' * (num_problems > 1)} in the files"
        print(f"report: {count}, the first: {first}", file=sys.stderr)
    print(f"Wrote {encodable(str(output))}")
    return 0 if options.fail_above is None else _verdict(comparisons, options.fail_above)


def _check_samples(folders: Sequence[Path]) -> int:
    """Print the result of each run. Returns the exit status. Raises UserError."""
    status = 0
    for folder in folders:
        result = check_samples(folder)
        print(f"{encodable(str(folder))}: {result.summary()}")
        status = _DIFFERS if result.problems else status
    return status


def _verdict(comparisons: Sequence[Comparison], limit: float) -> int:
    """Print one line about the limit. Returns the exit status."""
    failures = [why for comparison in comparisons if (why := comparison.exceeds(limit)) is not None]
    if failures:
        more = f"; {len(failures) - 1} more runs differ" if len(failures) > 1 else ""
        print(f"FAILED: {failures[0]}; --fail-above is {limit:g}{more}")
        return _DIFFERS
    print(f"OK: loss and gradient norm differ by at most --fail-above {limit:g} (relative)")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise UserError for options that cannot be combined."""
    if options.fail_above is not None:
        if len(options.runs) < 2:
            raise UserError("--fail-above compares runs: give two or more dump folders.")
        if not options.fail_above >= 0:
            raise UserError(f"--fail-above is {options.fail_above:g}, must be at least 0.")
