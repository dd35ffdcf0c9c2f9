"""Compare two checkouts: the same runs must have bitwise equal losses, gradient norms and exported
weights.

python -m tests.compare_checkouts OTHER [NAME ...]    (OTHER: the root of another checkout)

For refactorings, which must not change the mathematics. Each checkout trains debug models in
float32: on meshes, with the techniques of `RUNS`, over a resume on another mesh, and as two
replicas. The exit status is 1 if a number or a byte differs.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.launch import SMALL, command
from tests.harness.ranks import REPOSITORY

_STEPS = 8
_SHARED = (
    *SMALL,
    "--training.local_batch_size=2",
    "--training.global_batch_size=8",
    "--checkpoint.enable=true",
    "--checkpoint.interval=4",
    "--checkpoint.last_save_in_hf=true",
)
_ADAPTERS = (
    '--model.converters=["lora"]',
    "--checkpoint.initial_load_path=ROOT/base/checkpoint/step-4",
)
_EXPERTS = ("--model.name=deepseek_v3", "--parallelism.expert_parallel_degree=2")


@dataclass(frozen=True)
class Part:
    """A run until `steps`; a later one in the same folder resumes it."""

    num_processes: int = 1
    arguments: tuple[str, ...] = ()
    """`ROOT` in them stands for the folder above those of all parts."""
    steps: int = _STEPS
    folder: str = "run"
    replicas: int = 0
    """With replicas under the launcher, of one process each."""


def _degree(**degrees: int) -> tuple[str, ...]:
    return tuple(f"--parallelism.{axis}_degree={degree}" for axis, degree in degrees.items())


_TP_2 = _degree(tensor_parallel=2)
RUNS: Mapping[str, Sequence[Part]] = {
    "one process": [Part()],
    "FSDP": [Part(2)],
    "TP": [Part(2, _TP_2)],
    "CP": [Part(2, _degree(context_parallel=2))],
    "PP": [Part(2, _degree(pipeline_parallel=2))],
    "HSDP": [Part(4, _degree(data_parallel_replicate=2, data_parallel_shard=2))],
    "experts, EP": [Part(2, _EXPERTS)],
    "compiled, recomputed": [
        Part(1, ("--compile.enable=true", "--activation_checkpoint.mode=selective"))
    ],
    "Muon, FSDP": [Part(2, ("--optimizer.name=Muon",))],
    "FSDP, resumed with TP": [Part(2, (), 4), Part(2, _TP_2)],
    "two replicas": [Part(replicas=2)],
    "LoRA, FSDP": [Part(steps=4, folder="base"), Part(2, _ADAPTERS)],
}


def outcome(checkout: Path, parts: Sequence[Part], root: Path) -> tuple[object, ...]:
    """Return the loss and the gradient norm of each step of a run, and a digest of each exported
    file. Raises CalledProcessError."""
    for part in parts:
        folder = root / part.folder
        own = [argument.replace("ROOT", str(root)) for argument in part.arguments]
        arguments = [*_SHARED, *own]
        arguments += [f"--job.dump_folder={folder}", f"--training.steps={part.steps}"]
        if part.replicas:
            launch = ["-m", "torchtitan_lite", "launch", f"--replicas={part.replicas}"]
            launch += [f"--min-replicas={part.replicas}", "--"]
            replicas = f"--fault_tolerance.min_replica_size={part.replicas}"
            words = [sys.executable, *launch, *arguments, replicas]
        else:
            words = command(part.num_processes, arguments)
        # Import the checkout's own package instead of the installed one.
        variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(checkout)}
        ran = subprocess.run(
            words, cwd=checkout, env={**os.environ, **variables}, capture_output=True, text=True
        )
        if ran.returncode:
            print(ran.stdout[-2000:], ran.stderr[-2000:])
            ran.check_returncode()
    folder = root / parts[-1].folder
    first = next(iter(sorted(folder.rglob("metrics.jsonl"))))
    lines = map(json.loads, first.read_text().splitlines())
    steps = [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line and "lr" in line]
    return (*steps, *_exported(folder))


def _exported(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("hf/**/*.safetensors")):
        yield path.name, hashlib.sha256(path.read_bytes()).hexdigest()


def main(other: str, *names: str) -> int:
    """Compare this checkout with `other` and return the exit status."""
    differing = 0
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            results = [
                outcome(checkout, RUNS[name], Path(folder) / str(number))
                for number, checkout in enumerate((REPOSITORY, Path(other).resolve()))
            ]
        # Each step, and at least one file.
        is_equal = results[0] == results[1] and len(results[0]) > _STEPS
        differing += not is_equal
        print(f"{name:22}  {'equal' if is_equal else f'differs: {results}'}", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
