"""A running job under the launcher, its processes by rank, and the diagnoses that it writes."""

import itertools
import json
import os
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.job_view import FaultNotApplicable, JobView, MetricsFollower, processes_using
from tests.diagnosis.rank_side import order_file
from tests.diagnosis.scorer import DiagnosisReader
from tests.diagnosis.slow_writer import ORDERS
from tests.diagnosis.small_model import FLAVOR
from tests.harness.launch import SMALL
from tests.harness.ranks import REPOSITORY
from torchtitan_lite.core.outputs import METRICS, replica_folder
from torchtitan_lite.fault_tolerance.supervision.logs import is_step, records

_ENDLESS = 1_000_000
_READY_S, _EXIT_S = 400.0, 60.0
_POLL_S = 0.05
WITH_DIAGNOSIS = (
    "--fault_tolerance.hang_timeout_s=12",
    "--fault_tolerance.state_check=true",
    "--fault_tolerance.replay_check=true",
    "--anomalies.on_spike=skip",
    "--comm.train_timeout_seconds=20",
)
"""The configuration of docs/fault_tolerance.md, with a time limit for steps of milliseconds."""
_ARGUMENTS = (
    *SMALL[1:],
    "--config=configs/llama3_debug_ft.toml",
    f"--training.steps={_ENDLESS}",
    f"--lr_scheduler.total_steps={_ENDLESS}",
    f"--model.flavor={FLAVOR}",
    "--optimizer.lr=1e-5",
    "--training.local_batch_size=2",
    "--training.global_batch_size=8",
    "--metrics.log_freq=1000",
    "--checkpoint.interval=25",
    "--fault_tolerance.process_group_timeout_ms=30000",
)


@dataclass(frozen=True)
class JobMesh:
    """Replicas and ranks of a job."""

    name: str
    replicas: int
    ranks: int
    arguments: tuple[str, ...] = ()


MESHES = {
    mesh.name: mesh
    for mesh in (
        JobMesh("FSDP-4", 1, 4),
        JobMesh("TP-2 x FSDP-2", 1, 4, ("--parallelism.tensor_parallel_degree=2",)),
        JobMesh("PP-2 x FSDP-2", 1, 4, ("--parallelism.pipeline_parallel_degree=2",)),
        JobMesh("2 replicas", 2, 1),
    )
}


def _with_own_clocks(folder: Path) -> dict[str, str]:
    """Return the environment in which each process has a wall clock that can be shifted; empty
    without a compiler."""
    library, compiler = folder / "clock.so", shutil.which("gcc")
    if compiler is None:
        return {}
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library)}


class JobFailed(Exception):
    """The job did not start or recover."""


class RunningJob:
    """A job on a mesh; a context manager that ends it."""

    def __init__(self, mesh: JobMesh, folder: Path, *, has_faults: bool = True) -> None:
        """Start the job in `folder`, which is created. Without `has_faults` no fault can be ordered
        from its ranks."""
        self.mesh, self.folder = mesh, folder / "run"
        self.orders = folder / "orders"
        self.orders.mkdir(parents=True)
        self._ids = itertools.count(1)
        self._log = folder / "launch.log"
        command = [sys.executable, "-m", "torchtitan_lite", "launch", f"--replicas={mesh.replicas}"]
        command += [f"--nproc-per-replica={mesh.ranks}", "--max-restarts=1000"]
        command += ["--max-restart-delay-s=1", "--", *_ARGUMENTS, *mesh.arguments, *WITH_DIAGNOSIS]
        command += [f"--job.dump_folder={self.folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        module = "rank_side" if has_faults else "small_model"
        command += [f"--experimental.custom_import=tests.diagnosis.{module}"]
        if has_faults:
            environment[ORDERS] = str(self.orders)
            environment |= _with_own_clocks(folder)
        self._follower = MetricsFollower(self.folder, mesh.replicas)
        with self._log.open("ab") as log:
            self._launcher = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self.diagnoses = DiagnosisReader(self.folder)

    def __enter__(self) -> "RunningJob":
        self._follower.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._follower.__exit__()
        if self._launcher.poll() is None:
            self._launcher.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._launcher.wait(timeout=_EXIT_S)
        if self._launcher.poll() is None:
            self._launcher.kill()
            self._launcher.wait()
        for process in processes_using(self.folder):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has exited, as after a fault of a machine."""
        return self._launcher.poll() is not None

    @property
    def step_time_s(self) -> float:
        """Median time of recent steps of the first replica."""
        lines = (replica_folder(self.folder, 0) / METRICS).read_bytes().splitlines()
        found = [one["step_time_s"] for one in records(lines[-60:]) if is_step(one)]
        return statistics.median(found[-10:])

    @property
    def view(self) -> JobView:
        return JobView(self._launcher.pid, self.folder, self.mesh.replicas)

    @property
    def last_step(self) -> int:
        """The newest committed step."""
        return self._follower.last_step

    def rank(self, replica: int, rank: int) -> psutil.Process:
        """Return the process of a rank, as the launcher has published it. Raises
        FaultNotApplicable."""
        file = self.folder / "launch_logs" / f"replica_{replica:03d}" / f"rank_{rank}.pid"
        try:
            return psutil.Process(int(file.read_text()))
        except (OSError, ValueError, psutil.NoSuchProcess):
            raise FaultNotApplicable("the rank does not run") from None

    def ranks(self) -> dict[tuple[int, int], psutil.Process]:
        """Return the processes of all ranks, by replica and rank."""
        mesh = self.mesh
        places = itertools.product(range(mesh.replicas), range(mesh.ranks))
        return {place: self.rank(*place) for place in places}

    def writer(self, replica: int, rank: int) -> psutil.Process:
        """Return the checkpoint writer of a rank. Raises FaultNotApplicable."""
        with suppress(psutil.NoSuchProcess):
            for child in self.rank(replica, rank).children():
                if "tests.diagnosis.slow_writer" in child.cmdline():
                    return child
        raise FaultNotApplicable("the rank has no checkpoint writer")

    def shift_clock(self, process: psutil.Process, seconds: int) -> None:
        """Shift the wall clock of a process. Raises FaultNotApplicable."""
        path = self.orders / f"clock-{process.pid}"
        if not path.exists():
            raise FaultNotApplicable("the process has no clock of its own: gcc is missing")
        with path.open("r+b") as file:
            file.write(struct.pack("l", seconds))

    def order(self, replica: int, rank: int, name: str, **values: object) -> None:
        """Order a fault from a rank, after its next step."""
        path = order_file(self.orders, replica, rank)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"id": next(self._ids), "name": name, "values": values}))
        part.rename(path)

    def wait_until_ready(self, more_steps: int) -> None:
        """Block until all ranks of all replicas run, and train together for `more_steps`. Raises
        JobFailed."""
        before = self.last_step

        def is_ready() -> bool:
            with suppress(FaultNotApplicable, psutil.NoSuchProcess):
                is_running = all(one.is_running() for one in self.ranks().values())
                newest = self._follower.newest
                together = all(
                    one is not None
                    and one.step >= before + more_steps
                    and one.num_replicas == self.mesh.replicas
                    for one in newest
                )
                return is_running and together
            return False

        if not self.wait_for(is_ready, _READY_S):
            raise JobFailed(f"not ready in {_READY_S:g} s:\n{self.log[-3000:]}")

    def wait_for(self, condition: Callable[[], object], timeout_s: float) -> bool:
        """Block until the condition holds, or the time is up, or the launcher has exited. Return
        whether it holds."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline_s or self.has_ended:
                return bool(condition())
            time.sleep(_POLL_S)
        return True

    @property
    def log(self) -> str:
        """The output of the launcher."""
        return self._log.read_text(errors="replace")
