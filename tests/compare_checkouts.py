"""Compare two checkouts: the same runs must have bitwise equal losses and gradient norms.

python -m tests.compare_checkouts OTHER    (OTHER: the root of another checkout)

For refactorings, which must not change the mathematics. Each checkout trains the debug model in one
process, on four meshes, and as two replicas, in float32. The exit status is 1 if a number differs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.harness.launch import SMALL, command
from tests.harness.ranks import REPOSITORY

_STEPS = 8
_MODEL = ("--checkpoint.enable=true", "--checkpoint.interval=4", f"--training.steps={_STEPS}")
_BATCH = ("--training.local_batch_size=2", "--training.global_batch_size=8")
_RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ()),
    "fsdp 2": (2, ()),
    "tp 2": (2, ("--parallelism.tensor_parallel_degree=2",)),
    "cp 2": (2, ("--parallelism.context_parallel_degree=2",)),
    "pp 2": (2, ("--parallelism.pipeline_parallel_degree=2",)),
}


def losses(checkout: Path, name: str, folder: Path) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each step of a run. Raises CalledProcessError."""
    arguments = [*SMALL, *_MODEL, *_BATCH, f"--job.dump_folder={folder}"]
    if name == "two replicas":
        launch = ["-m", "torchtitan_lite", "launch", "--replicas=2", "--min-replicas=2"]
        words = [sys.executable, *launch, "--", *arguments, "--fault_tolerance.min_replica_size=2"]
        metrics = folder / "replica_000" / "metrics.jsonl"
    else:
        num_processes, mesh = _RUNS[name]
        words = command(num_processes, [*arguments, *mesh])
        metrics = folder / "metrics.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # Import the checkout's own package instead of the installed one.
    environment["PYTHONPATH"] = str(checkout)
    subprocess.run(words, cwd=checkout, env=environment, check=True, capture_output=True)
    lines = map(json.loads, metrics.read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line and "lr" in line]


def main(other: str) -> int:
    """Compare this checkout with `other` and return the exit status."""
    differing = 0
    for name in (*_RUNS, "two replicas"):
        with tempfile.TemporaryDirectory() as folder:
            results = [
                losses(checkout, name, Path(folder) / str(number))
                for number, checkout in enumerate((REPOSITORY, Path(other).resolve()))
            ]
        is_equal = results[0] == results[1] and len(results[0]) == _STEPS
        differing += not is_equal
        print(f"{name:12}  {'equal' if is_equal else f'differs: {results}'}", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
