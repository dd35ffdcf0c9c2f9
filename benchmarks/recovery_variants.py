"""Variants of a run with faults: ours under its launcher, and the peers under a supervisor.

All variants train the same model on the same samples with the same hyperparameters, and each of
their processes writes the lines of metrics.jsonl.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.processes import ChildFailed, Group, Supervisor, free_port, start, tail
from benchmarks.rank_recovery import is_warm
from benchmarks.rank_recovery import ranks as rank_pids
from tests.chaos.job_view import FaultNotApplicable, JobView, processes_using

NUM_REPLICAS = 2
JOIN_TIMEOUT_MS = 1000
"""Join timeout of torchft's lighthouse with torchft's trainer, as its heartbeat timeout."""
_LIGHTHOUSE = "torchtitan_lite.fault_tolerance.supervision.launcher.torchft_lighthouse"
_GRACE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training of all variants."""

    flavor: str
    seq_len: int
    local_batch_size: int
    checkpoint_interval: int = 10
    """Interval of the peers, in steps."""

    @property
    def name(self) -> str:
        return f"{self.flavor}, {NUM_REPLICAS} x {self.local_batch_size} x {self.seq_len} tokens"

    @property
    def tokens_per_step(self) -> int:
        return NUM_REPLICAS * self.local_batch_size * self.seq_len

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of the trainer."""
        endless = 1_000_000
        return [
            *("--config", "configs/llama3_debug.toml"),
            *("--job.device", "cpu"),
            *("--model.flavor", self.flavor),
            *("--training.seq_len", str(self.seq_len)),
            *("--training.local_batch_size", str(self.local_batch_size)),
            *("--training.global_batch_size", str(self.local_batch_size * NUM_REPLICAS)),
            *("--training.steps", str(endless)),
            *("--lr_scheduler.total_steps", str(endless)),
            *("--lr_scheduler.warmup_steps", "0"),
            # A large one would amplify rounding differences.
            *("--optimizer.lr", "1e-5"),
            *("--validation.enable", "false"),
            *("--metrics.enable_tensorboard", "false"),
        ]


class Running(Protocol):
    """A running variant."""

    @property
    def metrics(self) -> Sequence[Path]:
        """The metrics.jsonl of each replica."""
        ...

    def ranks(self, replica: int) -> list[psutil.Process]:
        """The running processes of a replica."""
        ...

    def log(self, replica: int) -> str:
        """The output of the latest generation of a replica."""
        ...

    def lighthouse(self) -> psutil.Process:
        """The lighthouse. Raises ChildFailed if there is none."""
        ...

    def check(self) -> None:
        """Raise ChildFailed if the run cannot continue."""
        ...

    def has_spares(self) -> bool:
        """Whether all spares have imported everything, if there are any."""
        ...


class Variant(Protocol):
    """A system that trains under faults."""

    @property
    def name(self) -> str: ...

    def running(self, workload: Workload, folder: Path) -> AbstractContextManager[Running]:
        """Run it until the end of the block."""
        ...


@dataclass(frozen=True)
class Ours:
    """The product, under its launcher with one of its lighthouses."""

    lighthouse: str
    num_spares: int = 0
    """Per replica."""

    @property
    def name(self) -> str:
        return f"ours, {self.lighthouse} lighthouse{', spares' if self.num_spares else ''}"

    @contextmanager
    def running(self, workload: Workload, folder: Path) -> Iterator[Running]:
        arguments = [
            *workload.arguments,
            *("--job.dump_folder", str(folder / "run")),
            # Checkpoints are rare; the snapshots that a restart uses are those of the defaults.
            *("--checkpoint.interval", "500"),
            *("--checkpoint.enable_first_step_checkpoint", "false"),
        ]
        command = [sys.executable, "-m", "torchtitan_lite", "launch", f"--replicas={NUM_REPLICAS}"]
        command += ["--lighthouse", self.lighthouse, "--max-restarts=1000"]
        command += [f"--spares={self.num_spares}", "--", *arguments]
        log = folder / "launch.log"
        process = start(command, log)
        try:
            yield _UnderLauncher(process, folder / "run", log, self.num_spares)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            _end(process, folder)


class _UnderLauncher:
    def __init__(
        self, process: subprocess.Popen[bytes], folder: Path, log: Path, num_spares: int
    ) -> None:
        self._process, self._log, self._num_spares = process, log, num_spares
        self._job = JobView(process.pid, folder, NUM_REPLICAS)
        self.metrics = [
            folder / f"replica_{number:03d}" / "metrics.jsonl" for number in range(NUM_REPLICAS)
        ]

    def ranks(self, replica: int) -> list[psutil.Process]:
        try:
            return self._job.ranks(replica)
        except FaultNotApplicable:
            return []

    def log(self, replica: int) -> str:
        return self._job.log(replica)

    def lighthouse(self) -> psutil.Process:
        words = ("coordinator", _LIGHTHOUSE)
        for process in self._job.launcher.children():
            with suppress(psutil.NoSuchProcess):
                if any(word in process.cmdline() for word in words):
                    return process
        raise ChildFailed("The launcher has no lighthouse.")

    def check(self) -> None:
        if self._process.poll() is not None:
            raise ChildFailed(f"The launcher ended:\n{tail(self._log)}")

    def has_spares(self) -> bool:
        if not self._num_spares:
            return True
        with suppress(FaultNotApplicable, psutil.NoSuchProcess):
            trainers = [self._job.trainers(replica) for replica in range(NUM_REPLICAS)]
            return all(_are_warm(processes, 1 + self._num_spares) for processes in trainers)
        return False


@dataclass(frozen=True)
class Spares:
    """The product without replicas: a spare replaces a rank that dies."""

    name: str = "ours, spares"

    @contextmanager
    def running(self, workload: Workload, folder: Path) -> Iterator[Running]:
        arguments = [
            *workload.arguments,
            *("--job.dump_folder", str(folder / "run")),
            *("--parallelism.data_parallel_replicate_degree", str(NUM_REPLICAS)),
            *("--parallelism.data_parallel_shard_degree", "1"),
            *("--checkpoint.interval", "500", "--checkpoint.ram_interval", "1"),
            *("--checkpoint.enable_first_step_checkpoint", "false"),
        ]
        command = [sys.executable, "-m", "torchtitan_lite", "train", f"--nproc={NUM_REPLICAS}"]
        log = folder / "train.log"
        process = start([*command, "--spares=1", *arguments], log)
        try:
            yield _WithSpares(process, folder / "run", log)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            _end(process, folder)


class _WithSpares:
    def __init__(self, process: subprocess.Popen[bytes], folder: Path, log: Path) -> None:
        self._process, self._log = process, log
        self.metrics = [folder / "metrics.jsonl"]

    def ranks(self, replica: int) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [psutil.Process(pid) for _, pid in sorted(rank_pids(self._process).items())]
        return []

    def log(self, replica: int) -> str:
        return tail(self._log)

    def lighthouse(self) -> psutil.Process:
        raise ChildFailed("There is no lighthouse.")

    def check(self) -> None:
        if self._process.poll() is not None:
            raise ChildFailed(f"The agent ended:\n{tail(self._log)}")

    def has_spares(self) -> bool:
        return _are_warm(psutil.Process(self._process.pid).children(), NUM_REPLICAS + 1)


@dataclass(frozen=True)
class Torchft:
    """A trainer written directly on torchft, and torchft's lighthouse."""

    inputs: Path
    """See `baseline_loop.write_replica_batches`."""
    name: str = "torchft's trainer"

    @contextmanager
    def running(self, workload: Workload, folder: Path) -> Iterator[Running]:
        port = free_port()
        lighthouse = ["-m", _LIGHTHOUSE, "--bind", f"127.0.0.1:{port}"]
        lighthouse += ["--join-timeout-ms", str(JOIN_TIMEOUT_MS)]
        environment = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
        groups = [Group([lighthouse], {}, folder / "lighthouse")]
        for replica in range(NUM_REPLICAS):
            own = folder / f"replica_{replica:03d}"
            trainer = ["-m", "benchmarks.torchft_trainer"]
            trainer += ["--inputs", str(self.inputs), "--folder", str(folder)]
            trainer += ["--replica", str(replica), "--replicas", str(NUM_REPLICAS)]
            trainer += ["--checkpoint-interval", str(workload.checkpoint_interval)]
            groups.append(Group([trainer], environment, own))
        with Supervisor(groups) as supervisor:
            yield _Supervised(supervisor, groups[1:], groups[0])


@dataclass(frozen=True)
class CheckpointRestart:
    """The product's trainer as plain data parallelism, restarted as a whole from a checkpoint."""

    name: str = "restart from checkpoint"

    @contextmanager
    def running(self, workload: Workload, folder: Path) -> Iterator[Running]:
        arguments = [
            *workload.arguments,
            *("--job.dump_folder", str(folder / "all")),
            *("--parallelism.data_parallel_replicate_degree", str(NUM_REPLICAS)),
            *("--parallelism.data_parallel_shard_degree", "1"),
            *("--checkpoint.interval", str(workload.checkpoint_interval)),
            *("--checkpoint.ram_interval", "0"),
        ]
        group = Group([["train.py", *arguments]] * NUM_REPLICAS, {}, folder / "all")
        with Supervisor([group]) as supervisor:
            yield _Supervised(supervisor, [group], None)
        _end(None, folder)


class _Supervised:
    def __init__(
        self, supervisor: Supervisor, groups: Sequence[Group], lighthouse: Group | None
    ) -> None:
        self._supervisor, self._groups, self._lighthouse = supervisor, groups, lighthouse
        self.metrics = [group.folder / "metrics.jsonl" for group in groups]

    def ranks(self, replica: int) -> list[psutil.Process]:
        return self._groups[replica].living()

    def log(self, replica: int) -> str:
        return self._groups[replica].log()

    def lighthouse(self) -> psutil.Process:
        if self._lighthouse is None or not self._lighthouse.living():
            raise ChildFailed("There is no lighthouse.")
        return self._lighthouse.living()[0]

    def check(self) -> None:
        self._supervisor.check()

    def has_spares(self) -> bool:
        return True


def _are_warm(processes: Sequence[psutil.Process], num_processes: int) -> bool:
    """Whether there are so many processes, and those that are no ranks wait."""
    return len(processes) == num_processes and all(map(is_warm, processes))


def _end(process: subprocess.Popen[bytes] | None, folder: Path) -> None:
    """Make sure that no process is left, including checkpoint writers."""
    if process is not None and process.poll() is None:
        process.kill()
        process.wait()
    deadline_s = time.monotonic() + _GRACE_S
    while left := processes_using(folder):
        if time.monotonic() >= deadline_s:
            for remaining in left:
                with suppress(psutil.NoSuchProcess):
                    remaining.kill()
        time.sleep(0.05)
