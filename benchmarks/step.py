"""The trainer against a loop written by hand: the CPU time of a step, and the time to start.

python -m benchmarks.step [--quick] [--json PATH]

Two comparisons, each on 1 and 2 processes of one thread: CPU seconds per step (see `alternation`),
and wall seconds from the launch to the end of the first step (see `start_time`). Sides alternate,
and the medians are compared. Exits with 1 when the sides did not do the same work; a missed goal is
a row that says so, since times on a busy machine prove nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agreement import Agreement
from benchmarks.processes import TRAINER_ARGUMENTS
from benchmarks.report import main
from benchmarks.rows import Row
from benchmarks.start_time import StartCase, measure_start, write_inputs
from benchmarks.step_cost import StepCase, measure_step
from benchmarks.turns import Turns


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run of this benchmark measures."""

    step_cases: Sequence[StepCase]
    start_cases: Sequence[StartCase]


_TURNS = Turns(warmup_steps=3, steps=6, count=9)
_SHORT_TURNS = Turns(warmup_steps=2, steps=2, count=5)
_SHORTEST_TURNS = Turns(warmup_steps=2, steps=1, count=5)
FULL = Plan(
    step_cases=(
        StepCase(flavor="tiny", num_processes=1, turns=_TURNS),
        StepCase(flavor="tiny", num_processes=2, turns=_TURNS),
        StepCase(flavor="debugmodel", num_processes=1, turns=_SHORT_TURNS),
        StepCase(flavor="debugmodel", num_processes=2, turns=_SHORT_TURNS),
    ),
    start_cases=(
        StartCase(flavor="tiny", num_processes=1, warmup_rounds=1, rounds=5),
        StartCase(flavor="tiny", num_processes=2, warmup_rounds=1, rounds=5),
    ),
)
# The runs before it have warmed what a start reads, so the few rounds need none of their own.
QUICK = Plan(
    step_cases=(
        StepCase(flavor="tiny", num_processes=1, turns=_SHORTEST_TURNS),
        StepCase(flavor="tiny", num_processes=2, turns=_SHORTEST_TURNS),
    ),
    start_cases=(
        StartCase(flavor="tiny", num_processes=1, warmup_rounds=0, rounds=1),
        StartCase(flavor="tiny", num_processes=2, warmup_rounds=0, rounds=1),
    ),
)


def measure(plan: Plan, folder: Path) -> Iterator[tuple[Row, Agreement]]:
    """The cases of `plan`, one after the other, with their files in `folder`."""
    for number, case in enumerate(plan.step_cases):
        yield measure_step(case, TRAINER_ARGUMENTS, folder / f"step_{number}")
    (flavor,) = {case.flavor for case in plan.start_cases}
    max_processes = max(case.num_processes for case in plan.start_cases)
    inputs = write_inputs(flavor, max_processes, TRAINER_ARGUMENTS, folder / "inputs")
    for number, case in enumerate(plan.start_cases):
        yield measure_start(case, inputs, TRAINER_ARGUMENTS, folder / f"start_{number}")


if __name__ == "__main__":
    main("The trainer against a hand-written loop.", measure, full=FULL, quick=QUICK)
