"""Wall seconds from starting a process to the end of its first step, the data cache being warm.

The trainer's end is the first line of metrics.jsonl, which it writes after each step; the bare
script (see `bare_start`) writes a line of its own. Both files are watched alike, and the process
is ended once the line is there. The sides alternate, a fresh process each.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from benchmarks.agreement import Agreement
from benchmarks.processes import THREADS, TRAINER, first_line, run
from benchmarks.rows import Row, compare

GOAL = 1.5
BARE_SCRIPT = ("-m", "benchmarks.bare_start")


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


def write_inputs(
    flavor: str, max_processes: int, trainer_arguments: Sequence[str], folder: Path
) -> Path:
    """The bare script's weights and samples, for up to `max_processes`. Warms the data cache."""
    folder.mkdir(parents=True)
    path = folder / "inputs.pt"
    arguments = [
        *("--path", str(path)),
        *("--ranks", str(max_processes)),
        *_one_step(trainer_arguments, flavor, folder / "outputs"),
    ]
    run(("-m", "benchmarks.inputs"), arguments, 1, folder / "log.txt")
    return path


def measure_start(
    case: StartCase, inputs: Path, trainer_arguments: Sequence[str], folder: Path
) -> tuple[Row, Agreement]:
    """Run the rounds."""
    ours_s, floor_s = [], []
    ours: dict[str, Any] = {}
    floor: dict[str, Any] = {}
    for number in range(case.warmup_rounds + case.rounds):
        round_folder = folder / f"round_{number}"
        round_folder.mkdir(parents=True)
        seconds, ours = _start_ours(case, trainer_arguments, round_folder)
        ours_s.append(seconds)
        seconds, floor = _start_floor(case, inputs, round_folder)
        floor_s.append(seconds)
    ours_s, floor_s = ours_s[case.warmup_rounds :], floor_s[case.warmup_rounds :]
    agreement = Agreement(f"{case.name}: start")
    agreement.same("dtype", ours["dtype"], floor["dtype"])
    # The trainer leaves the number of threads to the environment, as torch does.
    agreement.same("threads", THREADS, floor["threads"])
    agreement.close_losses([ours["loss"]], [floor["loss"]], stride=1)
    agreement.note(f"seconds of each round: ours {_shown(ours_s)}; floor {_shown(floor_s)}")
    row = compare(
        case=case.name,
        metric="start to end of step 1",
        unit="s",
        ours=statistics.median(ours_s),
        floor=statistics.median(floor_s),
        goal=GOAL,
        comparable=agreement.holds,
    )
    return row, agreement


def _start_ours(
    case: StartCase, trainer_arguments: Sequence[str], folder: Path
) -> tuple[float, dict[str, Any]]:
    outputs = folder / "outputs"
    arguments = _one_step(trainer_arguments, case.flavor, outputs)
    metrics = outputs / "metrics.jsonl"
    seconds, line = first_line(TRAINER, arguments, case.num_processes, folder / "ours.txt", metrics)
    config = tomli.loads((outputs / "config.toml").read_text(encoding="utf-8"))
    return seconds, json.loads(line) | {"dtype": config["training"]["dtype"]}


def _start_floor(case: StartCase, inputs: Path, folder: Path) -> tuple[float, dict[str, Any]]:
    said = folder / "floor.jsonl"
    seconds, line = first_line(
        BARE_SCRIPT, [str(inputs), str(said)], case.num_processes, folder / "floor.txt", said
    )
    return seconds, json.loads(line)


def _one_step(trainer_arguments: Sequence[str], flavor: str, outputs: Path) -> list[str]:
    return [
        *trainer_arguments,
        *("--model.flavor", flavor),
        *("--job.dump_folder", str(outputs)),
        *("--training.steps", "1"),
    ]


def _shown(seconds: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in seconds)
