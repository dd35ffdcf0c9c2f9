"""The cost of one dead rank: a spare takes its place, or torchrun restarts all ranks.

python -m benchmarks.rank_recovery [--quick] [--json PATH]

Both variants train the same job on four ranks of one thread each, with a snapshot in shared memory
after each step, and the same ranks are killed (SIGKILL). A recovery is the time from the kill to
the first step that is recorded after the run has resumed. The peer, torchrun's agent
(`--max-restarts`), starts all ranks again, and they resume from the same snapshots.

The exit status is 1 if a process fails, the losses of the variants differ, a surviving process is
replaced by ours, or more than one step is repeated.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Comparison, Result, formatted, main
from benchmarks.processes import ChildFailed, ChildTimeout, started

_RANKS = 4
_TIMEOUT_S = 120.0
_POLL_S = 0.005
_BETWEEN_STEPS = 8
"""Steps between a recovery and the next kill."""
_GOAL_S = 3.0
_OURS = ("-m", "torchtitan_lite", "train", f"--nproc={_RANKS}", "--spares=1")
_TORCHRUN = (
    *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_RANKS}"),
    *("--max-restarts=100", "train.py"),
)
_EXPERTS = ("--model.name=qwen3", "--model.flavor=tiny_moe")
_MESHES: Mapping[str, Sequence[str]] = {
    "FSDP-4": (),
    "TP-2 x FSDP-2": ("--parallelism.tensor_parallel_degree=2",),
    "PP-2 x FSDP-2": ("--parallelism.pipeline_parallel_degree=2",),
    "EP-4": (*_EXPERTS, "--parallelism.expert_parallel_degree=4"),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one run."""

    meshes: Sequence[str]
    kills: Sequence[int]
    """Ranks, in order."""


@dataclass
class _Recoveries:
    """Measurements of one variant on one mesh."""

    seconds: list[float] = field(default_factory=list)
    repeated: int = 0
    """Most steps that one recovery repeated."""
    replaced: int = 0
    """Processes of surviving ranks that were replaced."""
    losses: dict[int, float] = field(default_factory=dict)


def measure(plan: Plan, folder: Path) -> Iterator[Result]:
    """Measure all of `plan`, with files in `folder`."""
    # Otherwise a restart of torchrun finds the addresses of the first generation in its store, and
    # fails until its ranks have timed out (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for index, mesh in enumerate(plan.meshes):
        ours = _run(_OURS, mesh, plan.kills, folder / f"ours_{index}", num_processes=_RANKS + 1)
        peer = _run(_TORCHRUN, mesh, plan.kills, folder / f"peer_{index}", num_processes=_RANKS)
        comparison = Comparison(f"1 of {_RANKS} ranks killed, {mesh}", other="torchrun")
        comparison.note(f"ours {formatted(ours.seconds)} s")
        comparison.note(f"torchrun {formatted(peer.seconds)} s")
        compare_losses(comparison, ours.losses, peer.losses)
        comparison.small("steps repeated by one recovery", ours.repeated, 1)
        comparison.small("surviving processes replaced", ours.replaced, 0)
        median, count = statistics.median, len(plan.kills)
        yield comparison.value(
            f"until training again, median of {count}",
            "s",
            median(ours.seconds),
            peer=median(peer.seconds),
            goal=_GOAL_S,
        )
        yield comparison.value(
            f"until training again, worst of {count}",
            "s",
            max(ours.seconds),
            peer=max(peer.seconds),
        )


def _run(
    program: Sequence[str], mesh: str, kills: Sequence[int], folder: Path, *, num_processes: int
) -> _Recoveries:
    folder.mkdir()
    recoveries, metrics = _Recoveries(), folder / "metrics.jsonl"
    with started(
        [*program, *job_arguments(folder), *_MESHES[mesh]], [], 1, folder / "log.txt"
    ) as process:
        wait(process, lambda: len(steps(metrics)) >= _BETWEEN_STEPS, folder)
        for rank in kills:
            wait(process, lambda: len(processes(process)) == num_processes, folder)
            # A spare has imported everything, and uses no more of the machine.
            wait(process, lambda: all(map(is_warm, processes(process))), folder)
            _recover(process, rank, recoveries, folder)
        recoveries.losses = steps(metrics)
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TIMEOUT_S)
    return recoveries


def _recover(
    process: subprocess.Popen[bytes], rank: int, recoveries: _Recoveries, folder: Path
) -> None:
    metrics = folder / "metrics.jsonl"
    before, step, num_resumes = ranks(process), max(steps(metrics)), len(resumes(metrics))
    if len(before) != _RANKS:
        raise ChildFailed(f"{len(before)} of {_RANKS} ranks are found: {folder / 'log.txt'}")
    os.kill(before[rank], signal.SIGKILL)
    began_s = time.perf_counter()
    wait(process, lambda: len(resumes(metrics)) > num_resumes, folder)
    resumed = resumes(metrics)[-1]
    wait(process, lambda: max(steps(metrics)) > resumed, folder)
    recoveries.seconds.append(time.perf_counter() - began_s)
    recoveries.repeated = max(recoveries.repeated, step - resumed)
    wait(process, lambda: max(steps(metrics)) >= resumed + _BETWEEN_STEPS, folder)
    wait(process, lambda: len(ranks(process)) == _RANKS, folder)
    after = ranks(process)
    recoveries.replaced += sum(
        after[survivor] != before[survivor] for survivor in after if survivor != rank
    )


def job_arguments(folder: Path) -> list[str]:
    """Return the arguments of an endless run with a snapshot in shared memory after each step, and
    with its outputs in `folder`."""
    return [
        *("--config", "configs/llama3_debug.toml", "--job.device", "cpu"),
        *("--training.seq_len", "32", "--training.local_batch_size", "2"),
        *("--training.global_batch_size", "8", "--training.steps", "1000000"),
        *("--lr_scheduler.total_steps", "1000", "--validation.enable", "false"),
        *("--checkpoint.enable", "true", "--checkpoint.interval", "1000000"),
        *("--checkpoint.ram_interval", "1", "--metrics.enable_tensorboard", "false"),
        *("--job.dump_folder", str(folder)),
    ]


def compare_losses(
    comparison: Comparison, ours: Mapping[int, float], other: Mapping[int, float]
) -> None:
    """Require equal losses in the steps that both runs have taken."""
    common = sorted(ours.keys() & other.keys())
    comparison.close_losses(
        [ours[step] for step in common], [other[step] for step in common], shown=4
    )


def wait(process: subprocess.Popen[bytes], holds: Callable[[], bool], folder: Path) -> None:
    """Block until `holds`. Raises ChildTimeout if the process ends before, or after a time
    limit."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not holds():
        if process.poll() is not None or time.monotonic() >= deadline:
            text = (folder / "log.txt").read_text(encoding="utf-8")[-3000:]
            raise ChildTimeout(f"No progress within {_TIMEOUT_S:.0f} s:\n{text}")
        time.sleep(_POLL_S)


def records(metrics: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl."""
    try:
        text = metrics.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps(metrics: Path) -> dict[int, float]:
    """Return the loss of each recorded step."""
    return {record["step"]: record["loss"] for record in records(metrics) if "event" not in record}


def resumes(metrics: Path) -> list[int]:
    """Return the steps from which the run resumed."""
    return [record["step"] for record in records(metrics) if record.get("event") == "resume"]


def processes(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the ranks and spares, or what else the process has started."""
    return psutil.Process(process.pid).children()


def ranks(process: subprocess.Popen[bytes]) -> dict[int, int]:
    """Return the process of each rank, which is the parent of the writer of its snapshots."""
    pids = {}
    for child in processes(process):
        with suppress(psutil.NoSuchProcess):
            for writer in child.children():
                match = re.search(r"rank-(\d+)\.snapshots", " ".join(writer.cmdline()))
                if match:
                    pids[int(match[1])] = child.pid
    return pids


def is_warm(process: psutil.Process) -> bool:
    """Whether a process is a rank, or a spare that waits."""
    with suppress(psutil.NoSuchProcess):
        is_rank = bool(process.children())
        return is_rank or (process.num_threads() > 1 and process.cpu_percent(0.2) < 10)
    return False


if __name__ == "__main__":
    main(
        "One dead rank: a spare takes its place, or torchrun restarts all ranks.",
        measure,
        full=Plan(meshes=tuple(_MESHES), kills=(2, 0, 3)),
        quick=Plan(meshes=("FSDP-4",), kills=(2,)),
    )
