"""Starts `train.py` as a user does, in real processes, and keeps the logs of failed ones."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from tests.harness.jobs import FIXTURE
from tests.harness.ranks import REPOSITORY, ForkedRun, RankFailed

Process = subprocess.Popen[bytes] | ForkedRun
SMALL: tuple[str, ...] = (
    "--config=configs/llama3_debug.toml",
    f"--training.dataset_path={FIXTURE}",
    "--training.held_out_fraction=0",
    "--validation.enable=false",
    "--validation.sample_tokens=1",
    "--metrics.enable_tensorboard=false",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.global_batch_size=4",
    "--lr_scheduler.total_steps=1000",
    "--job.device=cpu",
)
"""Arguments for the debug config on the text fixture; a step takes milliseconds."""
PROGRAM: tuple[str, ...] = ("train.py",)
FAULTY_PROGRAM: tuple[str, ...] = ("-m", "tests.harness.faulty_trainer")
"""The same with injected faults, which the variable FAULTS names."""


def wait_until(condition: Callable[[], object], timeout_s: float) -> float:
    """Block until the condition holds, and return the elapsed time in seconds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s
        time.sleep(0.005)
    return time.monotonic() - started


def command(
    num_processes: int, arguments: Sequence[str], program: Sequence[str] = PROGRAM
) -> list[str]:
    """Return the command line of a run."""
    if num_processes == 1:
        return [sys.executable, *program, *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    # Port 0: another run on this machine may use the default port.
    return [*launcher, str(num_processes), "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
            *program, *arguments]  # fmt: skip


def start(
    num_processes: int,
    arguments: Sequence[str],
    log: Path,
    *,
    program: Sequence[str] = PROGRAM,
    prefix: Sequence[str] = (),
    as_user: bool = False,
    **variables: str,
) -> Process:
    """Start a run with `variables` added to its environment, and write its output to `log`. A
    command line `prefix` runs the command that follows it. Programs of this repository are forks
    unless `as_user` requires new interpreters and torchrun."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    if program in (PROGRAM, FAULTY_PROGRAM) and not prefix and not as_user:
        # Callers may read it at once.
        log.touch()
        return ForkedRun(num_processes, program, arguments, environment, log)
    with log.open("ab") as file:
        return subprocess.Popen(
            [*prefix, *command(num_processes, arguments, program)],
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
    as_user: bool = False,
    **variables: str,
) -> str:
    """Run until the process exits, check its exit status, and return its output."""
    process = start(num_processes, arguments, log, program=program, as_user=as_user, **variables)
    try:
        actual = process.wait(timeout=240)
    finally:
        end(process)
    text = log.read_text()
    if actual != status:
        message = f"exit status {actual}, expected {status}:\n{text[-4000:]}"
        raise RankFailed(message, log)
    return text


def wait_for_step(
    folder: Path, step: int, process: Process, log: Path, timeout_s: float = 120
) -> None:
    """Block until the run has written the metrics of `step`."""
    deadline = time.monotonic() + timeout_s
    while not any(line["step"] >= step for line in steps_of(folder)):
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.02)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of steps in metrics.jsonl."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    complete = text[: text.rfind("\n") + 1].splitlines()
    return [line for line in map(json.loads, complete) if "event" not in line]


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of events in metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "event" in line]


def time_accounting_of(folder: Path) -> dict[str, Any]:
    """Return the time accounting of a run, after checking that it adds up."""
    accounting = json.loads((folder / "goodput.json").read_text())
    total_ns = sum(sum(ns.values()) for _, _, ns in accounting["entries"])
    assert total_ns == accounting["until_ns"] - accounting["first_start_ns"]
    return accounting


def ranks_of(process: Process) -> list[psutil.Process]:
    """Return the running rank processes that `process` started."""
    ranks = []
    children = psutil.Process(process.pid).children()
    if isinstance(process, ForkedRun):
        return children if process.num_ranks > 1 else []
    for child in children:
        with suppress(psutil.NoSuchProcess):
            if {"train.py", "torchtitan_lite", "tests.harness.faulty_trainer"} & set(
                child.cmdline()
            ):
                ranks.append(child)
    return ranks


def end(process: Process) -> None:
    """Kill a run and its ranks, if it still runs."""
    if process.poll() is None:
        kill(ranks_of(process))
        process.kill()
        process.wait()


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill those of the processes that still run."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def resize_command(folder: Path, num_ranks: int, *arguments: str) -> list[str]:
    """Return the command that requests a resize of the run in `folder`."""
    command = [sys.executable, "-m", "torchtitan_lite", "resize", str(folder)]
    return [*command, f"--nproc={num_ranks}", *arguments]


def resize(folder: Path, num_ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Request a resize as a user does, and wait for its outcome."""
    command = resize_command(folder, num_ranks, *arguments)
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in a checkpoint's files, by file and name."""
    return {
        f"{file.name}:{name}": tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
