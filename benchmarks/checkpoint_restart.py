"""One rank of a run that is killed, or of the one that follows it: what lies in shared memory is
made durable by the writers, and is what the next start resumes from.

Started by `benchmarks.checkpoint_cost`, by torchrun.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.tensor

_IMPORTED_AT = time.perf_counter()

# What a start costs is counted from here: torch is imported with its DTensor, which alone takes
# 0.85 s, and nothing of the product.

from benchmarks.checkpoint_side import Ours  # noqa: E402
from benchmarks.checkpoint_state import sharded_state, sharding_mesh  # noqa: E402
from benchmarks.disk import read_bytes  # noqa: E402

NEVER = 1 << 40


def main() -> None:
    """Take steps until killed, or restore and write what it took to FOLDER/restarted_N.json."""
    parser = argparse.ArgumentParser(description="Take snapshots until killed, or restore one.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--restart", action="store_true")
    given = parser.parse_args()
    mesh = sharding_mesh(port=29512)
    ready_at = time.perf_counter()
    state = sharded_state(mesh, given.layers)
    run = Ours(state, mesh, given.folder, mode="async", every_step=True, interval=NEVER)
    if given.restart:
        _restart(run, ready_at - _IMPORTED_AT, given.folder)
    else:
        _train(run, given.folder)


def _train(run: Ours, folder: Path) -> None:
    mesh, matrix = run.mesh, torch.randn(512, 512)
    while True:
        for _ in range(30):
            torch.mm(matrix, matrix)
        mesh.barrier()
        run.agreed(mesh.sum(run.ready()))
        run.state.step += 1
        run.after_step(saves=False)
        line = json.dumps({"pid": os.getpid(), "step": run.state.step})
        path = folder / f"running_{mesh.rank}.json"
        path.with_suffix(".new").write_text(line)
        path.with_suffix(".new").rename(path)


def _restart(run: Ours, start_s: float, folder: Path) -> None:
    run.mesh.barrier()
    before, started_at = read_bytes(), time.perf_counter()
    where = run.manager.restore()
    taken = time.perf_counter() - started_at
    told = {
        "where": where,
        "step": run.state.step,
        "s": start_s + taken,
        "read": read_bytes() - before,
    }
    (folder / f"restarted_{run.mesh.rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
