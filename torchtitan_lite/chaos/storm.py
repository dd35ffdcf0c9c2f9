"""Strikes a run under the launcher with one fault after the other. Layer: above kinds and follower.

What is struck, whom and when follows from a seed. A fault is over once all replicas take steps
together again; where that does not come, the storm ends with what the logs say last.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchtitan_lite.chaos.follower import Follower
from torchtitan_lite.chaos.kind import Kind, Target
from torchtitan_lite.chaos.scene import Missed, Scene

_QUIET_STEPS = 2
"""That all replicas take together before a fault counts as over."""
_LONGEST_WAIT_S = 1.5
_ATTEMPTS = 4
_STEPS_TO_NEXT_ATTEMPT = 15
_RECOVERY_S = 180.0
_END_S = 120.0
_LOG_CHARS = 3000


class StormFailed(Exception):
    """The run did not recover."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault that was done."""

    kind: Kind
    replica: int
    step: int
    """The last before it."""
    recovery_s: float
    """From its begin until all replicas took steps again."""
    repeated_steps: int
    """Of all replicas."""
    missed: str = ""
    """Why nothing was struck, if so."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What to disturb."""

    arguments: Sequence[str]
    """Of train.py: a run without end, whose dump_folder is `folder`."""
    folder: Path
    num_replicas: int
    num_ranks: int
    """Of each replica."""
    launch_options: Sequence[str] = ()


class Storm:
    """A run, and what befalls it. Use `storm`."""

    def __init__(self, run: Run, follower: Follower, log: Path, draw: random.Random) -> None:
        self._run, self._follower, self._log, self._draw = run, follower, log, draw
        self._launcher = self._launch()

    def strike(self, kind: Kind) -> Strike:
        """Do it, and wait until it is over. Raises StormFailed."""
        time.sleep(self._draw.uniform(0, _LONGEST_WAIT_S))
        follower, replica = self._follower, self._draw.randrange(self._run.num_replicas)
        before, failed = follower.last_step, sum(follower.failed_steps)
        missed, started_s = "", time.monotonic()
        scene = Scene(self._launcher.pid, self._run.folder, self._run.num_replicas)
        target = Target(scene=scene, replica=replica, draw=self._draw)
        for _ in range(_ATTEMPTS):
            started_s = time.monotonic()
            missed = _missed(kind, target)
            if not missed:
                break
            # There may be more to strike later.
            self.wait_for_all(after=follower.last_step + _STEPS_TO_NEXT_ATTEMPT)
        if kind.restarts_launcher:
            self._let_launcher_end()
            self._launcher = self._launch()
        self.wait_for_all(after=max(before, follower.last_step))
        return Strike(
            kind=kind,
            replica=replica,
            step=before,
            recovery_s=time.monotonic() - started_s,
            repeated_steps=sum(follower.failed_steps) - failed,
            missed=missed,
        )

    def wait_for_all(self, after: int = 0) -> None:
        """Until all replicas have taken steps together beyond `after`. Raises StormFailed."""
        deadline_s = time.monotonic() + _RECOVERY_S
        while not self._all_together(after + _QUIET_STEPS):
            if self._launcher.poll() is not None:
                raise StormFailed(self._told(f"the launcher ended with {self._launcher.poll()}"))
            if time.monotonic() >= deadline_s:
                raise StormFailed(self._told(f"not recovered in {_RECOVERY_S:g} s"))
            time.sleep(0.02)

    def end(self) -> int:
        """Ask all to leave. Returns the launcher's exit status."""
        self._launcher.send_signal(signal.SIGTERM)
        self._let_launcher_end()
        return self._launcher.returncode

    def kill(self) -> None:
        """Make sure that nothing goes on."""
        if self._launcher.poll() is None:
            self._launcher.kill()
        self._launcher.wait()
        _, left = psutil.wait_procs(processes_of(self._run.folder), timeout=_END_S)
        for process in left:
            process.kill()

    def _all_together(self, step: int) -> bool:
        newest = self._follower.newest
        return all(
            one is not None and one.step >= step and one.num_replicas == self._run.num_replicas
            for one in newest
        )

    def _launch(self) -> subprocess.Popen[bytes]:
        run = self._run
        command = [
            sys.executable,
            "-m",
            "torchtitan_lite",
            "launch",
            f"--replicas={run.num_replicas}",
        ]
        command += [f"--nproc-per-replica={run.num_ranks}", *run.launch_options]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*command, "--", *run.arguments],
                env={"OMP_NUM_THREADS": "1", **os.environ},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _let_launcher_end(self) -> None:
        try:
            self._launcher.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            raise StormFailed(self._told(f"the launcher did not end in {_END_S:g} s")) from None

    def _told(self, problem: str) -> str:
        scene_logs = sorted((self._run.folder / "launch_logs").glob("*/*/rank_*.log"))
        logs = [self._log, *scene_logs[-2 * self._run.num_replicas * self._run.num_ranks :]]
        ends = [f"--- {log}\n{log.read_text(errors='replace')[-_LOG_CHARS:]}" for log in logs]
        return "\n".join([problem, *ends])


@contextmanager
def storm(run: Run, follower: Follower, log: Path, seed: int) -> Iterator[Storm]:
    """Start the run, and end with it whatever happens."""
    found = Storm(run, follower, log, random.Random(seed))
    try:
        yield found
    finally:
        found.kill()


def deck(kinds: Sequence[Kind], number: int, seed: int) -> list[Kind]:
    """`number` kinds, each as often as any other, in an order that follows from `seed`."""
    draw, drawn = random.Random(seed), []
    while len(drawn) < number:
        drawn += draw.sample(kinds, len(kinds))
    return drawn[:number]


def _missed(kind: Kind, target: Target) -> str:
    """Strike; why there was nothing to strike, if so."""
    try:
        kind.strike(target)
    except Missed as error:
        return str(error)
    return ""


def processes_of(folder: Path) -> list[psutil.Process]:
    """All that works for the run in `folder`, wherever it hangs in the tree of processes."""
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}

    def works(process: psutil.Process) -> bool:
        words: Sequence[str] = process.info["cmdline"] or ()
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        return process.pid not in mine and alive and any(str(folder) in word for word in words)

    return [process for process in psutil.process_iter(["cmdline", "status"]) if works(process)]


def told(strikes: Sequence[Strike], say: Callable[[str], None]) -> None:
    """What the kinds have cost, a line each."""
    for name in sorted({strike.kind.words for strike in strikes}):
        some = [one for one in strikes if one.kind.words == name and not one.missed]
        if some:
            seconds = sorted(one.recovery_s for one in some)
            repeated = sum(one.repeated_steps for one in some) / len(some)
            say(
                f"{name:42} {len(some):3} times  {seconds[len(seconds) // 2]:6.1f} s  "
                f"{repeated:.1f} steps repeated"
            )
