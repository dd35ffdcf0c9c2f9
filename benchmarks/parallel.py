"""Techniques of parallelism against what a person would write with torch alone.

python -m benchmarks.parallel [--quick] [--json PATH]

Three comparisons, every process with one thread:

- CPU seconds per step of FSDP, TP and PP, summed over the ranks, against hand-written loops with
  fully_shard, parallelize_module and Schedule1F1B on the same samples and weights (`alternation`);
  their loss is plain cross entropy over logits. Not wall time: ranks may be more than cores.
- Wall time and peak tensor memory of ring attention against gathered keys and values
  (`ring_turns`).
- CPU time to make the order of positions under load balancing, against a Python loop
  (`order_turns`).

Exits with 1 when the sides did not do the same work; a missed goal is a row that says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agreement import Agreement
from benchmarks.order_cost import OrderCase, measure_order
from benchmarks.processes import TRAINER_ARGUMENTS
from benchmarks.report import main
from benchmarks.ring_cost import RingCase, measure_ring
from benchmarks.rows import Row
from benchmarks.step_cost import StepCase, measure_step
from benchmarks.turns import Turns

STEP_GOAL = 1.05


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run of this benchmark measures."""

    step_cases: Sequence[StepCase]
    ring_cases: Sequence[RingCase]
    order_cases: Sequence[OrderCase]


def _step_cases(
    flavor: str, num_processes: int, turns: Turns, *, samples_per_step: int
) -> list[StepCase]:
    """Each technique over all processes, on the same samples."""
    techniques = {
        "FSDP": ("--training.local_batch_size", str(samples_per_step // num_processes)),
        "TP": (
            *("--training.local_batch_size", str(samples_per_step)),
            *("--parallelism.tensor_parallel_degree", str(num_processes)),
        ),
        "PP 1F1B": (
            # In microbatches of one sample.
            *("--training.local_batch_size", str(samples_per_step)),
            *("--parallelism.pipeline_parallel_degree", str(num_processes)),
            *("--parallelism.pipeline_parallel_schedule", "1F1B"),
        ),
    }
    return [
        StepCase(
            flavor=flavor,
            num_processes=num_processes,
            turns=turns,
            technique=technique,
            arguments=arguments,
            goal=STEP_GOAL,
        )
        for technique, arguments in techniques.items()
    ]


_TURNS = Turns(warmup_steps=3, steps=2, count=9)
FULL = Plan(
    step_cases=[
        case
        for num_processes in (2, 4)
        for case in _step_cases("debugmodel", num_processes, _TURNS, samples_per_step=8)
    ],
    ring_cases=[
        RingCase(flavor="debugmodel", num_processes=4, length=4096, rounds=9),
        RingCase(flavor="debugmodel", num_processes=4, length=16384, rounds=5),
    ],
    order_cases=[OrderCase(length=1 << 20, num_ranks=8, rounds=9)],
)
QUICK = Plan(
    step_cases=_step_cases("tiny", 2, Turns(warmup_steps=2, steps=1, count=5), samples_per_step=4),
    ring_cases=[RingCase(flavor="tiny", num_processes=2, length=1024, rounds=5)],
    order_cases=[OrderCase(length=1 << 18, num_ranks=8, rounds=5)],
)


def measure(plan: Plan, folder: Path) -> Iterator[tuple[Row, Agreement]]:
    """The cases of `plan`, one after the other, with their files in `folder`."""
    for number, case in enumerate(plan.step_cases):
        yield measure_step(case, TRAINER_ARGUMENTS, folder / f"step_{number}")
    for number, case in enumerate(plan.ring_cases):
        yield from measure_ring(case, folder / f"ring_{number}")
    for number, case in enumerate(plan.order_cases):
        yield measure_order(case, folder / f"order_{number}")


if __name__ == "__main__":
    main("Techniques of parallelism against plain torch.", measure, full=FULL, quick=QUICK)
