"""The small loop that starts the peers' processes again when one has died.

A group starts and dies as a whole. It is looked at every few milliseconds and started again
without delay, so that a peer waits for nothing but itself.
"""

import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.processes import CHECKOUT, THREADS, ChildFailed

_LOOK_S = 0.005
_MOST_STARTS = 40
"""Of a group: many more than there are faults."""


class Group:
    """Processes that are ranks of one torch.distributed world."""

    def __init__(
        self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], folder: Path
    ) -> None:
        self._commands, self._environment = commands, environment
        self.folder = folder
        self.num_starts = 0
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all."""
        self.num_starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._processes = []
        for rank, command in enumerate(self._commands):
            variables = {
                "OMP_NUM_THREADS": str(THREADS),
                "PYTHONUNBUFFERED": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(self._commands)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            with self._log(rank).open("wb") as output:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=CHECKOUT,
                        env={**os.environ, **variables, **self._environment},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    @property
    def has_died(self) -> bool:
        """Whether one of them has."""
        return any(process.poll() is not None for process in self._processes)

    @property
    def has_failed(self) -> bool:
        """Whether one of them has ended with an error."""
        return any(process.poll() not in (None, 0) for process in self._processes)

    def end(self) -> None:
        """Kill what lives."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def living(self) -> list[psutil.Process]:
        found = []
        for process in list(self._processes):
            with suppress(psutil.NoSuchProcess):
                if process.poll() is None:
                    found.append(psutil.Process(process.pid))
        return found

    def log(self) -> str:
        """Of the first rank's newest start."""
        with suppress(OSError):
            return self._log(0).read_text(errors="replace")
        return ""

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.start_{self.num_starts}.log"


class Supervisor:
    """Keeps groups up, in a thread. A context manager."""

    def __init__(self, groups: Sequence[Group], *, restarts: bool = True) -> None:
        """`restarts`: else a process that fails is an error, and one may end."""
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
        """Raises ChildFailed where a group has died and is not started again."""
        if self._failed is not None:
            raise ChildFailed(f"It died; the end of its log:\n{self._failed.log()[-3000:]}")

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            for group in self._groups:
                if group.has_failed or (self._restarts and group.has_died):
                    if not self._restarts or group.num_starts >= _MOST_STARTS:
                        self._failed = group
                        return
                    group.end()
                    group.start()
