"""The cost of faults: ours, a trainer written directly on torchft, and a restart from a checkpoint.

python -m benchmarks.recovery [--quick] [--json PATH]

All variants get the same faults in one run, ours with both lighthouses. Two replicas of one rank
and one thread each. Ranks are killed (SIGKILL) and restart; lighthouses are killed. A stall is the
longest gap between two commits of the survivor beyond its median step of the same work, because a
survivor processes the samples of all, in longer steps. Goodput is wall time without faults over
wall time with faults for the same samples, both of one run. The overhead without faults is that
over HSDP of the same ranks, and the rate of healing is compared with a bare socket.

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
from benchmarks.recovery_faults import FaultSchedule, FaultyRun, Line, run_with_faults
from benchmarks.recovery_overhead import OverheadCase, measure_overhead
from benchmarks.recovery_rows import Runs, compare, goodput_rows, rows_of
from benchmarks.recovery_variants import (
    NUM_REPLICAS,
    CheckpointRestart,
    Ours,
    Torchft,
    Variant,
    Workload,
)
from benchmarks.worker import Turns
from torchtitan_lite.launcher.torchft_lighthouse import HEARTBEAT_TIMEOUT_MS

_BATCHES = 1200
"""Of the peer, for each replica; more than there are steps."""
_MAX_STALL_S = {"builtin": 0.5, "torchft": HEARTBEAT_TIMEOUT_MS / 1000 + 0.3}
"""By lighthouse."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run measures."""

    workload: Workload
    often: FaultSchedule
    """Consecutive faults."""
    lighthouses: Sequence[str]
    """Of ours."""
    seldom: FaultSchedule | None
    """Rare faults, for goodput, also of a restart from a checkpoint."""
    turns: Turns
    heal: HealCase
    max_reference_steps: int
    """Steps that are compared with a run without faults."""
    reference_processes: int


FULL = Plan(
    workload=Workload(flavor="debugmodel", seq_len=64, local_batch_size=2),
    often=FaultSchedule(undisturbed_s=3, faults=5, period_s=0, lighthouse_faults=2),
    lighthouses=("builtin", "torchft"),
    seldom=FaultSchedule(undisturbed_s=15, faults=2, period_s=60, seed=1),
    turns=Turns(warmup_steps=5, steps=10, count=5),
    heal=HealCase(num_tensors=36, rows=1024, warmup_rounds=2, rounds=7),
    max_reference_steps=400,
    reference_processes=NUM_REPLICAS,
)
QUICK = Plan(
    workload=Workload(flavor="tiny", seq_len=32, local_batch_size=1),
    often=FaultSchedule(undisturbed_s=1, faults=1, period_s=0),
    lighthouses=("builtin",),
    seldom=None,
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

    def inject(variant: Variant, schedule: FaultSchedule) -> FaultyRun:
        own = folder / f"run_{sum(map(len, runs.values()))}"
        found = run_with_faults(variant, plan.workload, schedule, own)
        runs.setdefault(variant.name, []).append(found)
        return found

    torchft = Torchft(_write_inputs(plan.workload, folder))
    ours = [Ours(lighthouse) for lighthouse in plan.lighthouses]
    for variant in (*ours, torchft):
        inject(variant, plan.often)
    peers: dict[str, FaultyRun] = {}
    seldom = None
    if plan.seldom is not None:
        seldom = inject(ours[0], plan.seldom)
        restart = CheckpointRestart()
        peers = {variant.name: inject(variant, plan.seldom) for variant in (torchft, restart)}
    last_step = max(runs[variant.name][0].reader.progress()[-1].step for variant in ours)
    steps = min(last_step, plan.max_reference_steps)
    reference, dtype = _reference_run(plan, steps, folder / "reference")
    results = {name: Runs(name=name, runs=some) for name, some in runs.items()}
    comparisons = {name: compare(one, reference, dtype) for name, one in results.items()}
    for comparison in comparisons.values():
        print(comparison.text(), flush=True)

    def valid(*names: str) -> bool:
        return all(comparisons[name].holds for name in names)

    for variant in ours:
        name, peer = variant.name, torchft.name
        max_stall_s = _MAX_STALL_S[variant.lighthouse]
        both = valid(name, peer)
        yield from rows_of(results[name], results[peer], reference, max_stall_s, valid=both)
    if seldom is not None and plan.seldom is not None:
        all_valid = valid(ours[0].name, *peers)
        yield from goodput_rows(seldom, peers, plan.seldom.period_s, valid=all_valid)


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
