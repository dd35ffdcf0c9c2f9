"""A live run moves to another mesh: in memory, or by a save, a restart and a load.

python -m benchmarks.resize [--quick] [--json PATH]

Both variants train the same job in processes of one thread each, with snapshots in shared memory
after each step. Ours: `torchtitan-lite resize`. The peer: the run is stopped by SIGTERM, saves, and
is started again on the other mesh, from the checkpoint. The pause is the time between the ends of
the last step on the former mesh and of the first one on the new mesh. Where ranks are added, their
processes start before the pause of ours; the time from the request is shown, too.

Two replicas resize under the launcher when their slots file changes: in their processes, or,
without snapshots in shared memory (the peer), by a save, a restart and a load.

The exit status is 1 if a process fails, the losses of the variants differ, or more than one step is
repeated.
"""

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Comparison, Result, formatted, main
from benchmarks.processes import CHECKOUT, ChildFailed, started
from benchmarks.rank_recovery import (
    compare_losses,
    is_warm,
    job_arguments,
    processes,
    records,
    resumes,
    steps,
    wait,
)

_TIMEOUT_S = 120.0
_STEPS_BETWEEN = 8
"""Steps between the start on a mesh and the next resize."""
_GOAL = 1 / 3
_TP = ("--parallelism.tensor_parallel_degree=2",)
_Mesh = tuple[int, Sequence[str]]
"""Number of ranks, and arguments."""
_CASES: Mapping[str, tuple[_Mesh, _Mesh]] = {
    "FSDP-4 to FSDP-2": ((4, ()), (2, ())),
    "FSDP-2 to FSDP-4": ((2, ()), (4, ())),
    "FSDP-4 to TP-2 x FSDP-2": ((4, ()), (4, _TP)),
}
_REPLICAS: Mapping[str, tuple[int, int]] = {
    "two replicas, FSDP-2 to 1 rank each": (2, 1),
    "two replicas, 1 rank to FSDP-2 each": (1, 2),
}
"""Ranks per replica before and after."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one run."""

    cases: Sequence[str]
    repeats: int
    """Resizes of each case and variant, each in a run of its own."""


@dataclass
class _Times:
    """Measurements of one variant in one case."""

    pauses_s: list[float] = field(default_factory=list)
    from_request_s: list[float] = field(default_factory=list)
    repeated: int = 0
    """Most steps that one resize repeated."""
    losses: dict[int, float] = field(default_factory=dict)


def measure(plan: Plan, folder: Path) -> Iterator[Result]:
    """Measure all of `plan`, with files in `folder`."""
    for index, case in enumerate(plan.cases):
        ours, peer = _Times(), _Times()
        for repeat in range(plan.repeats):
            for name, times in (("ours", ours), ("peer", peer)):
                own = folder / f"{name}_{index}_{repeat}"
                if case in _REPLICAS:
                    _run_replicas(case, times, own, is_restarted=times is peer)
                else:
                    _run(_resize if times is ours else _restart, case, times, own)
        comparison = Comparison(case, other="restart")
        comparison.note(f"pauses: ours {formatted(ours.pauses_s)} s")
        comparison.note(f"pauses: restart {formatted(peer.pauses_s)} s")
        compare_losses(comparison, ours.losses, peer.losses)
        comparison.small("steps repeated by one resize", ours.repeated, 1)
        median = statistics.median
        yield comparison.ratio(
            f"pause of training, median of {plan.repeats}",
            "s",
            median(ours.pauses_s),
            peer=median(peer.pauses_s),
            goal=_GOAL,
        )
        yield comparison.value(
            f"from the request to the first step, median of {plan.repeats}",
            "s",
            median(ours.from_request_s),
            peer=median(peer.from_request_s),
        )


_Move = Callable[[subprocess.Popen[bytes], _Mesh, Path], Sequence[str] | None]
"""Moves a run to a mesh; returns the command of another run that continues it, if there is one."""


def _run(move: _Move, case: str, times: _Times, folder: Path) -> None:
    """Train on the first mesh of the case, move, and train on the second."""
    before, after = _CASES[case]
    folder.mkdir()
    metrics, log = folder / "metrics.jsonl", folder / "log.txt"
    with started(_command(before, folder), [], 1, log) as process:
        wait(process, lambda: len(steps(metrics)) >= _STEPS_BETWEEN, folder)
        wait(process, lambda: len(processes(process)) == before[0] + 1, folder)
        wait(process, lambda: all(map(is_warm, processes(process))), folder)
        began_s = time.time()
        following = move(process, after, folder)
        if following is None:
            _finish(process, times, began_s, folder, metrics)
    if following is not None:
        with started(following, [], 1, log) as process:
            _finish(process, times, began_s, folder, metrics)


def _run_replicas(case: str, times: _Times, folder: Path, *, is_restarted: bool) -> None:
    """Launch two replicas, change their number of ranks, and train on. Without snapshots in shared
    memory they are restarted."""
    before, after = _REPLICAS[case]
    folder.mkdir()
    slots, log = folder / "slots", folder / "log.txt"
    metrics = [folder / f"replica_{number:03d}" / "metrics.jsonl" for number in range(2)]
    slots.write_text(f'{{"0": {before}}}')
    command = [
        *("-m", "torchtitan_lite", "launch", "--replicas=2", "--nproc-per-replica=1:2"),
        *("--spares=1", f"--slots-file={slots}", "--", *job_arguments(folder)),
        *(("--checkpoint.ram_interval=0",) if is_restarted else ()),
    ]
    with started(command, [], 1, log) as process:
        for file in metrics:
            wait(process, lambda path=file: _num_together(path) >= _STEPS_BETWEEN, folder)
        began_s = time.time()
        slots.write_text(f'{{"0": {after}}}')
        _finish(process, times, began_s, folder, metrics[0])


def _num_together(metrics: Path) -> int:
    """Return the number of steps that a replica has taken with the other one."""
    return sum(record.get("num_replicas") == 2 for record in records(metrics))


def _finish(
    process: subprocess.Popen[bytes], times: _Times, began_s: float, folder: Path, metrics: Path
) -> None:
    """Wait for steps on the new mesh, and record what the move took."""
    wait(process, lambda: bool(resumes(metrics)), folder)
    resumed = resumes(metrics)[-1]
    wait(process, lambda: max(steps(metrics)) >= resumed + _STEPS_BETWEEN, folder)
    wait(process, lambda: _around_resume(metrics) is not None, folder)
    around = _around_resume(metrics)
    assert around is not None
    last, first = around
    times.pauses_s.append(first["time"] - last["time"])
    times.from_request_s.append(first["time"] - began_s)
    times.repeated = max(times.repeated, last["step"] - resumed)
    times.losses.update(
        {record["step"]: record["loss"] for record in records(metrics) if "event" not in record}
    )
    process.send_signal(signal.SIGTERM)
    process.wait(_TIMEOUT_S)


def _around_resume(metrics: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the last step before the newest resume, and the first after it with all replicas; None
    if there is none yet."""
    # A step that was repeated is recorded again, after the event.
    lines = records(metrics)
    place = max(index for index, line in enumerate(lines) if line.get("event") == "resume")
    last = [line for line in lines[:place] if "event" not in line][-1]
    count = max(line.get("num_replicas", 0) for line in lines[:place])
    after = (line for line in lines[place:] if line.get("num_replicas") == count)
    first = next(after, None)
    return None if first is None else (last, first)


def _resize(process: subprocess.Popen[bytes], mesh: _Mesh, folder: Path) -> None:
    num_ranks, arguments = mesh
    command = [sys.executable, "-m", "torchtitan_lite", "resize", str(folder)]
    done = subprocess.run(
        [*command, f"--nproc={num_ranks}", *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        raise ChildFailed(f"{' '.join(command)}: {done.stderr}")


def _restart(process: subprocess.Popen[bytes], mesh: _Mesh, folder: Path) -> Sequence[str]:
    process.send_signal(signal.SIGTERM)
    if process.wait(_TIMEOUT_S):
        raise ChildFailed(f"The run did not save: {folder / 'log.txt'}")
    return _command(mesh, folder)


def _command(mesh: _Mesh, folder: Path) -> list[str]:
    num_ranks, arguments = mesh
    return [
        *("-m", "torchtitan_lite", "train", f"--nproc={num_ranks}", "--spares=1"),
        *job_arguments(folder),
        *arguments,
    ]


if __name__ == "__main__":
    main(
        "A live run moves to another mesh: in memory, or by a restart.",
        measure,
        full=Plan(cases=(*_CASES, *_REPLICAS), repeats=3),
        quick=Plan(cases=("FSDP-4 to FSDP-2", "two replicas, FSDP-2 to 1 rank each"), repeats=1),
    )
