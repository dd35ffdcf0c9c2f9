"""How well the cost model predicts exchanges that it was not fitted to (`cost_model_turns`).

There is nothing to compare with: `floor` is the share of errors that is allowed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agreement import Agreement
from benchmarks.processes import run
from benchmarks.rows import Row, compare

_MOST_BEYOND = 0.1
_MOST_MISORDERED = 0.05


@dataclass(frozen=True, kw_only=True)
class CostModelCase:
    """A calibration on a number of processes, and random exchanges to judge it by."""

    num_processes: int
    turns: int
    held_out: int
    small: bool
    """Calibrate with two sizes only."""


def measure_cost_model(case: CostModelCase, folder: Path) -> Iterator[tuple[Row, Agreement]]:
    """Calibrate and judge, one process a rank."""
    folder.mkdir(parents=True)
    path = folder / "shares.json"
    arguments = [
        *("--path", str(path)),
        *("--turns", str(case.turns)),
        *("--held-out", str(case.held_out)),
        *(("--small",) if case.small else ()),
    ]
    run(("-m", "benchmarks.cost_model_turns"), arguments, case.num_processes, folder / "log.txt")
    measured = json.loads(path.read_text(encoding="utf-8"))
    title = f"cost model, {case.num_processes} proc"
    agreement = Agreement(title)
    agreement.note(measured["costs"])
    for line in measured["samples"]:
        agreement.note(line)
    for metric, name, allowed in (
        (f"predictions off by more than 2x, of {case.held_out}", "beyond", _MOST_BEYOND),
        ("pairs measured 1.5x apart, in the wrong order", "misordered", _MOST_MISORDERED),
    ):
        row = compare(
            case=title,
            metric=metric,
            unit="share",
            ours=measured[name],
            floor=allowed,
            goal=1.0,
            comparable=True,
        )
        yield row, agreement
