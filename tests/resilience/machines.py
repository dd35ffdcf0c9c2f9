"""Machines emulated on this one: each has its own /dev/shm, in a mount namespace. Needs root."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.harness import launch
from tests.harness.ranks import REPOSITORY

_HOLDER = "mount -t tmpfs none /dev/shm && echo ready && exec sleep infinity"


def unavailable_reason() -> str | None:
    """Return why this process cannot emulate machines; None if it can."""
    if os.geteuid() != 0:
        return "mount namespaces need root"
    for tool in ("unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    try:
        Machine().lose()
    except OSError as error:
        return f"mount namespaces cannot be made: {error}"
    return None


class Machine:
    """A machine: its shared memory lives until `lose`."""

    def __init__(self) -> None:
        """Raises OSError."""
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _HOLDER]
        self._holder = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != b"ready\n":
            message = self._holder.stderr.read().decode()
            self.lose()
            raise OSError(message.strip())

    @property
    def shared_memory(self) -> Path:
        """The machine's /dev/shm, as this process sees it."""
        return Path(f"/proc/{self._holder.pid}/root/dev/shm")

    def processes(self) -> list[int]:
        """Return the processes of the machine, background processes included."""
        own = os.readlink(f"/proc/{self._holder.pid}/ns/mnt")
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self._holder.pid:
                try:
                    if os.readlink(entry / "ns/mnt") == own:
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def command(self) -> list[str]:
        """Return the start of a command line that runs the rest on this machine."""
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", f"--wdns={Path.cwd()}"]

    def kill(self) -> None:
        """Kill all processes; the shared memory stays."""
        while processes := self.processes():
            for process in processes:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)

    def lose(self) -> None:
        """Kill all processes, and lose the shared memory."""
        if self._holder.poll() is None:
            self.kill()
            self._holder.kill()
        self._holder.wait()
        for pipe in (self._holder.stdout, self._holder.stderr):
            if pipe is not None:
                pipe.close()


class MachinesRun:
    """A run with so many ranks on each of several machines. A context manager."""

    def __init__(self, folder: Path, counts: Sequence[int], *arguments: str) -> None:
        self.folder, self.counts = folder, list(counts)
        self.arguments = (*arguments, f"--job.dump_folder={folder}")
        self.machines = [Machine() for _ in counts]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._generation = 0

    def __enter__(self) -> "MachinesRun":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for machine in self.machines:
            machine.lose()
        self.wait()

    @property
    def log(self) -> Path:
        """Output of the ranks of this generation."""
        return self.folder.with_name(f"{self.folder.name}-{self._generation}.log")

    def start(self, *arguments: str, **variables: str) -> None:
        """Start all ranks, as a launcher on each machine does."""
        self._generation += 1
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        rank = 0
        for machine, count in zip(self.machines, self.counts, strict=True):
            for local in range(count):
                environment = {
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(sum(self.counts)),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(count),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                    **variables,
                }
                with self.log.open("ab") as log:
                    self.processes.append(
                        subprocess.Popen(
                            [*machine.command(), sys.executable, "train.py",
                             *self.arguments, *arguments],
                            cwd=REPOSITORY,
                            env=environment,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )  # fmt: skip
                rank += 1

    def wait_for_step(self, step: int) -> None:
        """Block until the run has written the metrics of `step`."""
        launch.wait_for_step(self.folder, step, self.processes[0], self.log)

    def wait(self) -> list[int]:
        """Wait until all ranks have ended, and return their exit statuses."""
        statuses = [process.wait(240) for process in self.processes]
        self.processes = []
        return statuses

    def kill(self) -> None:
        """Kill all processes of all machines, whose shared memory stays."""
        for machine in self.machines:
            machine.kill()
        self.wait()

    def replace(self, index: int) -> None:
        """Lose a machine, and put an empty one in its place."""
        self.machines[index].lose()
        self.machines[index] = Machine()

    def regions(self, index: int) -> dict[str, Path]:
        """Return the snapshot files on a machine, by name."""
        return {path.name: path for path in self.machines[index].shared_memory.rglob("*.snapshots")}
