"""Time and bytes of redistribution, as rows: against the floor, and against DTensor
(`redistribute_turns`, `redistribute_sides`)."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.agreement import Agreement
from benchmarks.dtensor_planners import PLANNERS
from benchmarks.processes import run
from benchmarks.rows import Row, compare
from benchmarks.state_dicts import Case, cases
from scripts.dtensor_steps import predict_dtensor
from torchtitan_lite.redistribute import Plan, plan
from torchtitan_lite.redistribute.explain import lower_bound_bytes, traffic

DTENSOR_GOAL = 0.05


@dataclass(frozen=True, kw_only=True)
class Side:
    """A way of ours, and what of its floor it may take: in the worst case, and in the median of
    the cases."""

    name: str
    metric: str
    worst: float
    median: float
    floor: str = "floor"


SIDES = [
    *(
        Side(
            name=f"shared {size}", metric=f"shared memory, {size} MB buckets", worst=0.9, median=0.5
        )
        for size in (1, 4, 25)
    ),
    Side(name="collective 25", metric="collective, 25 MB buckets", worst=1.5, median=1.25),
    Side(name="collective 4", metric="collective, 4 MB buckets", worst=1.75, median=1.75),
    Side(
        name="shared fresh",
        metric="shared memory, new memory",
        worst=1.1,
        median=1.1,
        floor="floor fresh",
    ),
    Side(
        name="collective fresh",
        metric="collective, new memory",
        worst=1.3,
        median=1.3,
        floor="floor fresh",
    ),
]
_OURS_FOR_DTENSOR = "shared fresh"
"""DTensor cannot be given memory to fill."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Cases on a number of processes."""

    num_processes: int
    rounds: int
    small: bool
    names: Sequence[str] = ()
    """Of the cases; all where there are none."""

    def cases(self) -> dict[str, Case]:
        known = cases(self.num_processes, small=self.small)
        return {name: known[name] for name in self.names or known}


def measure_cases(run_: Run, folder: Path) -> Iterator[tuple[Row, Agreement]]:
    """Run the turns, one process a rank, and yield the rows of each case, then those over all."""
    ranks = _measured(run_, folder)
    ratios: dict[str, list[float]] = {side.name: [] for side in SIDES}
    all_agree = True
    for name, case in run_.cases().items():
        results = [rank[name] for rank in ranks]
        title = f"{name}, {run_.num_processes} proc"
        seconds = _seconds(results)
        agreement = _agreement(title, case, results, seconds)
        all_agree = all_agree and agreement.holds
        for side in SIDES:
            ratios[side.name].append(seconds[side.name] / seconds[side.floor])
        for row in _rows(title, case, seconds, agreement.holds):
            yield row, agreement
    for side in SIDES:
        yield from _over_all(side, ratios[side.name], run_.num_processes, all_agree)


def _measured(run_: Run, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir(parents=True)
    arguments = [
        *("--folder", str(folder)),
        *("--cases", ";".join(run_.cases())),
        *("--rounds", str(run_.rounds)),
        *(("--small",) if run_.small else ()),
    ]
    run(("-m", "benchmarks.redistribute_turns"), arguments, run_.num_processes, folder / "log.txt")
    return [
        json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8"))
        for rank in range(run_.num_processes)
    ]


def _seconds(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By side, the median over the turns of the slowest rank's time."""
    return {
        side: statistics.median(
            max(turn) for turn in zip(*(rank["seconds"][side] for rank in results), strict=True)
        )
        for side in results[0]["seconds"]
    }


def _agreement(
    title: str, case: Case, results: Sequence[dict[str, Any]], seconds: dict[str, float]
) -> Agreement:
    agreement = Agreement(title, other="expected")
    for side in results[0]["right"]:
        wrong = [rank for rank, result in enumerate(results) if not result["right"][side]]
        agreement.same(f"ranks whose part differs in any bit, {side}", wrong, [])
    for side, why in results[0]["refusals"].items():
        agreement.note(f"{side} does not do it: {why}")
    agreement.note(f"float32, {results[0]['threads']} thread a process, {len(case.shapes)} tensors")
    shown = "; ".join(f"{side} {value * 1e3:.3g}" for side, value in seconds.items())
    agreement.note(f"median ms of the slowest rank: {shown}")
    return agreement


def _rows(title: str, case: Case, seconds: dict[str, float], agrees: bool) -> Iterator[Row]:
    for side in SIDES:
        yield compare(
            case=title,
            metric=side.metric,
            unit="s",
            ours=seconds[side.name],
            floor=seconds[side.floor],
            goal=side.worst,
            comparable=agrees,
        )
    for planner in PLANNERS:
        peer = seconds.get(f"DTensor {planner}")
        if peer is not None:
            yield compare(
                case=title,
                metric=f"shared memory, new memory, against DTensor ({planner})",
                unit="s",
                ours=seconds[_OURS_FOR_DTENSOR],
                peer=peer,
                goal=DTENSOR_GOAL,
                comparable=agrees,
            )
    yield from _bytes_rows(title, case, agrees)


def _bytes_rows(title: str, case: Case, agrees: bool) -> Iterator[Row]:
    plans = [
        plan(src, dst, case.shapes[name], torch.float32)
        for name, (src, dst) in case.layouts().items()
    ]
    ours = sum(t.received for each in plans for t in traffic(each).values())
    least = sum(lower_bound_bytes(each) or 0 for each in plans)
    yield compare(
        case=title,
        metric="moved, against the lower bound",
        unit="bytes",
        ours=ours,
        floor=least,
        goal=1.0,
        comparable=agrees,
    )
    theirs = _dtensor_bytes(plans) if case.src[1] == case.dst[1] else None
    if theirs is not None:
        yield compare(
            case=title,
            metric="moved, against DTensor (default)",
            unit="bytes",
            ours=ours,
            peer=theirs,
            goal=1.0,
            comparable=agrees,
        )


def _dtensor_bytes(plans: Sequence[Plan]) -> int | None:
    """What DTensor would send; None where it would refuse."""
    sent: dict[Plan, int] = {}
    for each in plans:
        if each not in sent:
            way = predict_dtensor(each)
            if way.sent is None:
                return None
            sent[each] = sum(way.sent.values())
    return sum(sent[each] for each in plans)


def _over_all(
    side: Side, ratios: Sequence[float], num_processes: int, agree: bool
) -> Iterator[tuple[Row, Agreement]]:
    """The median and the worst ratio to the floor."""
    for what, ours, goal in (
        ("median", statistics.median(ratios), side.median),
        ("worst", max(ratios), side.worst),
    ):
        case = f"{what} of {len(ratios)} cases, {num_processes} proc"
        agreement = Agreement(f"{case}: {side.metric}")
        agreement.note("ratios: " + " ".join(f"{ratio:.3g}" for ratio in ratios))
        row = compare(
            case=case,
            metric=side.metric,
            unit="of the floor",
            ours=ours,
            floor=1.0,
            goal=goal,
            comparable=agree,
        )
        yield row, agreement
