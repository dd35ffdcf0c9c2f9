"""CPU seconds to make the order of positions, against a Python loop (`order_turns`)."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agreement import Agreement
from benchmarks.processes import run
from benchmarks.rows import Row, compare

GOAL = 0.05
"""Twenty times faster."""


@dataclass(frozen=True, kw_only=True)
class OrderCase:
    """A sequence that a number of ranks would share."""

    length: int
    num_ranks: int
    rounds: int

    @property
    def name(self) -> str:
        return f"head-tail order, {self.length} tokens, {self.num_ranks} ranks"


def measure_order(case: OrderCase, folder: Path) -> tuple[Row, Agreement]:
    """Run the rounds in one process."""
    folder.mkdir(parents=True)
    path = folder / "measured.json"
    arguments = [
        *("--path", str(path)),
        *("--length", str(case.length)),
        *("--ranks", str(case.num_ranks)),
        *("--rounds", str(case.rounds)),
    ]
    run(("-m", "benchmarks.order_turns"), arguments, 1, folder / "log.txt")
    measured = json.loads(path.read_text(encoding="utf-8"))
    ours, peer = measured["ours"], measured["peer"]
    agreement = Agreement(case.name, other="loop")
    agreement.same("CRC-32 of the positions", ours["checksum"], peer["checksum"])
    agreement.note(
        f"CPU ms of each round: ours {_shown(ours['seconds'])}; loop {_shown(peer['seconds'])}"
    )
    row = compare(
        case=case.name,
        metric="CPU time to make it",
        unit="s",
        ours=statistics.median(ours["seconds"]),
        peer=statistics.median(peer["seconds"]),
        goal=GOAL,
        comparable=agreement.holds,
    )
    return row, agreement


def _shown(seconds: list[float]) -> str:
    return " ".join(f"{1000 * value:.3g}" for value in seconds)
