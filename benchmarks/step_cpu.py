"""CPU seconds per step of the trainer and of the baseline loop, which take turns in one process.

The trainer trains through its own `train`; a last hook runs the baseline loop at the end of each
turn. That is fairer than a process for each variant: what changes with time or from process to
process (the machine's clock and neighbors, where memory was allocated) is the same for both and
cancels in the ratio. No work of the trainer is missed, because CPU time is that of all threads of
the process. Automatic garbage collection is off for both, as the trainer requires; the trainer's
own collections count for the trainer alone, and so do data loading, console and metrics.jsonl.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.baseline_loop import BaselineLoop, built_job
from benchmarks.harness import Comparison, Result, formatted
from benchmarks.processes import TRAINER_ARGUMENTS, run_ranks
from benchmarks.worker import Turns, cpu_s
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import StepReport, train

_SHOWN_LOSSES = 4


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """One model on a number of processes."""

    flavor: str
    num_processes: int
    turns: Turns
    technique: str = ""
    """Name of the parallelism that `arguments` configure."""
    arguments: Sequence[str] = ()
    goal: float = 1.03

    @property
    def name(self) -> str:
        words = (self.technique, self.flavor, f"{self.num_processes} proc")
        return ", ".join(word for word in words if word)


def measure_step(case: StepCase, folder: Path) -> Result:
    """Run the turns on all ranks."""
    trainer_arguments = [
        *TRAINER_ARGUMENTS,
        *("--model.flavor", case.flavor),
        *case.arguments,
        *("--job.dump_folder", str(folder / "outputs")),
    ]
    arguments = {"turns": asdict(case.turns), "trainer_arguments": trainer_arguments}
    ranks = run_ranks(alternate_steps, arguments, case.num_processes, folder)
    comparison = Comparison(case.name, "step")
    for name in ("dtype", "threads"):
        comparison.same(name, _values(ranks, "ours", name), _values(ranks, "floor", name))
    losses = (ranks[0][variant]["losses"] for variant in ("ours", "floor"))
    comparison.close_losses(*losses, shown=_SHOWN_LOSSES)
    ours, floor = (_step_cpu_s(ranks, name, case.turns.steps) for name in ("ours", "floor"))
    ratios = [a / b for a, b in zip(ours, floor, strict=True)]
    comparison.note(
        f"CPU ms per step in each turn: ours {formatted(ours, '.0f', scale=1000)}; "
        f"floor {formatted(floor, '.0f', scale=1000)}"
    )
    comparison.note(
        f"ratio of each turn: {formatted(ratios, '.3f')}; median {statistics.median(ratios):.3f}"
    )
    return comparison.ratio(
        "CPU time per step",
        "s",
        statistics.median(ours),
        floor=statistics.median(floor),
        goal=case.goal,
    )


def _values(ranks: list[dict[str, Any]], variant: str, name: str) -> str:
    """The distinct values of all ranks."""
    return ", ".join(sorted({str(rank[variant][name]) for rank in ranks}))


def _step_cpu_s(ranks: list[dict[str, Any]], variant: str, steps: int) -> list[float]:
    """CPU seconds per step of each turn after the warm-up, summed over the ranks."""
    turns = zip(*(rank[variant]["turn_cpu_s"][1:] for rank in ranks), strict=True)
    return [sum(turn) / steps for turn in turns]


@dataclass(kw_only=True)
class Measured:
    """Measurements of one variant on one rank."""

    dtype: str
    threads: int
    losses: list[float] = field(default_factory=list)
    turn_cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of each turn, the warm-up first."""

    @classmethod
    def of(cls, model: nn.Module) -> "Measured":
        dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
        return cls(dtype="+".join(sorted(dtypes)), threads=torch.get_num_threads())


class Alternation:
    """The trainer's last hook: measures the trainer's turns and runs those of the loop."""

    def __init__(self, turns: Turns, ours: Measured, floor: Measured, loop: BaselineLoop) -> None:
        self._turns = turns
        self._ours = ours
        self._floor = floor
        self._loop = loop
        self._began_s = cpu_s()

    def __call__(self, state: TrainState, report: StepReport) -> None:
        if report.number > self._turns.total_steps:
            return
        self._ours.losses.append(report.loss)
        if not self._turns.ends_after(report.number):
            return
        ended_s = cpu_s()
        self._ours.turn_cpu_s.append(ended_s - self._began_s)
        for index in range(len(self._floor.losses), report.number):
            self._floor.losses.append(self._loop.step(index))
        self._began_s = cpu_s()
        self._floor.turn_cpu_s.append(self._began_s - ended_s)


def alternate_steps(turns: dict[str, int], trainer_arguments: list[str]) -> dict[str, Any]:
    """Take the turns on one rank."""
    of_both = Turns(**turns)
    # One step more than is measured, so that the last turn prefetches a next step as well.
    trainer_arguments += ["--training.steps", str(of_both.total_steps + 1)]
    with built_job(trainer_arguments) as (config, built):
        loop = BaselineLoop(config, built, of_both.total_steps)
        ours, floor = Measured.of(built.job.state.model), Measured.of(loop.model)
        alternation = Alternation(of_both, ours, floor, loop)
        train(replace(built.job, hooks=[*built.job.hooks, alternation]))
        return {"ours": asdict(ours), "floor": asdict(floor)}
