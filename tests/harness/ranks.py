"""Processes of tests: forks of one that has imported torch, alone or as the ranks of a pool.

Importing torch takes most of the time of a small process. The fork server imports it once, and each
process of `FORK_SERVER` is a fork of it. The server runs no other code, so no CUDA context, thread
or process group is copied.

A pool sends cases to its workers: a function of a test module, by reference, and its arguments. A
case that fails or hangs closes its pool; the next case starts a new one.
"""

import gc
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import psutil

from torchtitan_lite.core.rank.processes import die_with_parent
from torchtitan_lite.core.rank.supervised import rank_environment

REPOSITORY = Path(__file__).parents[2]
LOGS = REPOSITORY / "test-logs"
"""Logs of a test session; the file `failures` lists those of failed processes."""
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    [
        "tests.harness.jobs",
        "torch._dynamo",
        "torchtitan_lite.fault_tolerance.replica.torchft_manager",
        "pytest",
    ]
)

_GRACE_S = 30.0
"""Time that ranks have to stop after another rank failed, as with torchrun."""


class RankFailed(AssertionError):
    """Failure of a process that a test started; `log` holds its output."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


def record_failure(log: Path) -> None:
    """Add the log of a failed process to the list that CI prints from. A log outside LOGS is copied
    there."""
    LOGS.mkdir(exist_ok=True)
    if LOGS not in log.parents:
        copy = LOGS / f"{log.parent.name}-{log.name}"
        shutil.copy(log, copy)
        log = copy
    with (LOGS / "failures").open("a") as failures:
        failures.write(f"{log}\n")


class ForkedRun:
    """A program in a fork of the server, with the interface of `subprocess.Popen`. With several
    ranks, the process is their parent and replaces torchrun."""

    def __init__(
        self,
        num_ranks: int,
        program: Sequence[str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self.args = [*program, *arguments]
        self.num_ranks = num_ranks
        self._process = FORK_SERVER.Process(
            target=_run_ranks, args=(num_ranks, self.args, dict(environment), str(log))
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def exit_status(function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> int | None:
    """Run `function(*args)` in a separate process and return its exit status: negative after a
    signal, None after the timeout."""
    process = FORK_SERVER.Process(target=function, args=args)
    process.start()
    process.join(timeout_s)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    return status


def run_command(*words: str, folder: Path = REPOSITORY, status: int = 0) -> str:
    """Run `torchtitan-lite WORDS` in `folder`, check the exit status, and return the output."""
    return run_program("-m", "torchtitan_lite", *words, folder=folder, status=status)


def run_program(*words: str, folder: Path = REPOSITORY, status: int = 0) -> str:
    """Run `python WORDS` in `folder`, check the exit status, and return the output. The imports and
    the exit of an interpreter are not tested because the process is a fork."""
    with tempfile.NamedTemporaryFile("r") as output:
        environment = dict(os.environ)
        actual = exit_status(_run_program, words, environment, folder, output.name)
        text = output.read()
    assert actual == status, text
    return text


def send_output_to(path: str) -> None:
    """Append all further output of this process, that of C++ included, to the file at `path`."""
    with open(path, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _run_ranks(
    num_ranks: int, words: Sequence[str], environment: Mapping[str, str], log: str
) -> None:
    if num_ranks == 1:
        _run_program(words, environment, REPOSITORY, log)
        return
    ports = [os.pipe() for _ in range(num_ranks)]
    ranks: set[int] = set()
    for rank, (port, _) in enumerate(ports):
        if pid := os.fork():
            ranks.add(pid)
            continue
        die_with_parent()
        own = rank_environment(
            rank=rank,
            local_rank=rank,
            machine=0,
            num_ranks=num_ranks,
            num_local_ranks=num_ranks,
            store=("127.0.0.1", int(os.read(port, 16))),
            generation=0,
        )
        _run_program(words, {**environment, **own}, REPOSITORY, log)
        os._exit(0)
    # The store has threads, so it is created after the forks.
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, port in ports:
        os.write(port, str(store.port).encode())
    os._exit(_status_of(ranks))


def _run_program(
    words: Sequence[str], environment: Mapping[str, str], folder: Path, output: str
) -> None:
    """Run `python WORDS` in this process, as a new interpreter would."""
    send_output_to(output)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


def _status_of(ranks: set[int]) -> int:
    """Wait for all ranks. Once one has failed, stop the others, and return 1."""
    deadline_s = None
    while ranks:
        pid, status = os.waitpid(-1, 0 if deadline_s is None else os.WNOHANG)
        ranks.discard(pid)
        if pid and status and deadline_s is None:
            deadline_s = time.monotonic() + _GRACE_S
            _send(ranks, signal.SIGTERM)
        elif not pid:
            time.sleep(0.01)
            if deadline_s is not None and time.monotonic() > deadline_s:
                _send(ranks, signal.SIGKILL)
    return 0 if deadline_s is None else 1


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


GLOO_TIMEOUT_S = 120
_MAX_THREADS = 300
"""Each process group that a case leaves behind has threads that poll 100 times per second. A pool
with more threads than this in one of its workers is closed."""


class WorkerPool:
    """`world_size` processes with a common gloo process group."""

    def __init__(
        self, world_size: int, context: ForkServerContext | SpawnContext = FORK_SERVER
    ) -> None:
        """`context` starts the processes. Forks of one server have the same string hash seed."""
        self.world_size = world_size
        self._context = context
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, case: Callable[..., Any], *args: Any, timeout_s: float = 180) -> list[Any]:
        """Run `case(*args)` on every rank and return the results by rank. Raises RankFailed with
        the first traceback."""
        if not self._workers:
            self._start()
        for _, connection in self._workers:
            connection.send((case, args))
        results: dict[int, Any] = {}
        max_threads = 0
        deadline = time.monotonic() + timeout_s
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = sorted(waiting.values())
                self.close()
                message = f"ranks {silent} returned nothing within {timeout_s} s"
                raise RankFailed(message, self._log(silent[0]))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    failed, value, num_threads = connection.recv()
                except EOFError:
                    failed, value, num_threads = True, "the process died", 0
                if failed:
                    self.close()
                    message = f"rank {rank} of {self.world_size} failed:\n{value}"
                    raise RankFailed(message, self._log(rank))
                results[rank] = value
                max_threads = max(max_threads, num_threads)
        if max_threads > _MAX_THREADS:
            self.close()
        return [results[rank] for rank in range(self.world_size)]

    def renew(self) -> None:
        """Start a new world of the same processes: their process groups end, and what libraries
        have derived for operations is kept."""
        if self._workers:
            try:
                self.run(_renew, _new_store())
            except RankFailed:
                # The pool is closed, and the next case starts another one.
                return

    def close(self) -> None:
        """Stop the workers."""
        workers, self._workers = self._workers, []
        for process, connection in workers:
            connection.close()
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()

    def _log(self, rank: int) -> Path:
        # Each process of pytest-xdist has its own pools.
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        return LOGS / f"pool-of-{self.world_size}{worker}" / f"rank-{rank}.log"

    def _start(self) -> None:
        self._log(0).parent.mkdir(parents=True, exist_ok=True)
        store = _new_store()
        for rank in range(self.world_size):
            ours, theirs = self._context.Pipe()
            arguments = (rank, self.world_size, store, str(self._log(rank)), theirs)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def _serve(rank: int, world_size: int, store: str, log: str, connection: Connection) -> None:
    send_output_to(log)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
    )
    import torch

    torch.set_num_threads(1)
    _join_world(store)
    # Exclude imported modules from the garbage collection after each case.
    gc.freeze()
    while True:
        try:
            case, args = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            value = case(*args)
            # The threads of a job's process groups end only when the cycles that hold them are
            # collected.
            gc.collect()
            connection.send((False, value, psutil.Process().num_threads()))
        except BaseException:
            traceback.print_exc()
            connection.send((True, traceback.format_exc(), 0))


def _new_store() -> str:
    return os.path.join(tempfile.mkdtemp(prefix="pool-"), "store")


def _join_world(store: str) -> None:
    import torch.distributed as dist

    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),  # pyright: ignore[reportPrivateImportUsage]
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=timedelta(seconds=GLOO_TIMEOUT_S),
    )


def _renew(store: str) -> None:
    from tests.harness.jobs import forget_meshes
    from torchtitan_lite.distributed.axis_groups import forget_groups

    forget_meshes()
    forget_groups()
    _join_world(store)
