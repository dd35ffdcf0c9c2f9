"""The trainer against a baseline loop: the CPU time of a step, and the time to start.

python -m benchmarks.step [--quick] [--json PATH]

Two comparisons, each on 1 and 2 processes of one thread: CPU seconds per step (see `step_cpu`), and
wall seconds from the launch of a process to the end of its first step, with a warm data cache. The
trainer's first step ends with the first line of metrics.jsonl, which it writes after each step; the
bare script (see `baseline`) writes a line of its own. Both files are polled alike, and the process
is ended once the line exists.

Variants alternate, and the medians are compared. The exit status is 1 if the variants did not do
the same work; a missed goal is only reported in its row, because times on a busy machine prove
nothing.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tomli

from benchmarks.auto_flavors import ARCHITECTURES
from benchmarks.baseline_loop import write_first_batches
from benchmarks.harness import Comparison, Result, formatted, main
from benchmarks.processes import THREADS, TRAINER, TRAINER_ARGUMENTS, first_line, run_ranks
from benchmarks.step_cpu import StepCase, measure_step
from benchmarks.worker import Turns, alternate

START_GOAL = 1.5
_BARE_SCRIPT = ("-m", "benchmarks.baseline")


@dataclass(frozen=True, kw_only=True)
class StartCase:
    """A number of processes, and how often they are started."""

    flavor: str
    num_processes: int
    warmup_rounds: int
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.flavor}, {self.num_processes} proc"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cases of one run."""

    step_cases: Sequence[StepCase]
    start_cases: Sequence[StartCase]


_TURNS = Turns(warmup_steps=3, steps=6, count=9)
_SHORT_TURNS = Turns(warmup_steps=2, steps=2, count=5)
_SHORTEST_TURNS = Turns(warmup_steps=2, steps=1, count=5)
_FAMILIES = {"MLA": "deepseek_v3", "Gated DeltaNet": "qwen3_next"}
_NO_ROUTER_UPDATES = (
    # What the baseline loop does not do.
    *("--model.router_bias_update_rate", "0"),
    *("--model.router_balance_loss_weight", "0"),
)
_OF_TRANSFORMERS = (
    *("--model.name", "auto"),
    *("--experimental.custom_import", "benchmarks.auto_flavors"),
)
FULL = Plan(
    step_cases=[
        *(
            StepCase(flavor=flavor, num_processes=number, turns=turns)
            for flavor, turns in (("tiny", _TURNS), ("debugmodel", _SHORT_TURNS))
            for number in (1, 2)
        ),
        *(
            StepCase(
                flavor="tiny",
                num_processes=number,
                turns=_SHORT_TURNS,
                technique=technique,
                arguments=("--model.name", family, *_NO_ROUTER_UPDATES),
            )
            for technique, family in _FAMILIES.items()
            for number in (1, 2)
        ),
        *(
            StepCase(
                flavor=architecture,
                num_processes=number,
                turns=_SHORT_TURNS,
                arguments=_OF_TRANSFORMERS,
            )
            for architecture in ARCHITECTURES
            for number in (1, 2)
        ),
    ],
    start_cases=[
        StartCase(flavor="tiny", num_processes=number, warmup_rounds=1, rounds=5)
        for number in (1, 2)
    ],
)
QUICK = Plan(
    step_cases=[
        StepCase(flavor="tiny", num_processes=number, turns=_SHORTEST_TURNS) for number in (1, 2)
    ],
    # The step cases have warmed the caches of a start.
    start_cases=[
        StartCase(flavor="tiny", num_processes=number, warmup_rounds=0, rounds=1)
        for number in (1, 2)
    ],
)


def measure(plan: Plan, folder: Path) -> Iterator[Result]:
    """Measure all cases of `plan`, with files in `folder`."""
    for index, case in enumerate(plan.step_cases):
        yield measure_step(case, folder / f"step_{index}")
    (flavor,) = {case.flavor for case in plan.start_cases}
    inputs = folder / "inputs.pt"
    arguments = {
        "path": str(inputs),
        "num_ranks": max(case.num_processes for case in plan.start_cases),
        "trainer_arguments": _one_step(flavor, folder / "inputs"),
    }
    # Warms the data cache as well.
    run_ranks(write_first_batches, arguments, 1, folder / "write_inputs")
    for index, case in enumerate(plan.start_cases):
        yield _measure_start(case, inputs, folder / f"start_{index}")


def _measure_start(case: StartCase, inputs: Path, folder: Path) -> Result:
    """Start the variants alternately, each in new processes."""
    folder.mkdir()
    variants = {
        "ours": lambda: _start_ours(case, Path(mkdtemp(dir=folder))),
        "floor": lambda: _start_floor(case, inputs, Path(mkdtemp(dir=folder))),
    }
    starts = alternate(variants, case.rounds, warmup_rounds=case.warmup_rounds)
    ours_s, floor_s = ([seconds for seconds, _ in starts[name]] for name in ("ours", "floor"))
    ours, floor = (starts[name][-1][1] for name in ("ours", "floor"))
    comparison = Comparison(case.name, "start")
    comparison.same("dtype", ours["dtype"], floor["dtype"])
    # The trainer takes the number of threads from the environment, as torch does.
    comparison.same("threads", THREADS, floor["threads"])
    comparison.close_losses([ours["loss"]], [floor["loss"]], shown=1)
    comparison.note(
        f"seconds of each round: ours {formatted(ours_s, '.2f')}; floor {formatted(floor_s, '.2f')}"
    )
    return comparison.ratio(
        "start to end of step 1",
        "s",
        statistics.median(ours_s),
        floor=statistics.median(floor_s),
        goal=START_GOAL,
    )


def _start_ours(case: StartCase, folder: Path) -> tuple[float, dict[str, Any]]:
    outputs = folder / "outputs"
    arguments = _one_step(case.flavor, outputs)
    metrics = outputs / "metrics.jsonl"
    seconds, line = first_line(TRAINER, arguments, case.num_processes, folder / "log.txt", metrics)
    config = tomli.loads((outputs / "config.toml").read_text(encoding="utf-8"))
    return seconds, json.loads(line) | {"dtype": config["training"]["dtype"]}


def _start_floor(case: StartCase, inputs: Path, folder: Path) -> tuple[float, dict[str, Any]]:
    path = folder / "first_step.jsonl"
    arguments = [str(inputs), str(path)]
    seconds, line = first_line(
        _BARE_SCRIPT, arguments, case.num_processes, folder / "log.txt", path
    )
    return seconds, json.loads(line)


def _one_step(flavor: str, outputs: Path) -> list[str]:
    """Arguments of a trainer that takes one step."""
    return [
        *TRAINER_ARGUMENTS,
        *("--model.flavor", flavor),
        *("--job.dump_folder", str(outputs)),
        *("--training.steps", "1"),
    ]


if __name__ == "__main__":
    main("The trainer against a baseline loop.", measure, full=FULL, quick=QUICK)
