"""One rank of the comparison of steps: the trainer and the hand-written loop, taking turns.

Both live in one process and take turns of a few steps each: the trainer trains through its own
`train`, and a last hook lends the process to the hand-written loop at the end of each turn. That
is fairer than a process for each side: what changes with time or from process to process (the
machine's clock and neighbours, where memory came to lie) is the same for both, and cancels in
the ratio. Nothing of the trainer's goes uncounted, since CPU time is that of all threads of the
process. Automatic garbage collection is off for both, as the trainer wants it; what the
trainer's own collections take is counted for the trainer alone, and so are reading the data,
the console and metrics.jsonl.

Started by `benchmarks.step` and `benchmarks.parallel`, on its own or by torchrun, with the
trainer's own arguments.
"""

import argparse
import json
import os
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.hand_written_loop import HandWrittenLoop
from benchmarks.turns import Turns
from torchtitan_lite.builders import build
from torchtitan_lite.config import parse_command_line
from torchtitan_lite.config.constraints import check_against
from torchtitan_lite.device import detect_device
from torchtitan_lite.leaving import leave
from torchtitan_lite.log import configure_logging
from torchtitan_lite.mesh import start_mesh
from torchtitan_lite.preemption import StopRequest
from torchtitan_lite.train_state import TrainState
from torchtitan_lite.trainer import StepReport, train


@dataclass(kw_only=True)
class Side:
    """What was measured of one side on one rank."""

    dtype: str
    threads: int
    losses: list[float] = field(default_factory=list)
    turn_cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of each turn, the warm-up first."""


class Alternation:
    """The trainer's last hook: keeps the times, hands the turn over and takes it back."""

    def __init__(self, turns: Turns, ours: Side, floor: Side, loop: HandWrittenLoop) -> None:
        self._turns = turns
        self._ours = ours
        self._floor = floor
        self._loop = loop
        self._began_s = cpu_seconds()

    def __call__(self, state: TrainState, report: StepReport) -> None:
        if report.number > self._turns.total_steps:
            return
        self._ours.losses.append(report.loss)
        if not self._turns.ends_after(report.number):
            return
        handed_over_s = cpu_seconds()
        self._ours.turn_cpu_s.append(handed_over_s - self._began_s)
        for number in range(len(self._floor.losses), report.number):
            self._floor.losses.append(self._loop.step(number))
        self._began_s = cpu_seconds()
        self._floor.turn_cpu_s.append(self._began_s - handed_over_s)


def cpu_seconds() -> float:
    """User and system seconds of all threads of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str] | None = None) -> None:
    """Take the turns, then write what was measured to FOLDER/rank_N.json."""
    parser = argparse.ArgumentParser(description="Take turns of the trainer and the floor.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--turn-steps", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    given, trainer_arguments = parser.parse_known_args(arguments)
    turns = Turns(warmup_steps=given.warmup_steps, steps=given.turn_steps, count=given.turns)
    # One step more than is measured, so that the last turn too reads a next step ahead.
    trainer_arguments += ["--training.steps", str(turns.total_steps + 1)]

    configure_logging()
    config, _ = parse_command_line(trainer_arguments)
    check_against(config, int(os.environ.get("WORLD_SIZE", "1")))
    with (
        start_mesh(config.parallelism, config.comm, detect_device(config.job.device)) as mesh,
        build(config, mesh, StopRequest()) as built,
    ):
        loop = HandWrittenLoop(config, built, turns.total_steps)
        ours, floor = _side(built.job.state.model), _side(loop.model)
        alternation = Alternation(turns, ours, floor, loop)
        train(replace(built.job, hooks=[*built.job.hooks, alternation]))
        measured = {"ours": asdict(ours), "floor": asdict(floor)}
        path = given.folder / f"rank_{mesh.rank}.json"
        path.write_text(json.dumps(measured), encoding="utf-8")


def _side(model: nn.Module) -> Side:
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    return Side(dtype="+".join(sorted(dtypes)), threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
    leave(0)
