"""The cost of faults: ours, a trainer written directly on torchft, and a restart from a checkpoint.

python -m benchmarks.recovery [--quick] [--json PATH]

All variants get the same faults in one run, ours with both lighthouses. Two replicas of one rank
and one thread each. Ranks are killed (SIGKILL) and restart; lighthouses are killed. A stall is the
longest gap between two commits of the survivor beyond its median step of the same work, because a
survivor processes the samples of all, in longer steps. The overhead without faults is that
over HSDP of the same ranks, and the rate of healing is compared with a bare socket.

Then all variants, and ours with a spare instead of replicas, get one schedule of failures: the time
to the work of some steps, first without failures, then with ranks killed at the same times,
recovered or not. Last, the link of a replica is cut, where there are network namespaces.

The exit status is 1 if a process fails or variants did other work; a missed goal is only reported
in its row.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli

from benchmarks.baseline_loop import write_replica_batches
from benchmarks.harness import Result, main
from benchmarks.heal import HealCase, measure_heal
from benchmarks.processes import TRAINER, run, run_ranks
from benchmarks.recovery_faults import (
    FailureSchedule,
    FaultSchedule,
    FaultyRun,
    Line,
    run_with_faults,
    run_with_schedule,
)
from benchmarks.recovery_links import measure_cut
from benchmarks.recovery_overhead import OverheadCase, measure_overhead
from benchmarks.recovery_rows import Runs, compare, rows_of, schedule_rows
from benchmarks.recovery_variants import (
    NUM_REPLICAS,
    CheckpointRestart,
    Ours,
    Spares,
    Torchft,
    Variant,
    Workload,
)
from benchmarks.worker import Turns
from torchtitan_lite.fault_tolerance.supervision.launcher.torchft_lighthouse import (
    HEARTBEAT_TIMEOUT_MS,
)

_BATCHES = 1200
"""Batches of the peer, for each replica; more than there are steps."""
_MAX_STALL_S = {"builtin": 0.5, "torchft": HEARTBEAT_TIMEOUT_MS / 1000 + 0.3}
"""Goals by lighthouse."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one run."""

    workload: Workload
    often: FaultSchedule
    """Consecutive faults."""
    lighthouses: Sequence[str]
    """Lighthouses of our variants."""
    schedule: FailureSchedule | None
    """Failures for all variants, also for a restart from a checkpoint, and for spares."""
    cut_s: float | None
    """Seconds for which a link is cut."""
    turns: Turns
    heal: HealCase
    max_reference_steps: int
    """Steps that are compared with a run without faults."""
    reference_processes: int


FULL = Plan(
    workload=Workload(flavor="debugmodel", seq_len=64, local_batch_size=2),
    often=FaultSchedule(undisturbed_s=3, faults=5, lighthouse_faults=2),
    lighthouses=("builtin", "torchft"),
    schedule=FailureSchedule(steps=400, mean_interval_s=20, seed=1),
    cut_s=20.0,
    turns=Turns(warmup_steps=5, steps=10, count=5),
    heal=HealCase(num_tensors=36, rows=1024, warmup_rounds=2, rounds=7),
    max_reference_steps=400,
    reference_processes=NUM_REPLICAS,
)
QUICK = Plan(
    workload=Workload(flavor="tiny", seq_len=32, local_batch_size=1),
    often=FaultSchedule(undisturbed_s=1, faults=1),
    lighthouses=("builtin",),
    schedule=None,
    cut_s=None,
    turns=Turns(warmup_steps=2, steps=4, count=2),
    heal=HealCase(num_tensors=16, rows=1024, warmup_rounds=1, rounds=3),
    max_reference_steps=80,
    # It starts in half the time.
    reference_processes=1,
)


def measure(plan: Plan, folder: Path) -> Iterator[Result]:
    """Measure all of `plan`, with files in `folder`."""
    yield measure_heal(plan.heal)
    overhead = OverheadCase(workload=plan.workload, turns=plan.turns)
    yield measure_overhead(overhead, folder / "overhead")
    runs: dict[str, list[FaultyRun]] = {}

    def inject(variant: Variant, faults: FaultSchedule | FailureSchedule) -> FaultyRun:
        own = folder / f"run_{sum(map(len, runs.values()))}"
        if isinstance(faults, FaultSchedule):
            run = run_with_faults(variant, plan.workload, faults, own)
        else:
            run = run_with_schedule(variant, plan.workload, faults, own)
        runs.setdefault(variant.name, []).append(run)
        return run

    torchft = Torchft(_write_inputs(plan.workload, folder))
    ours = [Ours(lighthouse) for lighthouse in plan.lighthouses]
    if plan.schedule is not None:
        ours.append(Ours("builtin", num_spares=1))
    for variant in (*ours, torchft):
        inject(variant, plan.often)
    scheduled: dict[str, FaultyRun] = {}
    if plan.schedule is not None:
        for variant in (ours[0], ours[-1], Spares(), torchft, CheckpointRestart()):
            scheduled[variant.name] = inject(variant, plan.schedule)
    last_step = max(runs[variant.name][0].reader.progress()[-1].step for variant in ours)
    steps = min(last_step, plan.max_reference_steps)
    reference, dtype = _reference_run(plan, steps, folder / "reference")
    results = {name: Runs(name=name, runs=some) for name, some in runs.items()}
    comparisons = {
        name: compare(runs_of_variant, reference, dtype)
        for name, runs_of_variant in results.items()
    }
    for comparison in comparisons.values():
        print(comparison.text(), flush=True)

    def valid(*names: str) -> bool:
        return all(comparisons[name].holds for name in names)

    for variant in ours:
        name, peer = variant.name, torchft.name
        max_stall_s = _MAX_STALL_S[variant.lighthouse]
        both = valid(name, peer)
        yield from rows_of(results[name], results[peer], reference, max_stall_s, valid=both)
    if plan.schedule is not None:
        names = list(scheduled)
        own, peers = ({name: scheduled[name] for name in some} for some in (names[:3], names[3:]))
        yield from schedule_rows(own, peers, plan.schedule, valid=valid(*names))
    if plan.cut_s is not None:
        yield from measure_cut(plan.cut_s, folder / "cut")


def _write_inputs(workload: Workload, folder: Path) -> Path:
    path = folder / "inputs.pt"
    trainer_arguments = [
        *workload.arguments,
        *("--checkpoint.enable", "false"),
        *("--job.dump_folder", str(folder / "inputs")),
    ]
    arguments = {
        "path": str(path),
        "num_steps": _BATCHES,
        "trainer_arguments": trainer_arguments,
    }
    run_ranks(write_replica_batches, arguments, 1, folder / "write_inputs")
    return path


def _reference_run(plan: Plan, steps: int, folder: Path) -> tuple[list[Line], str]:
    """The steps of a run without faults, by plain data parallelism, and its dtype."""
    folder.mkdir()
    arguments = [
        *plan.workload.arguments,
        *("--parallelism.data_parallel_replicate_degree", str(plan.reference_processes)),
        *("--parallelism.data_parallel_shard_degree", "1"),
        *("--checkpoint.enable", "false"),
        *("--training.steps", str(steps)),
        *("--job.dump_folder", str(folder)),
    ]
    run(TRAINER, arguments, plan.reference_processes, folder / "log.txt")
    values = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    lines = [Line(seen_s=0.0, replica=0, values=line) for line in values]
    config = tomli.loads((folder / "config.toml").read_text(encoding="utf-8"))
    return [line for line in lines if line.is_step], config["training"]["dtype"]


if __name__ == "__main__":
    main(
        "Faults against torchft's own recovery and a restart from a checkpoint.",
        measure,
        full=FULL,
        quick=QUICK,
    )
