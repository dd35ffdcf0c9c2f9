"""The cost of a lost machine, whose place a spare machine takes.

python -m benchmarks.lost_machine [--quick] [--json PATH]

Three machines of two ranks, each a namespace with a network and shared memory of its own, run a job
for two. All processes of one that trains are killed (SIGKILL), so that its connections end, or
after its link was cut, so that it falls silent; and it is started again as a spare machine. The
state comes from the copy in the memory of its buddy, which is made every two steps and is all that
there is, or from a checkpoint, which is saved every five steps. A recovery is the time from the
kill to the first step that the next generation has computed. It is visible later, because outputs
wait for the end of the lost machine's lease. The same job without faults gives the losses to
compare with.

The exit status is 1 if a process fails or losses differ. Needs root.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Comparison, Result, formatted, main
from benchmarks.processes import ChildFailed
from tests.harness.launch import events_of, steps_of
from tests.resilience.network.machines import BUDDIES, Machines, machines, undisturbed_losses
from tests.resilience.network.namespaces import unavailable_reason

_STEPS_PER_KILL = 40
_NAMES = ("a", "b", "c")
_RANKS = 2
"""Ranks of a machine."""
_SLOW = "slow=0.1"
"""Time added to each step, so that a fault meets a running training."""
_BATCH = "--training.local_batch_size=1"
"""One sample per rank."""
_MAX_S = {"its connections end": 3.0, "it falls silent": 5.0}
"""Goals of a recovery from memory, by what the others see of a loss."""
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
    expected = undisturbed_losses(folder / "undisturbed", steps, _BATCH, num_ranks=2 * _RANKS)
    for source, arguments in plan.sources.items():
        for loss in _MAX_S:
            place = folder / f"{source}-{loss.replace(' ', '-')}"
            yield from _measure(plan, place, source, loss, arguments, expected)


def _measure(
    plan: Plan,
    folder: Path,
    source: str,
    loss: str,
    arguments: tuple[str, ...],
    expected: list[float],
) -> Iterator[Result]:
    """Measure recoveries with the state from `source`."""
    seconds, visible, repeated = [], [], []
    with machines(folder, *_NAMES, steps=len(expected), num_ranks=_RANKS) as run:
        run.train(*_NAMES, more=arguments, RANK_FAULTS=_SLOW)
        for index in range(plan.num_kills):
            run.wait_for_step(_STEPS_PER_KILL * index + 20)
            # Also the machine of rank 0, whose writer leads the saves.
            rank = _RANKS * (1 - index % 2)
            is_silent = loss == "it falls silent"
            recovery_s, visible_s, lost_steps = _lose(run, arguments, rank, is_silent=is_silent)
            if source == "buddy" and list(run.output.glob("checkpoint/step-*")):
                raise ChildFailed("a checkpoint was saved: the state may come from storage")
            seconds.append(recovery_s)
            visible.append(visible_s)
            repeated.append(lost_steps)
        actual = run.finish()
    comparison = Comparison(
        f"1 of 2 machines lost, 1 spare, state from {source}: {loss}", other="without faults"
    )
    comparison.note(f"recoveries {formatted(seconds)} s")
    comparison.note(f"steps repeated {formatted(repeated)}")
    comparison.close_losses(actual, expected, shown=4)
    name = f"until training again, median of {plan.num_kills}"
    goal = _MAX_S[loss] if source == "buddy" else None
    yield comparison.value(name, "s", statistics.median(seconds), goal=goal)
    yield comparison.value("until training is visible, median", "s", statistics.median(visible))
    yield comparison.value("steps repeated at most", "steps", max(repeated), goal=_GOALS[source])


def _lose(
    run: Machines, arguments: tuple[str, ...], rank: int, *, is_silent: bool
) -> tuple[float, float, int]:
    """Kill the machine of a rank. Return the seconds until the first step afterwards, those until
    its record is there, and the steps that were repeated."""
    name = next(name for name in _NAMES if rank in run.ranks_with_writers(name))
    before, num_resumes, began_s = run.last_step(), len(run.resumes()), time.time()
    if is_silent:
        run.network.unplug(name)
    run.kill(name)
    run.wait(lambda: len(run.resumes()) > num_resumes)
    resumed = [event for event in events_of(run.output) if event["event"] == "resume"][-1]
    run.wait(lambda: run.last_step() > resumed["step"])
    visible_s = time.time() - began_s
    first = next(line for line in steps_of(run.output) if line["time"] > resumed["time"])
    if is_silent:
        run.network.plug(name)
    run.start(name, *arguments, RANK_FAULTS=_SLOW)
    run.wait(lambda: len(run.processes(name)) == _RANKS)
    return first["time"] - began_s, visible_s, max(0, before - resumed["step"])


if __name__ == "__main__":
    main(
        "A lost machine, whose place a spare machine takes.",
        measure,
        full=Plan(num_kills=3, sources={"buddy": (*BUDDIES, _BATCH), "storage": (_BATCH,)}),
        quick=Plan(num_kills=1, sources={"buddy": (*BUDDIES, _BATCH)}),
    )
