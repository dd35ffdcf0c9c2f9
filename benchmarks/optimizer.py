"""The iterations of Muon over shards, against one process and against all-gather.

python -m benchmarks.optimizer [--quick] [--json PATH]

Every process with one thread, gloo; see `optimizer_variants` for the variants. Rows per case:

- CPU seconds of a step, of the mean rank, against the floor: one process's iterations divided by
  the ranks, plus a bare exchange of the same bytes. Means count, since imbalance shows in the row
  of the busiest rank.
- CPU seconds of the busiest rank, against an all-gather of every matrix on every rank (peer).
- Wall seconds against the same floor, where every rank has a core.
- Bytes between ranks against the lower bound (floor) and against the all-gather (peer).

The exit status is 1 if a result differs from that of entire matrices in any bit, or if the planned
bytes are not those that the ranks exchange; a missed goal is only reported in its row.
"""

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Comparison, Result, formatted, main
from benchmarks.optimizer_variants import Model, measure_rank
from benchmarks.processes import run_ranks

FLOOR_GOAL = 1.1
GATHER_GOAL = 1.25
"""Times the share of a rank: an all-gather repeats the iterations on every rank."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a mesh."""

    name: str
    layout: str
    num_processes: int
    model: Model
    dtype: str = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cases of one run."""

    cases: Sequence[Case]
    rounds: int


_DENSE = Model(layers=4, dim=768, hidden_dim=2048)
_EXPERTS = Model(layers=2, dim=512, hidden_dim=512, experts=8)

FULL = Plan(
    cases=[
        Case(name="FSDP", layout="FSDP", num_processes=2, model=_DENSE),
        Case(name="FSDP, float32", layout="FSDP", num_processes=2, model=_DENSE, dtype="float32"),
        Case(name="FSDP", layout="FSDP", num_processes=4, model=_DENSE),
        Case(name="HSDP 2 x 2", layout="HSDP", num_processes=4, model=_DENSE),
        Case(name="FSDP x TP", layout="FSDP x TP", num_processes=4, model=_DENSE),
        Case(name="FSDP, EP", layout="FSDP", num_processes=4, model=_EXPERTS),
    ],
    rounds=7,
)
QUICK = Plan(
    cases=[
        Case(
            name="FSDP",
            layout="FSDP",
            num_processes=2,
            model=Model(layers=2, dim=384, hidden_dim=1024),
        ),
        Case(
            name="FSDP x TP, EP",
            layout="FSDP x TP",
            num_processes=4,
            model=Model(layers=1, dim=256, hidden_dim=256, experts=4),
        ),
    ],
    rounds=5,
)


def measure(plan: Plan, folder: Path) -> Iterator[Result]:
    """Measure all cases of a plan, with files in `folder`."""
    for index, case in enumerate(plan.cases):
        arguments = {
            "layout": case.layout,
            "model": asdict(case.model),
            "dtype": case.dtype,
            "rounds": plan.rounds,
        }
        ranks = run_ranks(measure_rank, arguments, case.num_processes, folder / str(index))
        yield from _rows(case, ranks)


def _rows(case: Case, ranks: Sequence[dict[str, Any]]) -> Iterator[Result]:
    count = case.num_processes
    wall_s, mean_s, busiest_s = _seconds(ranks)
    comparison = Comparison(f"{case.name}, {count} proc", other="expected")
    for variant in ("ours", "all-gather"):
        wrong = [rank for rank, result in enumerate(ranks) if not result["right"][variant]]
        comparison.same(f"ranks whose shard differs in any bit, {variant}", wrong, [])
    first = ranks[0]
    moved = first["moved_bytes"]
    comparison.same("bytes as planned, and as sent", moved, first["exchanged_bytes"])
    comparison.note(
        f"{case.dtype}, {first['threads']} thread per process, {first['buckets']} buckets"
    )
    comparison.note(f"GFLOPs per rank: {formatted(first['flops'], scale=1e-9)}")
    comparison.note(
        "median CPU ms, mean of the ranks: "
        + "; ".join(f"{variant} {value * 1e3:.3g}" for variant, value in mean_s.items())
    )
    # With one process, only rank 0 works.
    whole_s = mean_s["one process"] * count
    floor_s = whole_s / count + mean_s["bare exchange"]
    yield comparison.ratio("CPU seconds", "s", mean_s["ours"], floor=floor_s, goal=FLOOR_GOAL)
    yield comparison.ratio(
        "CPU seconds, busiest rank, against all-gather",
        "s",
        busiest_s["ours"],
        peer=busiest_s["all-gather"],
        goal=GATHER_GOAL / count,
    )
    if count <= len(os.sched_getaffinity(0)):
        floor_s = wall_s["one process"] / count + wall_s["bare exchange"]
        yield comparison.ratio("wall seconds", "s", wall_s["ours"], floor=floor_s, goal=FLOOR_GOAL)
    yield comparison.ratio(
        "bytes, against the lower bound", "B", moved, floor=first["bound_bytes"], goal=1.0
    )
    yield comparison.ratio(
        "bytes, against all-gather", "B", moved, peer=first["gathered_bytes"], goal=1.0
    )


def _seconds(
    ranks: Sequence[dict[str, Any]],
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Medians over the turns by variant: wall seconds, CPU seconds of the mean and of the busiest
    rank."""
    wall_s, mean_s, busiest_s = {}, {}, {}
    for variant in ranks[0]["costs"]:
        turns = list(zip(*(rank["costs"][variant] for rank in ranks), strict=True))
        wall_s[variant] = statistics.median(max(wall for wall, _ in turn) for turn in turns)
        used = [[cpu for _, cpu in turn] for turn in turns]
        mean_s[variant] = statistics.median(map(statistics.mean, used))
        busiest_s[variant] = statistics.median(map(max, used))
    return wall_s, mean_s, busiest_s


if __name__ == "__main__":
    main((__doc__ or "").partition("\n")[0], measure, full=FULL, quick=QUICK)
