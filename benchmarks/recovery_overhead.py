"""Cost of fault tolerance without faults: replicas of one rank against HSDP of as many ranks.

Both train on the same global batch and reduce the same gradients once per step. All processes of
both variants run from begin to end; those of the waiting variant sleep in a last hook of the
trainer.
"""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.baseline_loop import built_job
from benchmarks.harness import Comparison, Result
from benchmarks.processes import Group, Supervisor, free_port, wait_for, worker_command
from benchmarks.recovery_variants import NUM_REPLICAS, Workload
from benchmarks.worker import Turns
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import StepReport, train

VARIANTS = ("replicas", "hsdp")
"""Variants in the order of their turns."""
_GOAL = 0.03
_TIMEOUT_S = 240.0
_POLL_S = 0.005
_RESULT_POLL_S = 0.05
_SHOWN_LOSSES = 3


@dataclass(frozen=True, kw_only=True)
class OverheadCase:
    """A workload, and the turns of the variants."""

    workload: Workload
    turns: Turns


def measure_overhead(case: OverheadCase, folder: Path) -> Result:
    """Run the turns."""
    folder.mkdir(parents=True)
    ours, hsdp = _run(case, folder)
    comparison = Comparison(case.workload.name, "without faults", other="HSDP")
    for name in ("dtype", "threads"):
        comparison.same(name, ours[name], hsdp[name])
    comparison.close_losses(ours["losses"], hsdp["losses"], shown=_SHOWN_LOSSES)
    step_s, peer_s = median(ours["step_s"]), median(hsdp["step_s"])
    comparison.note(f"median step: replicas {step_s * 1e3:.1f} ms, HSDP {peer_s * 1e3:.1f} ms")
    metric = "overhead without faults over HSDP"
    return comparison.value(metric, "of a step", step_s / peer_s - 1, goal=_GOAL)


def _run(case: OverheadCase, folder: Path) -> list[dict[str, Any]]:
    """Measurements of the first process of each variant."""
    address = f"127.0.0.1:{free_port()}"
    token = secrets.token_hex(16)
    environment = {"TORCHFT_LIGHTHOUSE": f"http://{address}", "TORCHTITAN_LITE_TOKEN": token}
    lighthouse = ["-m", "torchtitan_lite", "coordinator", "--bind", address]
    lighthouse += ["--min-replicas", str(NUM_REPLICAS)]
    groups = [Group([lighthouse], environment, folder / "lighthouse")]
    for number in range(NUM_REPLICAS):
        own = [
            *("--fault_tolerance.enable", "true"),
            *("--fault_tolerance.replica_id", str(number)),
            *("--fault_tolerance.min_replica_size", str(NUM_REPLICAS)),
        ]
        command = _command(case, folder, "replicas", number, own)
        groups.append(Group([command], environment, folder / f"replica_{number}"))
    own = [
        *("--parallelism.data_parallel_replicate_degree", str(NUM_REPLICAS)),
        *("--parallelism.data_parallel_shard_degree", "1"),
    ]
    commands = [_command(case, folder, "hsdp", number, own) for number in range(NUM_REPLICAS)]
    groups.append(Group(commands, {}, folder / "hsdp"))

    def results() -> list[dict[str, Any]] | None:
        if len(list(folder.glob("results_*/rank_*.json"))) < len(VARIANTS) * NUM_REPLICAS:
            return None
        firsts = (folder / f"results_{variant}_0" / "rank_0.json" for variant in VARIANTS)
        return [json.loads(path.read_text(encoding="utf-8")) for path in firsts]

    with Supervisor(groups, restarts=False) as supervisor:
        outcome = wait_for(
            results,
            "result of all turns",
            timeout_s=_TIMEOUT_S,
            check=supervisor.check,
            poll_s=_RESULT_POLL_S,
        )
        time.sleep(_RESULT_POLL_S)
    return outcome


def _command(
    case: OverheadCase, folder: Path, variant: str, number: int, own: Sequence[str]
) -> list[str]:
    trainer_arguments = [
        *case.workload.arguments,
        *("--checkpoint.enable", "false"),
        *("--job.dump_folder", str(folder / f"outputs_{variant}")),
        *own,
    ]
    arguments = {
        "folder": str(folder),
        "variant": variant,
        "number": number,
        "turns": asdict(case.turns),
        "trainer_arguments": trainer_arguments,
    }
    results = folder / f"results_{variant}_{number}"
    results.mkdir()
    return worker_command(alternate_processes, results, arguments)


class Baton:
    """The turn of a variant: a file per process, which grows by a byte at the end of each turn."""

    def __init__(self, folder: Path, variant: str, rank: int, num_ranks: int) -> None:
        self._own = folder / f"{variant}_{rank}.turns"
        before = VARIANTS[: VARIANTS.index(variant)]
        self._before = [
            folder / f"{earlier}_{r}.turns" for earlier in before for r in range(num_ranks)
        ]
        self._after = [
            folder / f"{later}_{r}.turns"
            for later in VARIANTS
            if later != variant and later not in before
            for r in range(num_ranks)
        ]
        self._ended = 0

    def end(self) -> None:
        """End the turn of this process."""
        with self._own.open("ab") as file:
            file.write(b".")
        self._ended += 1

    def wait(self) -> None:
        """Block until the next turn of this variant."""
        while not (
            all(_size(file) > self._ended for file in self._before)
            and all(_size(file) >= self._ended for file in self._after)
        ):
            time.sleep(_POLL_S)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class TurnTaker:
    """The trainer's last hook: measures steps and waits for the other variant."""

    def __init__(self, turns: Turns, baton: Baton) -> None:
        self._turns, self._baton = turns, baton
        self.losses: list[float] = []
        self.step_s: list[float] = []
        """Step times of the turns after the warm-up, without first steps, which a pause affects."""
        self._began_s: float | None = None

    def __call__(self, state: TrainState, report: StepReport) -> None:
        if self._began_s is not None and report.number > self._turns.warmup_steps:
            self.step_s.append(time.perf_counter() - self._began_s)
        self.losses.append(report.loss)
        self._began_s = time.perf_counter()
        if self._turns.ends_after(report.number):
            self._began_s = None
            self._baton.end()
            if report.number < self._turns.total_steps:
                self._baton.wait()


def alternate_processes(
    folder: str, variant: str, number: int, turns: dict[str, int], trainer_arguments: list[str]
) -> dict[str, Any]:
    """Take the turns of one process of a variant."""
    of_both = Turns(**turns)
    trainer_arguments += ["--training.steps", str(of_both.total_steps)]
    baton = Baton(Path(folder), variant, number, NUM_REPLICAS)
    with built_job(trainer_arguments) as (config, built):
        taker = TurnTaker(of_both, baton)
        baton.wait()
        train(replace(built.job, hooks=[*built.job.hooks, taker]))
        return {
            "losses": taker.losses,
            "step_s": taker.step_s,
            "dtype": config.training.dtype,
            "threads": torch.get_num_threads(),
        }
