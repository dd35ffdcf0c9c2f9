"""One rank of the comparison without faults: the trainer, as a replica or within HSDP, which takes
turns with the other side.

A side's processes are all there from begin to end; those whose turn it is not sleep in a last hook
of the trainer. Started by `benchmarks.recovery_overhead`, with the trainer's own arguments.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

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

SIDES = ("replicas", "hsdp")
"""In the order of their turns."""
_LOOK_S = 0.005


class Baton:
    """Which side's turn it is, by a file of each process that grows by a byte at each end."""

    def __init__(self, folder: Path, side: str, rank: int, num_ranks: int) -> None:
        self._own = folder / f"{side}_{rank}.turns"
        before = SIDES[: SIDES.index(side)]
        self._before = [folder / f"{one}_{r}.turns" for one in before for r in range(num_ranks)]
        self._after = [
            folder / f"{one}_{r}.turns"
            for one in SIDES
            if one != side and one not in before
            for r in range(num_ranks)
        ]
        self._ended = 0

    def end(self) -> None:
        """This process's turn is over."""
        with self._own.open("ab") as file:
            file.write(b".")
        self._ended += 1

    def wait(self) -> None:
        """For the next one of this side."""
        while not (
            all(_size(one) > self._ended for one in self._before)
            and all(_size(one) >= self._ended for one in self._after)
        ):
            time.sleep(_LOOK_S)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class TurnTaker:
    """The trainer's last hook."""

    def __init__(self, turns: Turns, baton: Baton) -> None:
        self._turns, self._baton = turns, baton
        self.losses: list[float] = []
        self.step_s: list[float] = []
        """Of the turns after the warm-up, their first steps aside: what a pause has prepared or
        cooled down is in them."""
        self._began_s: float | None = None

    def __call__(self, state: TrainState, report: StepReport) -> None:
        if self._began_s is not None and report.number > self._turns.warmup_steps:
            self.step_s.append(time.perf_counter() - self._began_s)
        self.losses.append(report.loss)
        self._began_s = time.perf_counter()
        if self._turns.ends_after(report.number):
            self._began_s = None
            self._baton.end()
            if report.number < self._turns.total_steps:
                self._baton.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Take the turns, then write what was measured to FOLDER/SIDE_RANK.json."""
    parser = argparse.ArgumentParser(description="Take turns with the other side.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--turn-steps", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    given, trainer_arguments = parser.parse_known_args(arguments)
    turns = Turns(warmup_steps=given.warmup_steps, steps=given.turn_steps, count=given.turns)
    trainer_arguments += ["--training.steps", str(turns.total_steps)]
    configure_logging()
    config, _ = parse_command_line(trainer_arguments)
    check_against(config, int(os.environ.get("WORLD_SIZE", "1")))
    baton = Baton(given.folder, given.side, given.number, given.ranks)
    with (
        start_mesh(config.parallelism, config.comm, detect_device(config.job.device)) as mesh,
        build(config, mesh, StopRequest()) as built,
    ):
        taker = TurnTaker(turns, baton)
        baton.wait()
        train(replace(built.job, hooks=[*built.job.hooks, taker]))
        measured = {
            "losses": taker.losses,
            "step_s": taker.step_s,
            "dtype": config.training.dtype,
            "threads": torch.get_num_threads(),
        }
    path = given.folder / f"{given.side}_{given.number}.json"
    path.write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
    leave(0)
