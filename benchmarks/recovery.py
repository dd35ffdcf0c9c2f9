"""What faults cost: ours under both lighthouses, a trainer written directly on torchft, and a
restart of all from a checkpoint, disturbed alike in one run.

python -m benchmarks.recovery [--quick] [--json PATH]

Two replicas of one rank and one thread each. Ranks are killed (SIGKILL) and return; lighthouses are
killed. A stall is the longest gap between two commits of the survivor less its median step of the
same work: who survives takes the samples of all, in longer steps. Goodput is undisturbed wall time
over disturbed for the same samples, both of one run. The overhead without faults is that over HSDP
of the same ranks, and the rate of a heal is set against a bare socket.

Exits with 1 when a process fails or sides did other work; a missed goal is a row that says so.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli

from benchmarks.agreement import Agreement
from benchmarks.heal_rate import HealCase, measure_heal
from benchmarks.processes import TRAINER, run
from benchmarks.recovery_faults import Disturbed, Schedule, disturb
from benchmarks.recovery_overhead import OverheadCase, measure_overhead
from benchmarks.recovery_reader import Told
from benchmarks.recovery_rows import Result, agree, goodput_rows, rows_of
from benchmarks.recovery_sides import NUM_REPLICAS, Ours, Restart, Side, Torchft, Work
from benchmarks.report import main
from benchmarks.rows import Row
from benchmarks.turns import Turns
from torchtitan_lite.launcher.torchft_lighthouse import HEARTBEAT_TIMEOUT_MS

_BATCHES = 1200
"""That the peer has for each replica, more than there are steps."""
_MOST_STALL_S = {"builtin": 0.5, "torchft": HEARTBEAT_TIMEOUT_MS / 1000 + 0.3}
"""By lighthouse."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    work: Work
    often: Schedule
    """Faults one after the other."""
    lighthouses: Sequence[str]
    """Of ours."""
    seldom: Schedule | None
    """Faults at the rate of which goodput is told, also for a restart from a checkpoint."""
    turns: Turns
    heal: HealCase
    straight_steps: int
    """The most that are compared with a run that nothing disturbs."""
    straight_processes: int


FULL = Plan(
    work=Work(flavor="debugmodel", seq_len=64, local_batch_size=2),
    often=Schedule(undisturbed_s=3, faults=5, period_s=0, lighthouse_faults=2),
    lighthouses=("builtin", "torchft"),
    seldom=Schedule(undisturbed_s=15, faults=2, period_s=60, seed=1),
    turns=Turns(warmup_steps=5, steps=10, count=5),
    heal=HealCase(num_tensors=36, rows=1024, warmup_rounds=2, rounds=7),
    straight_steps=400,
    straight_processes=NUM_REPLICAS,
)
QUICK = Plan(
    work=Work(flavor="tiny", seq_len=32, local_batch_size=1),
    often=Schedule(undisturbed_s=1, faults=1, period_s=0),
    lighthouses=("builtin",),
    seldom=None,
    turns=Turns(warmup_steps=2, steps=4, count=2),
    heal=HealCase(num_tensors=16, rows=1024, warmup_rounds=1, rounds=3),
    straight_steps=80,
    # It starts in half the time.
    straight_processes=1,
)


def measure(plan: Plan, folder: Path) -> Iterator[tuple[Row, Agreement]]:
    """All of it, one after the other."""
    yield measure_heal(plan.heal)
    overhead = OverheadCase(work=plan.work, turns=plan.turns)
    yield measure_overhead(overhead, folder / "overhead")
    runs: dict[str, list[Disturbed]] = {}

    def strike(side: Side, schedule: Schedule) -> Disturbed:
        found = disturb(side, plan.work, schedule, folder / f"run_{sum(map(len, runs.values()))}")
        runs.setdefault(side.name, []).append(found)
        return found

    torchft = Torchft(_write_inputs(plan.work, folder))
    ours = [Ours(lighthouse) for lighthouse in plan.lighthouses]
    for side in (*ours, torchft):
        strike(side, plan.often)
    peers: list[tuple[str, Disturbed]] = []
    seldom = None
    if plan.seldom is not None:
        seldom = strike(ours[0], plan.seldom)
        peers = [(side.name, strike(side, plan.seldom)) for side in (torchft, Restart())]
    last_step = max(runs[side.name][0].reader.progress()[-1].step for side in ours)
    straight, dtype = _straight(plan, min(last_step, plan.straight_steps), folder / "straight")
    results = {name: Result(name=name, runs=some) for name, some in runs.items()}
    agreements = {name: agree(one, straight, dtype) for name, one in results.items()}
    for agreement in agreements.values():
        print(agreement.text(), flush=True)
    peer = torchft.name
    for side in ours:
        both = _both(agreements[side.name], agreements[peer])
        found = rows_of(
            results[side.name],
            results[peer],
            straight,
            _MOST_STALL_S[side.lighthouse],
            comparable=both.holds,
        )
        yield from ((row, both) for row in found)
    if seldom is not None and plan.seldom is not None:
        all_ = _both(*(agreements[name] for name in (ours[0].name, *(name for name, _ in peers))))
        found = goodput_rows(seldom, peers, plan.seldom.period_s, comparable=all_.holds)
        yield from ((row, all_) for row in found)


def _both(*agreements: Agreement) -> Agreement:
    """One that holds where all do."""
    found = Agreement("all of them: losses, dtype and threads")
    found.same("hold", all(one.holds for one in agreements), True)
    return found


def _write_inputs(work: Work, folder: Path) -> Path:
    path = folder / "inputs.pt"
    arguments = [
        *("--path", str(path), "--steps", str(_BATCHES)),
        *work.arguments,
        *("--checkpoint.enable", "false"),
        *("--job.dump_folder", str(folder / "inputs")),
    ]
    run(("-m", "benchmarks.torchft_inputs"), arguments, 1, folder / "inputs.txt")
    return path


def _straight(plan: Plan, steps: int, folder: Path) -> tuple[list[Told], str]:
    """The steps of a run that nothing disturbs, by plain data parallelism, and its dtype."""
    folder.mkdir()
    arguments = [
        *plan.work.arguments,
        *("--parallelism.data_parallel_replicate_degree", str(plan.straight_processes)),
        *("--parallelism.data_parallel_shard_degree", "1"),
        *("--checkpoint.enable", "false"),
        *("--training.steps", str(steps)),
        *("--job.dump_folder", str(folder)),
    ]
    run(TRAINER, arguments, plan.straight_processes, folder / "log.txt")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    told = [Told(seen_s=0.0, replica=0, values=line) for line in lines]
    config = tomli.loads((folder / "config.toml").read_text(encoding="utf-8"))
    return [one for one in told if one.is_step], config["training"]["dtype"]


if __name__ == "__main__":
    main(
        "Faults against torchft's own and a restart from checkpoint.",
        measure,
        full=FULL,
        quick=QUICK,
    )
