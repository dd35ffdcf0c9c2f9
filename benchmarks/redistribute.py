"""Redistribution of training states against its floor and DTensor, and the time of planning.

python -m benchmarks.redistribute [--quick] [--json PATH]

Every process with one thread, gloo:

- Wall time of a whole state dict, of the slowest rank from a barrier on: through shared memory
  against a bare `all_to_all_single` of the same bytes plus a copy of the result, and against flat
  copies of the same bytes through shared memory; through collectives against the same bytes in
  packed buckets (see `redistribute_variants`). Ours fills
  the results of an earlier call, so what is in place already is not copied: it is the source's own
  tensor. In the rows of new memory, both variants allocate memory.
- The same against `DTensor.redistribute` of each tensor, by each of its planners, where it supports
  the layouts; and bytes against the lower bound and against DTensor.
- Time to plan (`redistribute_planning`).

Where flat copies alone take a large part of a goal against the all-to-all or DTensor, as with more
processes than cores, the goal is the one against flat copies.

Results are compared with the expected shards bit by bit. The exit status is 1 if any differs; a
missed goal is only reported in its row.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Comparison, Result, formatted, main
from benchmarks.processes import run_ranks
from benchmarks.redistribute_planning import (
    PlannerCase,
    measure_planner,
)
from benchmarks.redistribute_variants import PLANNERS, measure_rank
from benchmarks.state_dicts import Case, cases
from scripts.dtensor_steps import predict_dtensor
from scripts.reshard_explanation import lower_bound_bytes, traffic
from torchtitan_lite.distributed.redistribute import Plan as RedistributionPlan
from torchtitan_lite.distributed.redistribute import plan

DTENSOR_GOAL = 0.05
FLAT_WORST, FLAT_MEDIAN = 2.5, 1.5
"""Goals of ours through shared memory, against flat copies."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A variant of ours, and bounds of its ratio to its floor over all cases."""

    name: str
    metric: str
    worst: float
    median: float
    floor: str = "floor"
    flat: str | None = None
    """Flat copies that the goals leave room for; None if `floor` needs the same as ours."""

    def flat_share(self, seconds: Mapping[str, float]) -> float:
        """The time of flat copies as a part of that of the floor; 0 without `flat`."""
        return 0.0 if self.flat is None else seconds[self.flat] / seconds[self.floor]

    def goal(self, seconds: Mapping[str, float]) -> float:
        """The goal of a case."""
        return max(self.worst, FLAT_WORST * self.flat_share(seconds))


GOALS = [
    *(
        Goal(
            name=f"shared {size}",
            metric=f"shared memory, {size} MB buckets",
            worst=0.9,
            median=0.5,
            flat=f"floor shared {size}",
        )
        for size in (1, 4)
    ),
    *(
        Goal(
            name=f"shared {size}",
            metric=f"shared memory, {size} MB buckets, against flat copies",
            worst=FLAT_WORST,
            median=FLAT_MEDIAN,
            floor=f"floor shared {size}",
        )
        for size in (1, 4)
    ),
    *(
        Goal(
            name=f"collective {size}",
            metric=f"collective, {size} MB buckets",
            worst=worst,
            median=median,
            floor=f"floor packed {size}",
        )
        for size, worst, median in ((25, 1.5, 1.25), (4, 1.75, 1.75))
    ),
    Goal(
        name="shared fresh",
        metric="shared memory, new memory",
        worst=1.1,
        median=1.1,
        floor="floor fresh",
        flat="floor shared fresh",
    ),
    Goal(
        name="shared fresh",
        metric="shared memory, new memory, against flat copies",
        worst=FLAT_WORST,
        median=FLAT_MEDIAN,
        floor="floor shared fresh",
    ),
    Goal(
        name="collective fresh",
        metric="collective, new memory",
        worst=1.3,
        median=1.3,
        floor="floor packed fresh",
    ),
]
_OURS_FOR_DTENSOR = "shared fresh"
"""DTensor has no `out`."""


@dataclass(frozen=True, kw_only=True)
class ExchangeCases:
    """Cases on a number of processes."""

    num_processes: int
    rounds: int
    small: bool
    names: Sequence[str] = ()
    """Names of the cases; empty for all."""

    def cases(self) -> dict[str, Case]:
        known = cases(self.num_processes, small=self.small)
        return {name: known[name] for name in self.names or known}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cases of one run."""

    exchanges: Sequence[ExchangeCases]
    planner: PlannerCase


FULL = Plan(
    exchanges=[
        ExchangeCases(num_processes=4, rounds=9, small=False),
        ExchangeCases(num_processes=8, rounds=7, small=False),
    ],
    planner=PlannerCase(pairs=200, rounds=7),
)
QUICK = Plan(
    exchanges=[
        ExchangeCases(
            num_processes=4,
            rounds=5,
            small=True,
            names=("FSDP -> TP", "TP x DP -> EP", "FSDP 4 -> 2"),
        )
    ],
    planner=PlannerCase(pairs=20, rounds=3, small=True),
)


def measure(of: Plan, folder: Path) -> Iterator[Result]:
    """Measure all cases of a plan, with files in `folder`."""
    yield from measure_planner(of.planner)
    for run in of.exchanges:
        yield from _measure_exchanges(run, folder / f"of_{run.num_processes}")


def _measure_exchanges(run: ExchangeCases, folder: Path) -> Iterator[Result]:
    """Run the turns on all ranks; yield the rows of each case, then those over all cases."""
    arguments = {"names": list(run.cases()), "rounds": run.rounds, "small": run.small}
    ranks = run_ranks(measure_rank, arguments, run.num_processes, folder)
    all_seconds = []
    wrong = []
    for name, case in run.cases().items():
        results = [rank[name] for rank in ranks]
        seconds = _seconds(results)
        comparison = _comparison(f"{name}, {run.num_processes} proc", case, results, seconds)
        if not comparison.holds:
            wrong.append(name)
        all_seconds.append(seconds)
        yield from _time_rows(comparison, seconds)
        yield from _bytes_rows(comparison, case)
    for variant in GOALS:
        yield from _summary_rows(variant, all_seconds, run.num_processes, wrong)


def _seconds(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median over the turns of the slowest rank's time, by variant."""
    return {
        variant: statistics.median(
            max(turn) for turn in zip(*(rank["seconds"][variant] for rank in results), strict=True)
        )
        for variant in results[0]["seconds"]
    }


def _comparison(
    name: str, case: Case, results: Sequence[dict[str, Any]], seconds: dict[str, float]
) -> Comparison:
    comparison = Comparison(name, other="expected")
    for variant in results[0]["right"]:
        wrong = [rank for rank, result in enumerate(results) if not result["right"][variant]]
        comparison.same(f"ranks whose shard differs in any bit, {variant}", wrong, [])
    for variant, why in results[0]["unsupported"].items():
        comparison.note(f"{variant} does not support it: {why}")
    comparison.note(
        f"float32, {results[0]['threads']} thread per process, {len(case.shapes)} tensors"
    )
    shown = "; ".join(f"{variant} {value * 1e3:.3g}" for variant, value in seconds.items())
    comparison.note(f"median ms of the slowest rank: {shown}")
    return comparison


def _time_rows(comparison: Comparison, seconds: dict[str, float]) -> Iterator[Result]:
    for variant in GOALS:
        ours, floor = seconds[variant.name], seconds[variant.floor]
        goal = variant.goal(seconds)
        yield comparison.ratio(variant.metric, "s", ours, floor=floor, goal=goal)
    for planner in PLANNERS:
        peer = seconds.get(f"DTensor {planner}")
        if peer is not None:
            metric = f"shared memory, new memory, against DTensor ({planner})"
            ours = seconds[_OURS_FOR_DTENSOR]
            goal = max(DTENSOR_GOAL, FLAT_WORST * seconds["floor shared fresh"] / peer)
            yield comparison.ratio(metric, "s", ours, peer=peer, goal=goal)


def _bytes_rows(comparison: Comparison, case: Case) -> Iterator[Result]:
    plans = [
        plan(src, dst, case.shapes[name], torch.float32)
        for name, (src, dst) in case.layouts().items()
    ]
    ours = sum(t.received for each in plans for t in traffic(each).values())
    bound = sum(lower_bound_bytes(each) or 0 for each in plans)
    metric = "moved, against the lower bound"
    yield comparison.ratio(metric, "bytes", ours, floor=bound, goal=1.0)
    peer = _dtensor_bytes(plans) if case.src[1] == case.dst[1] else None
    if peer is not None:
        metric = "moved, against DTensor (default)"
        yield comparison.ratio(metric, "bytes", ours, peer=peer, goal=1.0)


def _dtensor_bytes(plans: Sequence[RedistributionPlan]) -> int | None:
    """The bytes that DTensor would send; None if it does not support a layout."""
    sent: dict[RedistributionPlan, int] = {}
    for each in plans:
        if each not in sent:
            way = predict_dtensor(each)
            if way.sent is None:
                return None
            sent[each] = sum(way.sent.values())
    return sum(sent[each] for each in plans)


def _summary_rows(
    variant: Goal,
    all_seconds: Sequence[dict[str, float]],
    num_processes: int,
    wrong: Sequence[str],
) -> Iterator[Result]:
    """The median ratio to the floor over all cases, and the one that is worst for its goal."""
    ratios = [seconds[variant.name] / seconds[variant.floor] for seconds in all_seconds]
    shares = list(map(variant.flat_share, all_seconds))
    goals = list(map(variant.goal, all_seconds))
    median_goal = max(variant.median, FLAT_MEDIAN * statistics.median(shares))
    for what, (ours, goal) in {
        "median": (statistics.median(ratios), median_goal),
        # The one that is closest to its goal, or beyond it.
        "worst": max(
            zip(ratios, goals, strict=True),
            key=lambda ratio_and_goal: ratio_and_goal[0] / ratio_and_goal[1],
        ),
    }.items():
        case = f"{what} of {len(ratios)} cases, {num_processes} proc"
        comparison = Comparison(case, variant.metric, other="expected")
        comparison.same("cases with a wrong result", wrong, [])
        comparison.note(f"ratios: {formatted(ratios)}")
        yield comparison.ratio(variant.metric, "of the floor", ours, floor=1.0, goal=goal)


if __name__ == "__main__":
    main("Redistribution against its floor and DTensor.", measure, full=FULL, quick=QUICK)
