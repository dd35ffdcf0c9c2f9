"""CPU seconds per step of the trainer against the hand-written loop (see `alternation`)."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agreement import Agreement
from benchmarks.processes import run
from benchmarks.rows import Row, compare
from benchmarks.turns import Turns

_SHOWN_LOSSES = 4


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """One model on a number of processes."""

    flavor: str
    num_processes: int
    turns: Turns
    technique: str = ""
    """Of parallelism, for the eye; `arguments` ask the trainer for it."""
    arguments: Sequence[str] = ()
    goal: float = 1.03

    @property
    def name(self) -> str:
        words = (self.technique, self.flavor, f"{self.num_processes} proc")
        return ", ".join(word for word in words if word)


def measure_step(
    case: StepCase, trainer_arguments: Sequence[str], folder: Path
) -> tuple[Row, Agreement]:
    """Run the turns, one process a rank."""
    folder.mkdir(parents=True)
    arguments = [
        *("--folder", str(folder)),
        *("--warmup-steps", str(case.turns.warmup_steps)),
        *("--turn-steps", str(case.turns.steps)),
        *("--turns", str(case.turns.count)),
        *trainer_arguments,
        *("--model.flavor", case.flavor),
        *case.arguments,
        *("--job.dump_folder", str(folder / "outputs")),
    ]
    run(("-m", "benchmarks.alternation"), arguments, case.num_processes, folder / "log.txt")
    ranks = [
        json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8"))
        for rank in range(case.num_processes)
    ]
    agreement = Agreement(f"{case.name}: step")
    for name in ("dtype", "threads"):
        agreement.same(name, _said(ranks, "ours", name), _said(ranks, "floor", name))
    losses = (ranks[0][side]["losses"] for side in ("ours", "floor"))
    agreement.close_losses(*losses, stride=-(-case.turns.total_steps // _SHOWN_LOSSES))
    ours, floor = (_step_cpu_s(ranks, side, case.turns.steps) for side in ("ours", "floor"))
    agreement.note(f"CPU ms per step in each turn: ours {_shown(ours)}; floor {_shown(floor)}")
    ratios = [a / b for a, b in zip(ours, floor, strict=True)]
    agreement.note(
        f"ratio of each turn: {' '.join(f'{ratio:.3f}' for ratio in ratios)}; "
        f"median {statistics.median(ratios):.3f}"
    )
    row = compare(
        case=case.name,
        metric="CPU time per step",
        unit="s",
        ours=statistics.median(ours),
        floor=statistics.median(floor),
        goal=case.goal,
        comparable=agreement.holds,
    )
    return row, agreement


def _said(ranks: list[dict[str, Any]], side: str, name: str) -> str:
    """What all ranks say, once if they say the same."""
    return ", ".join(sorted({str(rank[side][name]) for rank in ranks}))


def _step_cpu_s(ranks: list[dict[str, Any]], side: str, steps: int) -> list[float]:
    """CPU seconds per step of each turn but the warm-up, summed over the ranks."""
    turns = zip(*(rank[side]["turn_cpu_s"][1:] for rank in ranks), strict=True)
    return [sum(turn) / steps for turn in turns]


def _shown(seconds: list[float]) -> str:
    return " ".join(f"{1000 * value:.0f}" for value in seconds)
