"""Wall time and peak memory of ring attention against gathered keys and values (`ring_turns`)."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agreement import Agreement
from benchmarks.processes import run
from benchmarks.rows import Row, compare

TIME_GOAL = 1.0
"""The ring skips the keys that causality hides, which the all-gather side computes and masks."""
MEMORY_GOAL = 1.0
TOLERANCE = 1e-5
"""Relative to the greatest element, float32: the ring adds up the same terms in another order."""


@dataclass(frozen=True, kw_only=True)
class RingCase:
    """A sequence on a number of processes."""

    flavor: str
    num_processes: int
    length: int
    rounds: int

    @property
    def name(self) -> str:
        return f"ring attention, {self.flavor}, {self.length} tokens, {self.num_processes} proc"


def measure_ring(case: RingCase, folder: Path) -> Iterator[tuple[Row, Agreement]]:
    """Run the rounds, one process a rank: a row for the time, and one for the memory."""
    folder.mkdir(parents=True)
    arguments = [
        *("--folder", str(folder)),
        *("--ranks", str(case.num_processes)),
        *("--flavor", case.flavor),
        *("--length", str(case.length)),
        *("--rounds", str(case.rounds)),
    ]
    run(("-m", "benchmarks.ring_turns"), arguments, case.num_processes, folder / "log.txt")
    ranks = [
        json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8"))
        for rank in range(case.num_processes)
    ]

    def agreement_on(what: str) -> Agreement:
        agreement = Agreement(f"{case.name}: {what}", other="all-gather")
        for name in ranks[0]["differences"]:
            greatest = max(rank["differences"][name] for rank in ranks)
            agreement.small(f"greatest relative difference of the {name}", greatest, TOLERANCE)
        agreement.note(f"both sides: {ranks[0]['dtype']}, {ranks[0]['threads']} thread a process")
        return agreement

    agreement = agreement_on("time")
    ours_s, peer_s = (
        [max(turn) for turn in zip(*(rank["seconds"][method] for rank in ranks), strict=True)]
        for method in ("alltoall", "allgather")
    )
    agreement.note(f"seconds of each round: ours {_shown(ours_s)}; all-gather {_shown(peer_s)}")
    yield (
        compare(
            case=case.name,
            metric="forward and backward",
            unit="s",
            ours=statistics.median(ours_s),
            peer=statistics.median(peer_s),
            goal=TIME_GOAL,
            comparable=agreement.holds,
        ),
        agreement,
    )
    agreement = agreement_on("memory")
    ours_mib, peer_mib = (
        [rank["peak_bytes"][method] / 2**20 for rank in ranks]
        for method in ("alltoall", "allgather")
    )
    agreement.note(f"MiB of each rank: ours {_shown(ours_mib)}; all-gather {_shown(peer_mib)}")
    yield (
        compare(
            case=case.name,
            metric="peak tensor memory of a rank",
            unit="MiB",
            ours=max(ours_mib),
            peer=max(peer_mib),
            goal=MEMORY_GOAL,
            comparable=agreement.holds,
        ),
        agreement,
    )


def _shown(values: list[float]) -> str:
    return " ".join(f"{value:.3g}" for value in values)
