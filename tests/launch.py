"""Start `train.py` as a user does, in real processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from tests.failures import RankFailed
from tests.job import FIXTURE

REPOSITORY = Path(__file__).parent.parent
SMALL: tuple[str, ...] = (
    "--config=configs/llama3_debug.toml",
    f"--training.dataset_path={FIXTURE}",
    "--training.held_out_fraction=0",
    "--validation.enable=false",
    "--metrics.enable_tensorboard=false",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.global_batch_size=4",
    "--lr_scheduler.total_steps=1000",
    "--job.device=cpu",
)
"""The debug config on the text fixture, in steps of milliseconds."""
PROGRAM: tuple[str, ...] = ("train.py",)
FAULTY: tuple[str, ...] = ("-m", "tests.faulty_trainer")
"""The same on a machine with faults."""


def command(
    num_processes: int, arguments: Sequence[str], program: Sequence[str] = PROGRAM
) -> list[str]:
    """The command line of a run."""
    if num_processes == 1:
        return [sys.executable, *program, *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    # A port of its own choice: another run of the machine may hold the usual one.
    return [*launcher, str(num_processes), "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
            *program, *arguments]  # fmt: skip


def start(
    num_processes: int,
    arguments: Sequence[str],
    log: Path,
    *,
    program: Sequence[str] = PROGRAM,
    **variables: str,
) -> subprocess.Popen[bytes]:
    """Start a run whose output goes to `log`, with more `variables` in its environment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    with log.open("ab") as file:
        return subprocess.Popen(
            command(num_processes, arguments, program),
            cwd=REPOSITORY,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def run(
    num_processes: int,
    arguments: Sequence[str],
    log: Path,
    *,
    status: int = 0,
    program: Sequence[str] = PROGRAM,
    **variables: str,
) -> str:
    """Run to the end, check the exit status, and return the output."""
    process = start(num_processes, arguments, log, program=program, **variables)
    try:
        given = process.wait(timeout=240)
    finally:
        end(process)
    text = log.read_text()
    if given != status:
        message = f"exit status {given}, wanted {status}:\n{text[-4000:]}"
        raise RankFailed(message, log)
    return text


def wait_for_step(
    folder: Path, step: int, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 120
) -> None:
    """Wait until the run has written the metrics of `step`."""
    deadline = time.monotonic() + timeout_s
    while not any(line["step"] >= step for line in steps_of(folder)):
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.02)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that tell of steps."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    complete = text[: text.rfind("\n") + 1].splitlines()
    return [line for line in map(json.loads, complete) if "event" not in line]


def events_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that tell of something else than steps."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "event" in line]


def books_of(folder: Path) -> dict[str, Any]:
    """The books that a run has left, which add up."""
    books = json.loads((folder / "books.json").read_text())
    booked_ns = sum(sum(ns.values()) for _, _, ns in books["entries"])
    assert booked_ns == books["until_ns"] - books["first_start_ns"]
    return books


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes that torchrun started, and that have not ended."""
    found = []
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.NoSuchProcess):
            if {"train.py", "torchtitan_lite", "tests.faulty_trainer"} & set(child.cmdline()):
                found.append(child)
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that a run that was started here is over, its ranks included."""
    if process.poll() is None:
        kill(ranks_of(process))
        process.kill()
        process.wait()


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill these; when the first is gone, others may end by themselves."""
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's files, by file and name."""
    return {
        f"{file.name}:{name}": tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
