"""A run on several machines: each a namespace with a network, a host name and shared memory of its
own."""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.harness import launch
from tests.harness.ranks import REPOSITORY
from tests.resilience.network.namespaces import Network

PORT = 29520
STEP_S = 0.3
"""Added to each step, so that faults meet a running training."""
ARGUMENTS: tuple[str, ...] = (
    *launch.SMALL,
    "--training.dtype=float64",
    "--checkpoint.enable=true",
    "--checkpoint.interval=5",
    "--checkpoint.ram_interval=1",
    "--metrics.log_freq=1",
    "--experimental.custom_import=tests.resilience.rank_faults",
)
BUDDIES: tuple[str, ...] = (
    "--checkpoint.interval=100000",
    "--checkpoint.enable_first_step_checkpoint=false",
    "--checkpoint.buddy_interval=2",
)
"""Arguments of a run that has its state in memory only, and copies of it on another machine."""
_COORDINATOR = "coordinator"
_WAIT_S = 120.0
_OWN_SHARED_MEMORY = 'mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'


@contextmanager
def machines(
    folder: Path,
    *names: str,
    steps: int,
    num_training: int = 2,
    num_replicas: int = 1,
    num_ranks: int = 1,
    is_v6: bool = False,
) -> Iterator["Machines"]:
    """Start a coordinator for machines `names`, of which the first ones train. On exit, all
    processes and namespaces are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    with Network([_COORDINATOR, *names], is_v6=is_v6) as network:
        for name in () if is_v6 else names:
            # Debian's default, which no address may follow.
            network.set_hosts(name, f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        run = Machines(folder, network, steps, num_training, num_replicas, num_ranks)
        try:
            run.start_coordinator()
            yield run
        finally:
            run.remove()


class Machines:
    """A run, as a user starts it."""

    def __init__(
        self,
        folder: Path,
        network: Network,
        steps: int,
        num_training: int = 2,
        num_replicas: int = 1,
        num_ranks: int = 1,
    ) -> None:
        self.folder, self.network, self.steps = folder, network, steps
        self._num_training, self._num_replicas = num_training, num_replicas
        self._num_ranks = num_ranks
        self.dump_folder = folder / "run"
        # That of the first replica.
        self.output = self.dump_folder / "replica_000" if num_replicas > 1 else self.dump_folder
        self.token = secrets.token_hex(16)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.coordinator: subprocess.Popen[bytes] | None = None
        self._all: list[subprocess.Popen[bytes]] = []

    @property
    def endpoint(self) -> str:
        return self.network.endpoint(_COORDINATOR, PORT)

    def start_coordinator(self) -> None:
        """Start the coordinator, or start it again."""
        self.coordinator = self._start(_COORDINATOR, ["coordinator", f"--bind={self.endpoint}"])

    def start(self, name: str, *more: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start the agent of a machine, with more arguments and variables."""
        command = [
            *("train", f"--nproc={self._num_ranks}", f"--nnodes={self._num_training}"),
            *(f"--rdzv-endpoint={self.endpoint}", f"--replicas={self._num_replicas}"),
            *(*ARGUMENTS, f"--job.dump_folder={self.dump_folder}"),
            f"--training.steps={self.steps}",
            *more,
        ]
        self.agents[name] = self._start(name, command, **variables)
        return self.agents[name]

    def train(self, *names: str, more: tuple[str, ...] = (), **variables: str) -> None:
        """Start machines, wait until those that train have taken some steps, and the others are
        warm."""
        for name in names[: self._num_training]:
            self.start(name, *more, **variables)
            if self._num_replicas > 1:
                # So that it has the place of its turn.
                address = f"{self.network.address(name)} ("
                self.wait(lambda address=address: address in self.text(_COORDINATOR))
        self.wait_for_generation(1)
        for name in names[self._num_training :]:
            self.start(name, *more, **variables)
        self.wait(lambda: all(self.rank(name) for name in names))
        self.wait_for_step(3)

    def _start(self, name: str, words: list[str], **variables: str) -> subprocess.Popen[bytes]:
        prefix = [*self.network.command(name), "sh", "-c", _OWN_SHARED_MEMORY, "sh"]
        given = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "RANK_FAULTS": f"slow={STEP_S}",
            "TORCHTITAN_LITE_TOKEN": self.token,
        }
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "torchtitan_lite", *words],
                cwd=REPOSITORY,
                env={**os.environ, **given, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._all.append(process)
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def text(self, name: str) -> str:
        return self.log(name).read_text()

    def processes(self, name: str) -> set[int]:
        """Return the processes of a machine, on standby or training, that have imported
        everything."""
        found = set()
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.agents[name].pid).children():
                # It starts a thread for the agent's orders when it is warm.
                if "train" in child.cmdline() and child.num_threads() > 1:
                    found.add(child.pid)
        return found

    def rank(self, name: str) -> int | None:
        """Return the process of a machine that has a single one; None before it is warm."""
        return next(iter(self.processes(name)), None)

    def writers(self, name: str) -> list[psutil.Process]:
        """Return the checkpoint writers of a machine."""
        return [process for process, _ in self._writers_and_ranks(name)]

    def ranks_with_writers(self, name: str) -> set[int]:
        """Return the ranks of a machine that have checkpoint writers."""
        return {rank for _, rank in self._writers_and_ranks(name)}

    def _writers_and_ranks(self, name: str) -> Iterator[tuple[psutil.Process, int]]:
        for process in psutil.Process(self.agents[name].pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                words = " ".join(process.cmdline())
                if match := re.search(r"rank-(\d+)\.snapshots", words):
                    yield process, int(match[1])

    def kill(self, name: str) -> None:
        """Kill all processes of a machine."""
        _kill(self.agents.pop(name))

    def last_step(self) -> int:
        """Return the newest step in metrics.jsonl."""
        return max((line["step"] for line in launch.steps_of(self.output)), default=0)

    def resumes(self) -> list[int]:
        """Return the steps at which the run has resumed."""
        events = launch.events_of(self.output)
        return [event["step"] for event in events if event["event"] == "resume"]

    def num_records(self) -> int:
        """Return the number of records of steps, repeated ones included."""
        return len(launch.steps_of(self.output))

    def newest_record(self) -> int:
        """Return the step that was recorded last."""
        return launch.steps_of(self.output)[-1]["step"]

    def wait_for_step(self, step: int) -> None:
        """Block until the run has taken `step`."""
        self.wait(lambda: self.last_step() >= step)

    def wait(self, holds: Callable[[], object], timeout_s: float = _WAIT_S) -> float:
        """Block until the condition holds, and return the elapsed seconds. Fails if an agent
        ends."""
        began_s = time.monotonic()
        while not holds():
            ended = {
                name: one.poll() for name, one in self.agents.items() if one.poll() is not None
            }
            assert not ended, f"{ended}\n{self.report()}"
            assert time.monotonic() < began_s + timeout_s, self.report()
            time.sleep(0.02)
        return time.monotonic() - began_s

    def wait_for_generation(self, number: int) -> float:
        """Block until the coordinator has started generation `number`, and return the seconds."""
        return self.wait(lambda: f"running, generation {number}," in self.text(_COORDINATOR))

    def finish(self) -> list[float]:
        """Wait for the end of the run, and return the losses of all its steps."""
        for name in self.agents:
            assert self.exit_status(name) == 0, f"{name}\n{self.report()}"
        return losses(self.dump_folder, self.steps)

    def exit_status(self, name: str) -> int | None:
        """Wait for the end of an agent, and return its exit status; None if it does not end."""
        with suppress(subprocess.TimeoutExpired):
            return self.agents[name].wait(_WAIT_S)
        return None

    def report(self) -> str:
        """Return the ends of all logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.stem}\n{log.read_text()[-2500:]}" for log in logs)

    def stop_coordinator(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the coordinator; wait for its end if it kills."""
        assert self.coordinator is not None
        self.coordinator.send_signal(number)
        if number == signal.SIGKILL:
            self.coordinator.wait()

    def remove(self) -> None:
        """Kill all processes."""
        for process in self._all:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants."""
    with suppress(psutil.NoSuchProcess):
        own = psutil.Process(process.pid)
        launch.kill([own, *own.children(recursive=True)])
    process.wait()


def losses(output: Path, steps: int) -> list[float]:
    """Return the loss of each step, the last record of one that was repeated. Each may have been
    taken by one of the replicas alone."""
    folders = [path.parent for path in sorted(output.rglob("metrics.jsonl"))]
    found = {line["step"]: line["loss"] for path in folders for line in launch.steps_of(path)}
    assert sorted(found) == list(range(1, steps + 1)), sorted(found)
    return [found[step] for step in sorted(found)]


def undisturbed_losses(folder: Path, steps: int, *more: str, num_ranks: int = 2) -> list[float]:
    """Return the losses of a run without faults, of `num_ranks` ranks on one machine."""
    command = [sys.executable, "-m", "torchtitan_lite", "train", f"--nproc={num_ranks}"]
    command += [*ARGUMENTS, *more]
    done = subprocess.run(
        [*command, f"--job.dump_folder={folder}", f"--training.steps={steps}"],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return losses(folder, steps)
