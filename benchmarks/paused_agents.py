"""Whether machines that live are ever replaced.

python -m benchmarks.paused_agents [--quick] [--json PATH]

Three machines of two ranks, each a namespace with a network of its own, run a job for two beside
two busy loops per core. All the time, an agent or the coordinator is paused for a second
(SIGSTOP), in turn. Each new generation would be a machine that was lost falsely, or a rank that
failed.

The exit status is 1 if a process fails. Needs root.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from benchmarks.harness import Comparison, Result, main
from benchmarks.processes import ChildFailed
from tests.resilience.network.machines import BUDDIES, machines
from tests.resilience.network.namespaces import unavailable_reason

_NAMES = ("a", "b", "c")
_LOOPS_PER_CORE = 2
_PAUSE_S = 1.0
_BETWEEN_S = 4.0
_STEPS = 1_000_000
_GENERATION = re.compile(r"running, generation (\d+),")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one run."""

    seconds: float


def measure(plan: Plan, folder: Path) -> Iterator[Result]:
    """Measure all of `plan`, with files in `folder`."""
    if reason := unavailable_reason():
        raise ChildFailed(reason)
    arguments = (*BUDDIES, "--training.local_batch_size=1")
    with machines(folder, *_NAMES, steps=_STEPS, num_ranks=2) as run:
        run.train(*_NAMES, more=arguments)
        first_step = run.last_step()
        assert run.coordinator is not None
        with _busy_loops(_LOOPS_PER_CORE * (os.cpu_count() or 1)):
            num_pauses = _pause([*run.agents.values(), run.coordinator], plan.seconds)
        run.wait(lambda: run.last_step() > first_step)
        generations = {*_GENERATION.findall(run.text("coordinator"))}
        comparison = Comparison(
            f"2 machines, 1 spare, 2 busy loops per core, pauses of {_PAUSE_S:g} s", other="none"
        )
        comparison.note(f"steps {first_step} to {run.last_step()}")
        yield comparison.value("time", "s", plan.seconds)
        yield comparison.value("pauses", "pauses", num_pauses)
        yield comparison.value("generations beyond the first", "", len(generations) - 1, goal=0)


def _pause(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> int:
    """Pause one process after the other for a second each, and return how many times."""
    ends_s = time.monotonic() + seconds
    for num_pauses, process in enumerate(cycle(processes)):
        if time.monotonic() >= ends_s:
            return num_pauses
        if process.poll() is not None:
            raise ChildFailed(f"A process has ended with status {process.returncode}.")
        process.send_signal(signal.SIGSTOP)
        time.sleep(_PAUSE_S)
        process.send_signal(signal.SIGCONT)
        time.sleep(_BETWEEN_S)
    raise AssertionError


@contextmanager
def _busy_loops(number: int) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    main(
        "Whether machines that live are ever replaced.",
        measure,
        full=Plan(seconds=3600),
        quick=Plan(seconds=15),
    )
