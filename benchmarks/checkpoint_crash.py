"""A run that is killed, and the start that follows it: how long until its newest snapshot is
durable, and until the next run has it back from shared memory."""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import ChildFailed, run, started
from torchtitan_lite.checkpoint.memory import remove_regions

_PROGRAM = ("-m", "benchmarks.checkpoint_restart")
_KILLED_AT_STEP = 6
_PATIENCE_S = 60
_POLL_S = 0.005


@dataclass(frozen=True)
class Crash:
    """What one crash has cost."""

    durable_s: float
    """From the kill until a checkpoint of the newest snapshot is there."""
    restart_s: float
    """Of the slowest rank, from when it has imported torch and its DTensor, without making its
    model."""
    read_bytes: int
    """From disks, by all ranks."""
    lost_steps: int
    """Between the newest snapshot and the step that the next start has."""


def measure_crash(num_processes: int, layers: int, folder: Path) -> Crash:
    """Kill all ranks of a run that takes a snapshot in each step, and start it again.

    Raises ChildFailed when the run does not start, or nothing of it becomes durable.
    """
    folder.mkdir(parents=True)
    arguments = ["--folder", str(folder), "--layers", str(layers)]
    try:
        with started(_PROGRAM, arguments, num_processes, folder / "log"):
            ranks = _at_step(_KILLED_AT_STEP, num_processes, folder)
            killed_at = time.perf_counter()
            for rank in ranks:
                os.kill(rank["pid"], signal.SIGKILL)
            # The snapshot of the last step that all ranks have taken may still have been filled.
            newest = min(rank["step"] for rank in _running(num_processes, folder)) - 1
            durable_s = _durable(newest, folder, killed_at)
        run(_PROGRAM, [*arguments, "--restart"], num_processes, folder / "log")
        told = [_read(folder / f"restarted_{rank}.json") for rank in range(num_processes)]
    finally:
        remove_regions((folder / "run_id").read_text().strip())
    if any("shared memory" not in rank["where"] for rank in told):
        raise ChildFailed(f"The next start went on from {told[0]['where']}.")
    return Crash(
        durable_s=durable_s,
        restart_s=max(rank["s"] for rank in told),
        read_bytes=sum(rank["read"] for rank in told),
        lost_steps=max(0, newest - told[0]["step"]),
    )


def _at_step(step: int, num_processes: int, folder: Path) -> Sequence[dict[str, Any]]:
    for _ in _patiently(f"step {step}"):
        ranks = _running(num_processes, folder)
        if len(ranks) == num_processes and min(rank["step"] for rank in ranks) >= step:
            return ranks
    raise AssertionError


def _durable(step: int, folder: Path, since: float) -> float:
    for _ in _patiently(f"a checkpoint of step {step}"):
        found = [_read(path) for path in folder.glob("checkpoint/step-*/manifest.json")]
        if any(manifest["step"] >= step for manifest in found):
            return time.perf_counter() - since
    raise AssertionError


def _patiently(what: str) -> Iterator[None]:
    deadline = time.perf_counter() + _PATIENCE_S
    while time.perf_counter() < deadline:
        yield
        time.sleep(_POLL_S)
    raise ChildFailed(f"{what} did not come in {_PATIENCE_S} s.")


def _running(num_processes: int, folder: Path) -> list[dict[str, Any]]:
    paths = [folder / f"running_{rank}.json" for rank in range(num_processes)]
    return [_read(path) for path in paths if path.exists()]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
