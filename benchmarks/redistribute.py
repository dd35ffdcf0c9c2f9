"""Redistribution of training states against its floor and against DTensor, and how long planning
takes.

python -m benchmarks.redistribute [--quick] [--json PATH]

Every process with one thread, gloo:

- Wall time of a whole state dict, of the slowest rank from a barrier on, against a bare
  `all_to_all_single` of the same bytes plus a copy of the result (`redistribute_sides`). Ours fills
  the results of an earlier call, so that what lies right already is not copied: it is the source's
  own tensor. The rows of new memory have both sides take memory anew.
- The same against `DTensor.redistribute` of each tensor, by either of its planners, where it does
  it; and bytes against the lower bound and against DTensor.
- Time to plan (`planner_time`), and how well the cost model predicts the time of an exchange once
  it is calibrated (`cost_model`), where `floor` is the goal's absolute figure.

Results are compared with the expected parts bit by bit. Exits with 1 when any differs; a missed
goal is a row that says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agreement import Agreement
from benchmarks.cost_model import CostModelCase, measure_cost_model
from benchmarks.planner_time import PlannerCase, measure_planner
from benchmarks.redistribute_cost import Run, measure_cases
from benchmarks.report import main
from benchmarks.rows import Row


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run of this benchmark measures."""

    runs: Sequence[Run]
    planner: PlannerCase
    cost_models: Sequence[CostModelCase]


FULL = Plan(
    runs=[
        Run(num_processes=4, rounds=9, small=False),
        Run(num_processes=8, rounds=7, small=False),
    ],
    planner=PlannerCase(pairs=200, rounds=7),
    cost_models=[
        CostModelCase(num_processes=number, turns=9, held_out=60, small=False) for number in (4, 8)
    ],
)
QUICK = Plan(
    runs=[
        Run(
            num_processes=4,
            rounds=5,
            small=True,
            names=("FSDP -> TP", "TP x DP -> EP", "FSDP 4 -> 2"),
        )
    ],
    planner=PlannerCase(pairs=20, rounds=3, small=True),
    cost_models=[CostModelCase(num_processes=4, turns=5, held_out=15, small=True)],
)


def measure(plan: Plan, folder: Path) -> Iterator[tuple[Row, Agreement]]:
    """The cases of `plan`, one after the other, with their files in `folder`."""
    yield from measure_planner(plan.planner)
    for case in plan.cost_models:
        yield from measure_cost_model(case, folder / f"costs_{case.num_processes}")
    for run in plan.runs:
        yield from measure_cases(run, folder / f"of_{run.num_processes}")


if __name__ == "__main__":
    main("Redistribution against its floor and DTensor.", measure, full=FULL, quick=QUICK)
