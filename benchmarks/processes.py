"""Start, watch and end the processes that are measured, all with the same environment.

Invariant: every process computes with one thread, which is set here and not left to the machine.
"""

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

CHECKOUT = Path(__file__).parent.parent
THREADS = 1
ENVIRONMENT = {"OMP_NUM_THREADS": str(THREADS), "PYTHONDONTWRITEBYTECODE": ""}
"""Of every process. An installed package has its bytecode, so a checkout keeps its own, too."""
TRAINER = ("train.py",)
"""The product's entry point; a module is `("-m", NAME)`."""
TRAINER_ARGUMENTS = (
    *("--config", "configs/llama3_debug.toml"),
    *("--job.device", "cpu"),
    # One microbatch per step on any number of processes.
    *("--training.global_batch_size", "-1"),
    # What the baseline loop does not do. The console and metrics.jsonl stay on.
    *("--checkpoint.enable", "false"),
    *("--validation.enable", "false"),
    *("--metrics.enable_tensorboard", "false"),
)
"""Arguments of the trainer in every comparison with the baseline."""

T = TypeVar("T")
_TAIL_LINES = 15
_POLL_S = 0.005
_MAX_STARTS = 40
"""Maximum starts of a group: many more than there are faults."""


class ChildFailed(Exception):
    """A measured process failed."""


class ChildTimeout(ChildFailed):
    """A measured process did not make the expected progress."""


def worker_command(
    function: Callable[..., object], folder: Path, arguments: Mapping[str, Any]
) -> list[str]:
    """Arguments of Python that run `function` in a worker (see `benchmarks.worker`)."""
    # The name of the module, also if it runs as a program.
    spec = sys.modules[function.__module__].__spec__
    assert spec is not None
    target = f"{spec.name}:{function.__name__}"
    return ["-m", "benchmarks.worker", target, str(folder), json.dumps(arguments)]


def run_ranks(
    function: Callable[..., object],
    arguments: Mapping[str, Any],
    num_processes: int,
    folder: Path,
) -> list[Any]:
    """Call `function` with `arguments` in `num_processes` ranks and return the value of each.

    Arguments and values are plain JSON. Raises ChildFailed if a rank fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run(worker_command(function, folder, arguments), [], num_processes, folder / "log.txt")
    paths = (folder / f"rank_{rank}.json" for rank in range(num_processes))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def run(program: Sequence[str], arguments: Sequence[str], num_processes: int, log: Path) -> None:
    """Run `program` to its end. Raises ChildFailed with the tail of its log."""
    with started(program, arguments, num_processes, log) as process:
        if process.wait() != 0:
            raise _failure(program, log)


@contextmanager
def started(
    program: Sequence[str], arguments: Sequence[str], num_processes: int, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `program` during the block, by torchrun if there are several processes.

    Its output goes to `log`. It and its descendants are killed at the end.
    """
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(num_processes)]
    process = start([*launcher, *program, *arguments], log)
    try:
        yield process
    finally:
        _end(process)


def start(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in the checkout; its output goes to `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def first_line(
    program: Sequence[str], arguments: Sequence[str], num_processes: int, log: Path, path: Path
) -> tuple[float, str]:
    """Start `program` and return the seconds until the first line of `path`, and that line.

    `program` is ended there. Raises ChildFailed if it ends without a line.
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


def wait_for(
    find: Callable[[], T | None],
    what: str,
    *,
    timeout_s: float,
    check: Callable[[], None] | None = None,
    poll_s: float = _POLL_S,
) -> T:
    """Poll `find` until it returns something other than None.

    Calls `check`, which may raise, between polls. Raises ChildTimeout after `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while (outcome := find()) is None:
        if check is not None:
            check()
        if time.monotonic() >= deadline_s:
            raise ChildTimeout(f"No {what} within {timeout_s:g} s.")
        time.sleep(poll_s)
    return outcome


def free_port() -> int:
    """A port at which no process of this machine listens, and that the system gives to no outgoing
    connection."""
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()
    while True:
        port = random.SystemRandom().randrange(10_000, int(limits[0]))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-_TAIL_LINES:])


class Group:
    """Processes that are ranks of one torch.distributed world; they start and end together."""

    def __init__(
        self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], folder: Path
    ) -> None:
        """Each command is the arguments of Python."""
        self._commands, self._environment = commands, environment
        self.folder = folder
        self.num_starts = 0
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all ranks."""
        self.num_starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        world = {
            "PYTHONUNBUFFERED": "1",
            "WORLD_SIZE": str(len(self._commands)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            **self._environment,
        }
        self._processes = [
            start(
                [sys.executable, *command],
                self._log(rank),
                {"RANK": str(rank), "LOCAL_RANK": str(rank), **world},
            )
            for rank, command in enumerate(self._commands)
        ]

    @property
    def has_ended(self) -> bool:
        """Whether a process has ended."""
        return any(process.poll() is not None for process in self._processes)

    @property
    def has_failed(self) -> bool:
        """Whether a process has ended with an error."""
        return any(process.poll() not in (None, 0) for process in self._processes)

    def end(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def living(self) -> list[psutil.Process]:
        """The running processes."""
        processes = []
        for process in list(self._processes):
            with suppress(psutil.NoSuchProcess):
                if process.poll() is None:
                    processes.append(psutil.Process(process.pid))
        return processes

    def log(self) -> str:
        """Output of the first rank since its latest start."""
        with suppress(OSError):
            return self._log(0).read_text(errors="replace")
        return ""

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.start_{self.num_starts}.log"


class Supervisor:
    """Keeps groups running, in a thread. A context manager.

    It polls every few milliseconds and restarts a group without delay, so that its variant waits
    for nothing but itself.
    """

    def __init__(self, groups: Sequence[Group], *, restarts: bool = True) -> None:
        """Without `restarts`, a failing process is an error, and a process may end."""
        self._groups, self._restarts = groups, restarts
        self._ended = threading.Event()
        self._failed: Group | None = None
        self._thread = threading.Thread(target=self._watch, name="supervisor")

    def __enter__(self) -> "Supervisor":
        for group in self._groups:
            group.start()
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()
        for group in self._groups:
            group.end()

    def check(self) -> None:
        """Raise ChildFailed if a group failed and is not restarted."""
        if self._failed is not None:
            raise ChildFailed(f"A process failed; its log ends:\n{self._failed.log()[-3000:]}")

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            for group in self._groups:
                if group.has_failed or (self._restarts and group.has_ended):
                    if not self._restarts or group.num_starts >= _MAX_STARTS:
                        self._failed = group
                        return
                    group.end()
                    group.start()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants: torchrun's workers lead sessions of their own."""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(family)
    process.wait()


def _failure(program: Sequence[str], log: Path) -> ChildFailed:
    return ChildFailed(f"{' '.join(program)} failed; its log ends:\n{tail(log)}")
