"""The failure model against real runs: predicted and measured lost time under the same kills.

python -m benchmarks.failures [--quick] [--json PATH]

Two ranks of one thread train, and ranks are killed (SIGKILL) at random times of a seeded schedule.
`spares`: a spare replaces the dead rank, and all return to the snapshot of each step. `restart`:
torchrun starts all ranks again, from a checkpoint in storage. Half of the kills give the model the
duration of a recovery; the runs give the time until a save is durable, and the mean step around a
kill. Of the other kills, the model knows only when they happened, and predicts the lost time: wall
time beyond that of the steps that were kept. All times are those that the runs recorded.

The prediction cannot be better than the recoveries of one run are alike, so the standard error of
the predicted time that follows from their scatter is shown with the result.
"""

import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import Comparison, Result, formatted, main
from benchmarks.processes import ChildFailed, started, tail, wait_for
from benchmarks.rank_recovery import is_warm, processes, ranks, records, resumes
from torchtitan_lite.tools.failure_model import (
    STRATEGIES,
    ClusterEvents,
    JobTimes,
    Scenario,
    Strategy,
    job_times,
    predict_given,
)

_RANKS = 2
_TIMEOUT_S = 180.0
_POLL_S = 0.01
_WARMUP_STEPS = 20
_LAST_STEPS = 20
"""Steps after the last recovery."""
_GOAL = 0.05
_STORAGE_INTERVAL = 25
"""Steps between saves to storage."""
_PROGRAMS = {
    "spares": ("-m", "torchtitan_lite", "train", f"--nproc={_RANKS}", "--spares=1"),
    "restart": (
        *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_RANKS}"),
        *("--max-restarts=1000", "train.py"),
    ),
}
_PROCESSES = {"spares": _RANKS + 1, "restart": _RANKS}
_SAVES = {
    "spares": ("--checkpoint.interval=1000000", "--checkpoint.ram_interval=1"),
    "restart": (f"--checkpoint.interval={_STORAGE_INTERVAL}", "--checkpoint.ram_interval=0"),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one run."""

    strategies: Sequence[str]
    kills: int
    """Of a run, at most the 10 failures in a row after which one with spares ends; half of them
    calibrate the model."""
    runs: int
    """Per strategy; an even number, so that each kill calibrates in half of the runs and is
    predicted in the others."""
    mean_interval_s: float
    """Mean training time between a recovery and the next kill."""


@dataclass(frozen=True)
class _Step:
    """A recorded step."""

    number: int
    at_s: float


@dataclass(frozen=True, kw_only=True)
class _Recording:
    """Record of a run. Times are since the epoch."""

    steps: Sequence[_Step]
    """Steps in the order in which they were recorded, repeated ones included."""
    kills_s: Sequence[float]
    resumes_s: Sequence[float]
    durable_s: Sequence[float]
    """Seconds from the end of a saved step until the save was durable."""

    def resumed(self, kill_s: float) -> _Step:
        """Return the first step after the recovery from a kill."""
        resumed_s = self._resume_s(kill_s)
        return next(step for step in self.steps if step.at_s > resumed_s)

    def _resume_s(self, kill_s: float) -> float:
        return next(at_s for at_s in self.resumes_s if at_s > kill_s)

    def step_s(self, window: "_Window") -> float:
        """Return the mean duration of the steps of a window, without the one after the kill."""
        return statistics.mean(seconds for _, seconds in self._steps_s(window) if seconds)

    def recovery_s(self, window: "_Window") -> float:
        """Return the seconds from the kill until the run trains again: to the first step that is
        recorded after it, without the duration of that step."""
        return self.resumed(window.kill_s).at_s - window.kill_s - self.step_s(window)

    def kept_s(self, window: "_Window") -> float:
        """Return the seconds of the steps of a window that were kept."""
        mean_s = self.step_s(window)
        # The last time of a repeated step counts.
        kept_s = {number: seconds or mean_s for number, seconds in self._steps_s(window)}
        assert set(kept_s) >= set(range(window.begin.number + 1, window.end.number + 1))
        return sum(kept_s.values())

    def repeated_s(self, window: "_Window") -> float:
        """Return the seconds from the end of the step to which the kill returned the run."""
        kept = self.resumed(window.kill_s).number - 1
        resume_s = self._resume_s(window.kill_s)
        ends_s = (step.at_s for step in self.steps if step.at_s < resume_s and step.number == kept)
        # The survivors may record the step in which a rank was killed.
        return max(0.0, window.kill_s - max(ends_s))

    def _steps_s(self, window: "_Window") -> Iterator[tuple[int, float | None]]:
        """Yield the steps of a window and their durations; None for the first one after the kill,
        whose duration has the recovery in it."""
        resume_s = self._resume_s(window.kill_s)
        for first, second in pairwise(self.steps):
            if window.begin.at_s <= first.at_s < second.at_s <= window.end.at_s:
                is_first = first.at_s <= resume_s <= second.at_s
                yield second.number, None if is_first else second.at_s - first.at_s


def measure(plan: Plan, folder: Path) -> Iterator[Result]:
    """Measure all of `plan`, with files in `folder`."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    deviations = []
    for strategy in STRATEGIES:
        if strategy.name in plan.strategies:
            recordings = [
                _run(strategy.name, plan, folder / f"{strategy.name}_{index}", index)
                for index in range(plan.runs)
            ]
            comparison = Comparison(f"{_RANKS} ranks, {strategy.title}", other="prediction")
            measured, predicted = _compare(strategy, recordings, comparison)
            count = plan.runs * plan.kills // 2
            deviations.append(abs(measured.lost_s / predicted.lost_s - 1))
            metric = f"lost time of {count} kills; peer: predicted"
            yield comparison.value(metric, "s", measured.lost_s, peer=predicted.lost_s)
            metric = f"repeated steps of {count} kills; peer: predicted"
            yield comparison.value(metric, "s", measured.repeated_s, peer=predicted.repeated_s)
    comparison = Comparison(f"{_RANKS} ranks, all strategies", other="prediction")
    yield comparison.value(
        "largest deviation of the lost time from the prediction",
        "of the predicted",
        max(deviations),
        goal=_GOAL,
    )


@dataclass
class _LostTime:
    """Time that kills cost."""

    lost_s: float = 0.0
    """Wall time beyond that of the steps that were kept."""
    repeated_s: float = 0.0
    """The part of it in which steps were computed that were lost."""


@dataclass(frozen=True, kw_only=True)
class _Window:
    """A part of a run, with one kill."""

    begin: _Step
    kill_s: float
    end: _Step

    @property
    def seconds(self) -> float:
        return self.end.at_s - self.begin.at_s


def _compare(
    strategy: Strategy, recordings: Sequence[_Recording], comparison: Comparison
) -> "tuple[_LostTime, _LostTime]":
    """Return the measured and the predicted lost time of half of the kills."""
    windows = [(recording, _windows(strategy, recording)) for recording in recordings]
    # Kills 0, 3, 4, 7 ... calibrate and 1, 2, 5, 6 ... are predicted, in every second run the other
    # way round: recoveries from later kills take longer, because restarts are delayed.
    calibrating, predicted = (
        [
            (recording, window)
            for run, (recording, some) in enumerate(windows)
            for kill, window in enumerate(some)
            if (((kill + 1) // 2 + run) % 2 == 1) == is_predicted
        ]
        for is_predicted in (False, True)
    )
    recovered_s = [recording.recovery_s(window) for recording, window in calibrating]
    own_s = [recording.recovery_s(window) for recording, window in predicted]
    durable_s = [write_s for recording in recordings for write_s in recording.durable_s]
    measured, prediction = _LostTime(), _LostTime()
    for recording, window in predicted:
        step_s = recording.step_s(window)
        times = _times(strategy, step_s, statistics.mean(recovered_s), durable_s)
        kill = ClusterEvents(at_s=window.kill_s - window.begin.at_s, rank_lost=frozenset({0}))
        shares = predict_given(times, strategy, [kill], window.seconds)
        prediction.lost_s += shares.capacity - shares.useful
        prediction.repeated_s += shares.lost
        measured.lost_s += window.seconds - recording.kept_s(window)
        measured.repeated_s += recording.repeated_s(window)
    error_s = (2 * len(predicted)) ** 0.5 * statistics.stdev([*recovered_s, *own_s])
    steps_s = (recording.step_s(window) for recording, window in [*calibrating, *predicted])
    comparison.note(f"steps of {formatted(steps_s)} s")
    comparison.note(f"recoveries that calibrate {formatted(recovered_s)} s")
    comparison.note(f"recoveries that are predicted {formatted(own_s)} s")
    comparison.note(f"lost time {measured.lost_s:.2f} s, predicted {prediction.lost_s:.2f} s")
    share = error_s / prediction.lost_s
    comparison.note(f"standard error by the scatter of the recoveries {share:.1%}")
    return measured, prediction


def _windows(strategy: Strategy, recording: _Recording) -> list[_Window]:
    """Return a window for each kill. It begins with a saved step, if saves matter."""
    interval = _STORAGE_INTERVAL if strategy.name == "restart" else 1
    begins, free_s = [], recording.steps[_WARMUP_STEPS].at_s
    for kill_s in recording.kills_s:
        between = [step for step in recording.steps if free_s <= step.at_s < kill_s]
        saved = [step for step in between if step.number % interval == 0]
        if not saved:
            raise ChildFailed(f"No step was saved between two kills of {strategy.name}.")
        begins.append(saved[0])
        free_s = recording.resumed(kill_s).at_s
    ends = [*begins[1:], recording.steps[-1]]
    return [
        _Window(begin=begin, kill_s=kill_s, end=end)
        for begin, kill_s, end in zip(begins, recording.kills_s, ends, strict=True)
    ]


def _times(
    strategy: Strategy, step_s: float, recovery_s: float, durable_s: Sequence[float]
) -> JobTimes:
    scenario = Scenario(
        step_s=step_s,
        ranks_per_replica=1,
        state_gib_per_rank=0.0,
        group_setup_s_per_1k_ranks=0.0,
        save_interval_steps=_STORAGE_INTERVAL if strategy.name == "restart" else 10**6,
        snapshot_interval_steps=1,
        restart_s=recovery_s,
        spare_s=recovery_s,
    )
    times = job_times(scenario, strategy, _RANKS)
    return replace(times, write_s=statistics.median(durable_s) if durable_s else 0.0)


def _run(strategy: str, plan: Plan, folder: Path, index: int) -> _Recording:
    folder.mkdir()
    arguments = [
        *("--config", "configs/llama3_debug.toml", "--job.device", "cpu"),
        *("--training.seq_len", "64", "--training.local_batch_size", "2"),
        *("--training.global_batch_size", "4", "--training.steps", "1000000"),
        *("--lr_scheduler.total_steps", "1000000", "--validation.enable", "false"),
        *("--checkpoint.enable", "true", "--metrics.enable_tensorboard", "false"),
        *("--checkpoint.enable_first_step_checkpoint", "false"),
        *("--job.dump_folder", str(folder), *_SAVES[strategy]),
    ]
    metrics, log = folder / "metrics.jsonl", folder / "log.txt"
    random_s = random.Random(f"kills of {strategy} {index}")
    kills_s: list[float] = []
    with started([*_PROGRAMS[strategy], *arguments], [], 1, log) as process:

        def check() -> None:
            if process.poll() is not None:
                raise ChildFailed(f"{strategy} ended:\n{tail(log)}")

        def wait(holds: Any, what: str) -> None:
            find = lambda: holds() or None  # noqa: E731
            wait_for(find, what, timeout_s=_TIMEOUT_S, check=check, poll_s=_POLL_S)

        wait(lambda: _newest(metrics) >= _WARMUP_STEPS, "training")
        for kill in range(plan.kills):
            wait(lambda: len(ranks(process)) == _RANKS, "rank")
            wait(lambda: len(processes(process)) == _PROCESSES[strategy], "spare")
            # A spare has imported everything.
            wait(lambda: all(map(is_warm, processes(process))), "warm spare")
            saved = _newest(metrics) + _STORAGE_INTERVAL
            wait(lambda since=saved: _newest(metrics) >= since, "saved step")
            time.sleep(random_s.uniform(0.2, 2) * plan.mean_interval_s)
            num_resumes = len(resumes(metrics))
            killed = ranks(process)[kill % _RANKS]
            kills_s.append(time.time())
            os.kill(killed, signal.SIGKILL)
            wait(lambda since=num_resumes: len(resumes(metrics)) > since, f"resume {kill}")
            resumed = resumes(metrics)[-1]
            wait(lambda since=resumed: _newest(metrics) > since, "step")
        last = _newest(metrics) + _LAST_STEPS
        wait(lambda: _newest(metrics) >= last, "step")
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TIMEOUT_S)
    return _recording(metrics, kills_s)


def _newest(metrics: Path) -> int:
    """Return the newest step, 0 if there is none."""
    steps = [line["step"] for line in records(metrics) if "event" not in line]
    return steps[-1] if steps else 0


def _recording(metrics: Path, kills_s: Sequence[float]) -> _Recording:
    lines = records(metrics)
    steps = [_Step(line["step"], line["time"]) for line in lines if "event" not in line]
    ended_s = {step.number: step.at_s for step in steps}
    durable_s = [
        line["time"] - ended_s[line["checkpoint_step"]]
        for line in lines
        if line.get("event") == "saved" and line["checkpoint_step"] in ended_s
    ]
    resumes_s = [line["time"] for line in lines if line.get("event") == "resume"]
    return _Recording(steps=steps, kills_s=kills_s, resumes_s=resumes_s, durable_s=durable_s)


if __name__ == "__main__":
    main(
        "Lost time under failures: predicted by the failure model, and measured.",
        measure,
        full=Plan(strategies=("restart", "spares"), kills=10, runs=4, mean_interval_s=3.0),
        quick=Plan(strategies=("spares",), kills=4, runs=1, mean_interval_s=1.0),
    )
