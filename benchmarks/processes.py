"""Starting the processes that are measured, each with the same environment.

Invariant: every process computes with one thread, which is set here and not left to the machine.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

CHECKOUT = Path(__file__).parent.parent
THREADS = 1
TRAINER = ("train.py",)
"""The product's own entry; a module of ours is `("-m", NAME)`."""
TRAINER_ARGUMENTS = (
    *("--config", "configs/llama3_debug.toml"),
    *("--job.device", "cpu"),
    # One microbatch a step on any number of processes.
    *("--training.global_batch_size", "-1"),
    # What the hand-written loop does not do. The console and metrics.jsonl stay on.
    *("--checkpoint.enable", "false"),
    *("--validation.enable", "false"),
    *("--metrics.enable_tensorboard", "false"),
)
"""What the trainer is asked for in every comparison."""

_TAIL_LINES = 15
_POLL_S = 0.005


class ChildFailed(Exception):
    """A measured process did not do its work."""


def start(
    program: Sequence[str], arguments: Sequence[str], num_processes: int, log: Path
) -> subprocess.Popen[bytes]:
    """Start `program`, by torchrun when it is more than one process; its output goes to `log`."""
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(num_processes)]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    with log.open("wb") as output:
        return subprocess.Popen(
            [*launcher, *program, *arguments],
            cwd=CHECKOUT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def run(program: Sequence[str], arguments: Sequence[str], num_processes: int, log: Path) -> None:
    """Start `program` and wait for its end. Raises ChildFailed with the end of its log."""
    with started(program, arguments, num_processes, log) as process:
        if process.wait() != 0:
            raise _failure(program, log)


@contextmanager
def started(
    program: Sequence[str], arguments: Sequence[str], num_processes: int, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """`program` as long as it is looked at; it is ended with all that it started."""
    process = start(program, arguments, num_processes, log)
    try:
        yield process
    finally:
        _end(process)


def first_line(
    program: Sequence[str], arguments: Sequence[str], num_processes: int, log: Path, path: Path
) -> tuple[float, str]:
    """Seconds from the start of `program` until it has written a line to `path`, and that line.
    It is ended there, with all that it started.

    Raises ChildFailed when it ends without a line.
    """
    started_s = time.perf_counter()
    with started(program, arguments, num_processes, log) as process:
        while True:
            ended = process.poll() is not None
            line, newline, _ = _text(path).partition("\n")
            if newline:
                return time.perf_counter() - started_s, line
            if ended:
                raise _failure(program, log)
            time.sleep(_POLL_S)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Workers of torchrun lead sessions of their own, so they are found as children."""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(family)
    process.wait()


def _failure(program: Sequence[str], log: Path) -> ChildFailed:
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return ChildFailed("\n".join([f"{' '.join(program)} failed; the end of its log:", *tail]))
