"""The cost of buddy copies: steps of two ranks on two machines, with and without copies.

python -m benchmarks.buddies [--quick] [--json PATH]

The machines are emulated: each rank has a /dev/shm of its own in a mount namespace, which needs
root. Both variants train the same job with a snapshot after each step; one copies the snapshots of
both ranks to the other machine every few steps. Variants alternate. The network is the loopback
device, so the figures show the load on processors and memory, which copies share with training.

The exit status is 1 if a process fails, the losses of the variants differ, or no copy was made.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Comparison, Result, formatted, main
from benchmarks.processes import ChildFailed, free_port, start, tail

_RANKS = 2
_INTERVAL = 5
_WARM_UP_STEPS = 5
_TIMEOUT_S = 240.0
_GOAL = 1.05
_NAMESPACE = (
    *("unshare", "--mount", "--propagation", "private", "sh", "-c"),
    'mount -t tmpfs none /dev/shm && exec "$0" "$@"',
)
_COPIES: Mapping[str, tuple[str, ...]] = {
    "with": (f"--checkpoint.buddy_interval={_INTERVAL}",),
    "without": (),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one run."""

    steps: int
    rounds: int


@dataclass
class _Measured:
    """Measurements of one variant."""

    step_s: list[float] = field(default_factory=list)
    """Mean seconds per step of each round."""
    stall_s: list[float] = field(default_factory=list)
    """Mean seconds per step for which training waited for the saver."""
    losses: list[float] = field(default_factory=list)


def measure(plan: Plan, folder: Path) -> Iterator[Result]:
    """Measure all of `plan`, with files in `folder`."""
    if os.geteuid() != 0:
        raise ChildFailed("Mount namespaces, which emulate the machines, need root.")
    measured_by_name = {name: _Measured() for name in _COPIES}
    for index in range(plan.rounds):
        for name, arguments in _COPIES.items():
            _run(folder / f"{name}_{index}", plan.steps, arguments, measured_by_name[name])
    ours, floor = measured_by_name["with"], measured_by_name["without"]
    comparison = Comparison(f"2 ranks on 2 machines, copies every {_INTERVAL} steps")
    comparison.note(f"with copies {formatted(ours.step_s)} s per step")
    comparison.note(f"without {formatted(floor.step_s)} s per step")
    comparison.close_losses(ours.losses, floor.losses, shown=4)
    median = statistics.median
    yield comparison.ratio(
        "time per step", "s", median(ours.step_s), floor=median(floor.step_s), goal=_GOAL
    )
    yield comparison.value(
        "training waits for the saver, per step",
        "s",
        median(ours.stall_s),
        peer=median(floor.stall_s),
    )


def _run(folder: Path, steps: int, arguments: tuple[str, ...], results: _Measured) -> None:
    folder.mkdir()
    log, port = folder / "rank_0.txt", free_port()
    command = [
        *(*_NAMESPACE, sys.executable, "train.py", "--config", "configs/llama3_debug.toml"),
        *("--job.device", "cpu", "--training.seq_len", "64", "--training.steps", str(steps)),
        *("--lr_scheduler.total_steps", "1000", "--validation.enable", "false"),
        *("--checkpoint.enable", "true", "--checkpoint.interval", "1000000"),
        *("--checkpoint.enable_first_step_checkpoint", "false"),
        *("--checkpoint.ram_interval", "1", "--metrics.enable_tensorboard", "false"),
        *("--metrics.log_freq", "1", "--job.dump_folder", str(folder), *arguments),
    ]
    processes = []
    for rank in range(_RANKS):
        place = {"RANK": str(rank), "WORLD_SIZE": str(_RANKS), "MASTER_PORT": str(port)}
        place |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        place |= {"GLOO_SOCKET_IFNAME": "lo"}
        processes.append(start(command, folder / f"rank_{rank}.txt", place))
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        for process in processes:
            if process.wait(max(0.0, deadline - time.monotonic())) != 0:
                raise ChildFailed(f"A rank failed:\n{tail(log)}")
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"The ranks did not end in {_TIMEOUT_S:.0f} s:\n{tail(log)}") from None
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    if arguments and "is copied to the memory of" not in log.read_text(encoding="utf-8"):
        raise ChildFailed(f"No copy was made:\n{tail(log)}")
    records = _steps(folder / "metrics.jsonl")
    if len(records) != steps:
        raise ChildFailed(f"{len(records)} of {steps} steps are recorded:\n{tail(log)}")
    measured = records[_WARM_UP_STEPS:]
    results.step_s.append(
        (records[-1]["time"] - records[_WARM_UP_STEPS - 1]["time"]) / len(measured)
    )
    results.stall_s.append(statistics.fmean(record["checkpoint_stall_s"] for record in measured))
    results.losses = [record["loss"] for record in records]


def _steps(metrics: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "event" not in line]


if __name__ == "__main__":
    main(
        "Buddy copies: steps of two ranks on two machines, with and without copies.",
        measure,
        full=Plan(steps=45, rounds=5),
        quick=Plan(steps=12, rounds=1),
    )
