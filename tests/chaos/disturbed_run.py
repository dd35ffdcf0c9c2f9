"""Runs a job under the launcher and injects one fault after the other.

The kinds, targets and times of the faults follow from a seed. A fault is over once all replicas
commit steps together again; if they do not, the run fails with the ends of the logs.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.faults import FaultKind
from tests.chaos.job_view import (
    FaultNotApplicable,
    FaultTarget,
    JobView,
    MetricsFollower,
    processes_using,
)

_COMMON_STEPS = 2
"""Steps that all replicas must commit together before a fault is over."""
_MAX_DELAY_S = 1.5
_GENERATIONS = 4
_STEPS_TO_NEXT_GENERATION = 15
_RECOVERY_S = 180.0
_EXIT_S = 120.0
_LOG_CHARS = 3000


class DisturbedRunFailed(Exception):
    """The run did not recover."""


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A fault and its cost."""

    kind: FaultKind
    replica: int
    step: int
    """The last committed step before the fault."""
    recovery_s: float
    """Time from the injection until all replicas committed steps again."""
    repeated_steps: int
    """Sum over all replicas."""
    skip_reason: str = ""
    """Why the fault could not be injected, if so."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The job to disturb."""

    arguments: Sequence[str]
    """Arguments of train.py for an endless run whose dump_folder is `folder`."""
    folder: Path
    num_replicas: int
    num_ranks: int
    """Ranks per replica."""
    launch_options: Sequence[str] = ()


class DisturbedRun:
    """A running job into which faults are injected."""

    def __init__(self, spec: JobSpec, follower: MetricsFollower, log: Path, seed: int) -> None:
        """Starts the job. Use as a context manager, which ends it in any case."""
        self._spec, self._follower, self._log = spec, follower, log
        self._rng = random.Random(seed)
        self._launcher = self._launch()

    def __enter__(self) -> "DisturbedRun":
        return self

    def __exit__(self, *raised: object) -> None:
        self._kill()

    @property
    def job(self) -> JobView:
        """Its processes and files now."""
        return JobView(self._launcher.pid, self._spec.folder, self._spec.num_replicas)

    def inject(self, kind: FaultKind) -> InjectedFault:
        """Inject a fault and block until it is over. Raises DisturbedRunFailed."""
        time.sleep(self._rng.uniform(0, _MAX_DELAY_S))
        follower, replica = self._follower, self._rng.randrange(self._spec.num_replicas)
        before, failed = follower.last_step, sum(follower.failed_steps)
        skip_reason, started_s = "", time.monotonic()
        target = FaultTarget(job=self.job, replica=replica, rng=self._rng)
        for _ in range(_GENERATIONS):
            started_s = time.monotonic()
            skip_reason = _try_to_inject(kind, target)
            if not skip_reason:
                break
            # The target may exist later.
            self.wait_for_all(after=follower.last_step + _STEPS_TO_NEXT_GENERATION)
        if kind.restarts_launcher:
            self._wait_for_launcher_exit()
            self._launcher = self._launch()
        self.wait_for_all(after=max(before, follower.last_step))
        return InjectedFault(
            kind=kind,
            replica=replica,
            step=before,
            recovery_s=time.monotonic() - started_s,
            repeated_steps=sum(follower.failed_steps) - failed,
            skip_reason=skip_reason,
        )

    def wait_for_all(self, after: int = 0) -> None:
        """Block until all replicas commit steps together beyond `after`. Raises
        DisturbedRunFailed."""
        deadline_s = time.monotonic() + _RECOVERY_S
        while not self._all_together(after + _COMMON_STEPS):
            status = self._launcher.poll()
            if status is not None:
                raise DisturbedRunFailed(self._with_logs(f"the launcher exited with {status}"))
            if time.monotonic() >= deadline_s:
                raise DisturbedRunFailed(
                    self._with_logs(f"the run did not recover within {_RECOVERY_S:g} s")
                )
            time.sleep(0.02)

    def stop(self) -> int:
        """Stop the job with SIGTERM and return the launcher's exit status."""
        self._launcher.send_signal(signal.SIGTERM)
        self._wait_for_launcher_exit()
        return self._launcher.returncode

    def _kill(self) -> None:
        """Ensure that no process of the job is left."""
        if self._launcher.poll() is None:
            self._launcher.kill()
        self._launcher.wait()
        _, alive = psutil.wait_procs(processes_using(self._spec.folder), timeout=_EXIT_S)
        for process in alive:
            process.kill()

    def _all_together(self, step: int) -> bool:
        return all(
            newest is not None
            and newest.step >= step
            and newest.num_replicas == self._spec.num_replicas
            for newest in self._follower.newest
        )

    def _launch(self) -> subprocess.Popen[bytes]:
        spec = self._spec
        command = [sys.executable, "-m", "torchtitan_lite", "launch"]
        command += [f"--replicas={spec.num_replicas}", f"--nproc-per-replica={spec.num_ranks}"]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*command, *spec.launch_options, "--", *spec.arguments],
                env={"OMP_NUM_THREADS": "1", **os.environ},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _wait_for_launcher_exit(self) -> None:
        try:
            self._launcher.wait(timeout=_EXIT_S)
        except subprocess.TimeoutExpired:
            problem = f"the launcher did not exit within {_EXIT_S:g} s"
            raise DisturbedRunFailed(self._with_logs(problem)) from None

    def _with_logs(self, problem: str) -> str:
        rank_logs = sorted((self._spec.folder / "launch_logs").glob("*/*/rank_*.log"))
        logs = [self._log, *rank_logs[-2 * self._spec.num_replicas * self._spec.num_ranks :]]
        ends = [f"--- {log}\n{log.read_text(errors='replace')[-_LOG_CHARS:]}" for log in logs]
        return "\n".join([problem, *ends])


def draw_kinds(kinds: Sequence[FaultKind], number: int, seed: int) -> list[FaultKind]:
    """Draw `number` kinds, each equally often, in an order that follows from `seed`."""
    rng, drawn = random.Random(seed), []
    while len(drawn) < number:
        drawn += rng.sample(kinds, len(kinds))
    return drawn[:number]


def cost_table(faults: Sequence[InjectedFault]) -> Iterator[str]:
    """Yield a line per kind with its median recovery time and mean number of repeated steps."""
    for label in sorted({fault.kind.label for fault in faults}):
        injected = [
            fault for fault in faults if fault.kind.label == label and not fault.skip_reason
        ]
        if injected:
            seconds = sorted(fault.recovery_s for fault in injected)
            repeated = sum(fault.repeated_steps for fault in injected) / len(injected)
            yield (
                f"{label:42} {len(injected):3} times  {seconds[len(seconds) // 2]:6.1f} s  "
                f"{repeated:.1f} steps repeated"
            )


def _try_to_inject(kind: FaultKind, target: FaultTarget) -> str:
    """Inject a fault and return an empty string, or return why it is not applicable."""
    try:
        kind.inject(target)
    except FaultNotApplicable as error:
        return str(error)
    return ""
