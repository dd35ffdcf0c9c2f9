"""The processes, files and metrics of a job under the launcher, as fault injection sees them.

Invariant: a `JobView` names only descendants of the launcher that it was created for.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from torchtitan_lite.checkpoint.history.identity import replica_run_id
from torchtitan_lite.checkpoint.shared_memory import SHARED_MEMORY, region_files
from torchtitan_lite.checkpoint.storage import parse_step_name
from torchtitan_lite.core.outputs import METRICS, replica_folder
from torchtitan_lite.core.rank.processes import is_writer
from torchtitan_lite.fault_tolerance.supervision.logs import Tail, is_step

_Result = TypeVar("_Result")
_POLL_S = 0.02
_REPLICA_ID = "--fault_tolerance.replica_id"


class FaultNotApplicable(Exception):
    """The target of a fault does not exist, or the state that the fault needs did not occur."""


class JobView:
    """The current processes and files of a job."""

    def __init__(self, launcher: int, folder: Path, num_replicas: int) -> None:
        """`launcher` is the process id of `torchtitan-lite launch`, `folder` the dump folder."""
        self._launcher = psutil.Process(launcher)
        self.folder = folder
        self.num_replicas = num_replicas

    @property
    def launcher(self) -> psutil.Process:
        return self._launcher

    def lighthouse(self) -> psutil.Process:
        return self._one(lambda words: "coordinator" in words)

    def departure_notifier(self) -> psutil.Process:
        return self._one(
            lambda words: "torchtitan_lite.fault_tolerance.supervision.launcher.departures" in words
        )

    def ranks(self, replica: int) -> list[psutil.Process]:
        """Return the running trainers of a replica, without spares, in no particular order."""
        return [one for one in self.trainers(replica) if _has_rank(one)]

    def trainers(self, replica: int) -> list[psutil.Process]:
        """Return the ranks and the spares of a replica. Raises FaultNotApplicable if it has
        none."""
        processes = self._launcher.children()
        trainers = self._matching(processes, lambda words: _replica_of(words) == replica)
        if not trainers:
            raise FaultNotApplicable(f"replica {replica} has no process")
        return trainers

    def writers(self, replica: int) -> list[psutil.Process]:
        """Return the checkpoint writers of a replica."""
        return self._matching(self.replica_processes(replica), is_writer)

    def replica_processes(self, replica: int) -> list[psutil.Process]:
        """Return the processes of a replica and all their descendants."""
        processes: list[psutil.Process] = []
        for trainer in self.trainers(replica):
            with suppress(psutil.NoSuchProcess):
                processes += [trainer, *trainer.children(recursive=True)]
        return processes

    def snapshots(self, replica: int) -> list[Path]:
        """Return the shared-memory files that hold a replica's snapshots."""
        with suppress(OSError):
            run_id = replica_run_id((self.folder / "run_id").read_text().strip(), replica)
            user = next(SHARED_MEMORY.glob(f"*/{run_id}"), None)
            if user is not None:
                return list(region_files(user).values())
        return []

    def checkpoints(self) -> list[Path]:
        """Return the folders of the committed checkpoints, oldest first."""
        root = self.folder / "checkpoint"
        paths = [path for path in root.glob("step-*") if parse_step_name(path.name) is not None]
        return sorted(paths, key=lambda path: parse_step_name(path.name) or 0)

    def log(self, replica: int, rank: int = 0) -> str:
        """Return the output of a rank in the replica's newest generation."""
        generations = sorted(
            (self.folder / "launch_logs" / f"replica_{replica:03d}").glob("generation_*")
        )
        with suppress(OSError, IndexError):
            return (generations[-1] / f"rank_{rank}.log").read_text(errors="replace")
        return ""

    def wait_until(
        self, condition: Callable[[], _Result], description: str, timeout_s: float
    ) -> _Result:
        """Block until `condition` returns a true value, and return it. Raises
        FaultNotApplicable after the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with suppress(psutil.NoSuchProcess, FaultNotApplicable):
                result = condition()
                if result:
                    return result
            if time.monotonic() >= deadline_s:
                raise FaultNotApplicable(f"{description}: not observed within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def _one(self, matches: Callable[[list[str]], Any]) -> psutil.Process:
        processes = self._matching(self._launcher.children(recursive=True), matches)
        if not processes:
            raise FaultNotApplicable("the process does not exist")
        return processes[0]

    def _matching(
        self, processes: Iterable[psutil.Process], matches: Callable[[list[str]], Any]
    ) -> list[psutil.Process]:
        """Return the running processes whose command lines match."""
        running = []
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE and matches(process.cmdline()):
                    running.append(process)
        return running


@dataclass(frozen=True, kw_only=True)
class FaultTarget:
    """The replica that a fault is injected into."""

    job: JobView
    replica: int
    rng: random.Random
    """Source of all further random choices."""


@dataclass(frozen=True, kw_only=True)
class CommittedStep:
    """A committed step, as one replica recorded it."""

    replica: int
    step: int
    loss: float
    num_target_tokens: int
    num_replicas: int


class MetricsFollower:
    """Collects the committed steps of all replicas while the job runs.

    It keeps every line ever written, even if a file is replaced later, so that the losses of a step
    that was trained twice can be compared. It reads in its own thread because a fault may block the
    thread that injects it.
    """

    def __init__(self, folder: Path, num_replicas: int) -> None:
        """`folder` is the job.dump_folder of the run. A context manager."""
        self._tails = [
            Tail(replica_folder(folder, number) / METRICS) for number in range(num_replicas)
        ]
        self.steps: list[CommittedStep] = []
        self.failed_steps = [0] * num_replicas
        """Steps that had to be repeated, per replica."""
        self.newest: list[CommittedStep | None] = [None] * num_replicas
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="metrics-follower")

    def __enter__(self) -> "MetricsFollower":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._read_new_lines()

    @property
    def last_step(self) -> int:
        """The highest committed step of any replica."""
        return max((step.step for step in self.newest if step is not None), default=0)

    def _follow(self) -> None:
        while not self._stopped.wait(_POLL_S):
            self._read_new_lines()

    def _read_new_lines(self) -> None:
        for replica, tail in enumerate(self._tails):
            records = list(tail.records())
            self.failed_steps[replica] += sum(
                record.get("event") == "step_failed" for record in records
            )
            for step in committed_steps(replica, records):
                self.steps.append(step)
                self.newest[replica] = step


def committed_steps(replica: int, records: Iterable[dict[str, Any]]) -> Iterator[CommittedStep]:
    """Yield the committed steps among the records of a metrics.jsonl."""
    names = ("step", "loss", "num_target_tokens", "num_replicas")
    for record in records:
        if is_step(record) and not record["skipped"]:
            yield CommittedStep(replica=replica, **{name: record[name] for name in names})


def processes_using(folder: Path) -> list[psutil.Process]:
    """Return all processes whose command line names `folder`, except this one and its ancestors."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}

    def matches(process: psutil.Process) -> bool:
        words: Sequence[str] = process.info["cmdline"] or ()
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        return process.pid not in own and alive and any(str(folder) in word for word in words)

    return [process for process in psutil.process_iter(["cmdline", "status"]) if matches(process)]


def _has_rank(process: psutil.Process) -> bool:
    """Return whether a trainer prints into the log of a rank, which a spare does not."""
    with suppress(OSError):
        return "/rank_" in os.readlink(f"/proc/{process.pid}/fd/1")
    return False


def _replica_of(words: list[str]) -> int | None:
    """Return the replica in the command line of a trainer."""
    if _REPLICA_ID not in words or not {"train.py", "torchtitan_lite"} & set(words):
        return None
    return int(words[words.index(_REPLICA_ID) + 1])
