"""The cost of a lost machine, whose place a spare machine takes.

python -m benchmarks.lost_machine [--quick] [--json PATH]

Three machines, each a namespace with a network and shared memory of its own, run a job for two.
All processes of one that trains are killed (SIGKILL), and it is started again as a spare machine.
The state comes from the copy in the memory of its buddy, which is made every two steps and is all
that there is, or from a checkpoint, which is saved every five steps. A recovery is the time from
the kill to the first step that is recorded by the next generation; most of it is the lease of the
lost machine. The same job without faults gives the losses to compare with.

The exit status is 1 if a process fails or losses differ. Needs root.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Comparison, Result, formatted, main
from benchmarks.processes import ChildFailed
from tests.resilience.network.machines import BUDDIES, Machines, machines, undisturbed_losses
from tests.resilience.network.namespaces import unavailable_reason
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import LOST_S

_STEPS_PER_KILL = 40
_NAMES = ("a", "b", "c")
_GOALS = {"buddy": 4, "storage": 10}
"""Steps of two copies or checkpoints: one is in flight at the kill. By the source of the state."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one run."""

    num_kills: int
    sources: Mapping[str, tuple[str, ...]]
    """Arguments of the run by source of the state."""


def measure(plan: Plan, folder: Path) -> Iterator[Result]:
    """Measure all of `plan`, with files in `folder`."""
    if reason := unavailable_reason():
        raise ChildFailed(reason)
    steps = _STEPS_PER_KILL * (plan.num_kills + 1)
    expected = undisturbed_losses(folder / "undisturbed", steps)
    for source, arguments in plan.sources.items():
        yield from _measure(plan, folder / source, source, arguments, expected)


def _measure(
    plan: Plan, folder: Path, source: str, arguments: tuple[str, ...], expected: list[float]
) -> Iterator[Result]:
    """Measure recoveries with the state from `source`."""
    seconds, repeated = [], []
    with machines(folder, *_NAMES, steps=len(expected)) as run:
        run.train(*_NAMES, more=arguments)
        for index in range(plan.num_kills):
            run.wait_for_step(_STEPS_PER_KILL * index + 5)
            # Also the machine of rank 0, whose writer leads the saves.
            recovery_s, lost_steps = _lose(run, arguments, rank=1 - index % 2)
            if source == "buddy" and list(run.output.glob("checkpoint/step-*")):
                raise ChildFailed("a checkpoint was saved: the state may come from storage")
            seconds.append(recovery_s)
            repeated.append(lost_steps)
        actual = run.finish()
    comparison = Comparison(
        f"1 of 2 machines killed, 1 spare, state from {source}", other="without faults"
    )
    comparison.note(f"recoveries {formatted(seconds)} s, of which {LOST_S:g} s are the lease")
    comparison.note(f"steps repeated {formatted(repeated)}")
    comparison.close_losses(actual, expected, shown=4)
    name = f"until training again, median of {plan.num_kills}"
    yield comparison.value(name, "s", statistics.median(seconds))
    yield comparison.value("steps repeated at most", "steps", max(repeated), goal=_GOALS[source])


def _lose(run: Machines, arguments: tuple[str, ...], *, rank: int) -> tuple[float, int]:
    """Kill the machine of a rank. Return the seconds until the first step afterwards, and the steps
    that were repeated."""
    name = next(name for name in _NAMES if rank in run.ranks_with_writers(name))
    before, num_resumes, began_s = run.last_step(), len(run.resumes()), time.monotonic()
    run.kill(name)
    run.wait(lambda: len(run.resumes()) > num_resumes)
    resumed = run.resumes()[-1]
    run.wait(lambda: run.last_step() > resumed)
    recovery_s = time.monotonic() - began_s
    run.start(name, *arguments)
    run.wait(lambda: run.processes(name))
    return recovery_s, max(0, before - resumed)


if __name__ == "__main__":
    main(
        "A lost machine, whose place a spare machine takes.",
        measure,
        full=Plan(num_kills=3, sources={"buddy": BUDDIES, "storage": ()}),
        quick=Plan(num_kills=1, sources={"buddy": BUDDIES}),
    )
