"""A fork server: test processes that start in milliseconds.

Importing torch takes most of the time of a small process. The fork server imports it once, and each
process of `FORK_SERVER` is a fork of it. The server runs no other code, so no CUDA context, thread
or process group is copied.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_lite.launcher.processes import die_with_parent
from torchtitan_lite.launcher.supervised import rank_environment

REPOSITORY = Path(__file__).parent.parent
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    ["tests.job", "torch._dynamo", "torchtitan_lite.replica.torchft_manager", "pytest"]
)

_GRACE_S = 30.0
"""Time that ranks have to stop after another rank failed, as with torchrun."""


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
            attempt=0,
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
