"""Crash and restart: the seconds until the newest snapshot is durable, and until it is restored.

A run takes a snapshot in each step and is killed. The writers make the snapshot in shared memory
durable, and the next start resumes from it.

As a program, it is a rank of the killed run or of its successor, started by torchrun.
"""

# ruff: noqa: E402
import argparse
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor

from benchmarks.processes import ChildFailed, run, started, wait_for
from benchmarks.worker import io_bytes

_IMPORTED_S = time.perf_counter()

# The cost of a start is counted from here: torch is imported with its DTensor, which alone takes
# 0.85 s, and nothing of the product.

from benchmarks.checkpoint_state import Ours, sharded_state, sharding_mesh
from torchtitan_lite.checkpoint.shared_memory import remove_regions

_PROGRAM = ("-m", "benchmarks.checkpoint_crash")
_KILLED_AT_STEP = 6
_TIMEOUT_S = 60
_NEVER = 1 << 40


@dataclass(frozen=True)
class Crash:
    """The cost of one crash."""

    durable_s: float
    """Time from the kill until a checkpoint of the newest snapshot exists."""
    restart_s: float
    """Time of the slowest rank, after importing torch and DTensor, without building its model."""
    read_bytes: int
    """Bytes that all ranks read from disks."""
    lost_steps: int
    """Between the newest snapshot and the restored step."""


def measure_crash(num_processes: int, layers: int, folder: Path) -> Crash:
    """Kill all ranks of a run that takes a snapshot in each step, and restart it.

    Raises ChildFailed if the run does not start, or does not become durable.
    """
    folder.mkdir(parents=True)
    arguments = ["--folder", str(folder), "--layers", str(layers)]

    def at_step() -> Sequence[dict[str, Any]] | None:
        ranks = _running(num_processes, folder)
        enough = len(ranks) == num_processes and min(r["step"] for r in ranks) >= _KILLED_AT_STEP
        return ranks if enough else None

    try:
        with started(_PROGRAM, arguments, num_processes, folder / "log"):
            ranks = wait_for(at_step, f"step {_KILLED_AT_STEP}", timeout_s=_TIMEOUT_S)
            killed_s = time.perf_counter()
            for rank in ranks:
                os.kill(rank["pid"], signal.SIGKILL)
            # The snapshot of the last step that all ranks have taken may be incomplete.
            newest = min(rank["step"] for rank in _running(num_processes, folder)) - 1

            def durable_s() -> float | None:
                paths = folder.glob("checkpoint/step-*/manifest.json")
                durable = any(_read(path)["step"] >= newest for path in paths)
                return time.perf_counter() - killed_s if durable else None

            what = f"checkpoint of step {newest}"
            durable_after_s = wait_for(durable_s, what, timeout_s=_TIMEOUT_S)
        run(_PROGRAM, [*arguments, "--restart"], num_processes, folder / "log")
        restarted = [_read(folder / f"restarted_{rank}.json") for rank in range(num_processes)]
    finally:
        remove_regions((folder / "run_id").read_text().strip())
    if any("shared memory" not in rank["where"] for rank in restarted):
        raise ChildFailed(f"The restart resumed from {restarted[0]['where']}.")
    return Crash(
        durable_s=durable_after_s,
        restart_s=max(rank["s"] for rank in restarted),
        read_bytes=sum(rank["read"] for rank in restarted),
        lost_steps=max(0, newest - restarted[0]["step"]),
    )


def _running(num_processes: int, folder: Path) -> list[dict[str, Any]]:
    paths = [folder / f"running_{rank}.json" for rank in range(num_processes)]
    return [_read(path) for path in paths if path.exists()]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Take steps until killed, or restore and write what it took to FOLDER/restarted_N.json."""
    parser = argparse.ArgumentParser(description="Take snapshots until killed, or restore one.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--restart", action="store_true")
    options = parser.parse_args()
    mesh = sharding_mesh(port=29512)
    ready_s = time.perf_counter()
    state = sharded_state(mesh, options.layers)
    run = Ours(state, mesh, options.folder, mode="async", every_step=True, interval=_NEVER)
    if options.restart:
        _restart(run, ready_s - _IMPORTED_S, options.folder)
    else:
        _train(run, options.folder)


def _train(run: Ours, folder: Path) -> None:
    mesh, matrix = run.mesh, torch.randn(512, 512)
    while True:
        for _ in range(30):
            torch.mm(matrix, matrix)
        mesh.barrier()
        run.reduced(mesh.all_reduce_(run.ready()))
        run.state.step += 1
        run.after_step(saves=False)
        line = json.dumps({"pid": os.getpid(), "step": run.state.step})
        path = folder / f"running_{mesh.rank}.json"
        path.with_suffix(".new").write_text(line)
        path.with_suffix(".new").rename(path)


def _restart(run: Ours, start_s: float, folder: Path) -> None:
    run.mesh.barrier()
    before, began_s = io_bytes("read_bytes"), time.perf_counter()
    where = run.manager.restore()
    taken = time.perf_counter() - began_s
    result = {
        "where": where,
        "step": run.state.step,
        "s": start_s + taken,
        "read": io_bytes("read_bytes") - before,
    }
    (folder / f"restarted_{run.mesh.rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
