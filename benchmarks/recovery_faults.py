"""A run with injected faults: the cost of each fault, and the progress of the run.

The reader records the metrics of all replicas with one clock for all variants. A step counts as
committed once its line can be read; files are polled every few milliseconds.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.processes import ChildFailed, ChildTimeout, wait_for
from benchmarks.recovery_variants import NUM_REPLICAS, Running, Variant, Workload
from torchtitan_lite.core.outputs import RECEIVES_STATE
from torchtitan_lite.fault_tolerance.supervision.logs import Tail

_Found = TypeVar("_Found")
_TIMEOUT_S = 120.0
_MAX_WORK_S = 900.0
"""Time for the work of a `FailureSchedule`."""
_POLL_S = 0.01
_READ_S = 0.004
_QUIET_STEPS = 4
"""Steps of all replicas after which a fault is over."""
_WARMUP_STEPS = 5
_MAX_DELAY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a metrics.jsonl."""

    seen_s: float
    """Since the epoch."""
    replica: int
    values: dict[str, Any]

    @property
    def is_step(self) -> bool:
        return "event" not in self.values and not self.values.get("skipped", False)

    @property
    def step(self) -> int:
        return self.values["step"]

    @property
    def num_replicas(self) -> int:
        return self.values["num_replicas"]


@dataclass(frozen=True)
class Gap:
    """The time between two committed steps of one replica."""

    start: Line
    end: Line

    @property
    def seconds(self) -> float:
        return self.end.seen_s - self.start.seen_s


class Reader:
    """Reads the metrics of all replicas while they run, in a thread. A context manager."""

    def __init__(self, metrics: Sequence[Path]) -> None:
        self._tails = [Tail(path) for path in metrics]
        self.lines: list[Line] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="reader")

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def num_replicas(self) -> int:
        return len(self._tails)

    def steps(self, replica: int | None = None, *, since_s: float = 0.0) -> list[Line]:
        """Committed steps of one replica, or of all, in the order of time."""
        return [
            line
            for line in list(self.lines)
            if line.is_step and line.seen_s >= since_s and replica in (None, line.replica)
        ]

    def events(self, name: str, replica: int, *, since_s: float) -> list[Line]:
        """Events of a replica."""
        return [
            line
            for line in list(self.lines)
            if line.values.get("event") == name
            and line.seen_s >= since_s
            and line.replica == replica
        ]

    def gaps(self, replica: int, *, since_s: float) -> list[Gap]:
        """Gaps of a replica that end after `since_s`."""
        steps = self.steps(replica)
        return [Gap(*pair) for pair in pairwise(steps) if pair[1].seen_s >= since_s]

    def median_gap_s(self, num_replicas: int) -> float:
        """Median gap of two consecutive steps of so many replicas.

        A survivor of ours processes the samples of all, so its step alone takes longer.
        """
        gaps_s = [
            gap.seconds
            for replica in range(self.num_replicas)
            for gap in self.gaps(replica, since_s=0.0)
            if gap.start.num_replicas == gap.end.num_replicas == num_replicas
            and gap.end.step == gap.start.step + 1
        ]
        return median(gaps_s) if gaps_s else float("nan")

    def stall_s(self, gap: Gap) -> float:
        """Seconds of a gap beyond the median step of as many replicas as in its end."""
        return gap.seconds - self.median_gap_s(gap.end.num_replicas)

    def progress(self) -> list[Line]:
        """The first line of each step; repeated steps are no progress."""
        forward, highest = [], 0
        for line in self.steps():
            if line.step > highest:
                highest = line.step
                forward.append(line)
        return forward

    def _read(self) -> None:
        while not self._ended.wait(_READ_S):
            for replica, tail in enumerate(self._tails):
                lines, now_s = tail.lines(), time.time()
                for line in lines:
                    with suppress(ValueError):
                        values = json.loads(line)
                        self.lines.append(Line(seen_s=now_s, replica=replica, values=values))


@dataclass(frozen=True, kw_only=True)
class FaultSchedule:
    """The faults of a run."""

    undisturbed_s: float
    """Between the first steps of all replicas and the first fault."""
    faults: int
    """Ranks that are killed, of each replica in turn, after the recovery from the one before."""
    lighthouse_faults: int = 0
    """Lighthouses that are killed, after the ranks."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class FailureSchedule:
    """Work that is done without failures, and then with failures, which come at the same times for
    all variants, recovered or not."""

    steps: int
    """Steps of all replicas whose number of tokens is the work."""
    mean_interval_s: float
    seed: int = 0

    def failures(self) -> Iterator[tuple[float, int]]:
        """Yield, without end, when a rank is killed, in seconds from the start, and its number."""
        draw, at_s = random.Random(self.seed), 0.0
        while True:
            at_s += draw.expovariate(1 / self.mean_interval_s)
            yield at_s, draw.randrange(NUM_REPLICAS)


@dataclass(frozen=True, kw_only=True)
class RestartTimes:
    """Consecutive phases of the restart of a killed rank."""

    boot_s: float
    """Time until its new process exists."""
    import_s: float
    """Time until the first line of its log: interpreter, imports, configuration, data."""
    quorum_s: float
    """Time until it receives the state: model, restoring, joining, quorum."""
    transfer_s: float
    step_s: float
    """Time until its first committed step."""

    @property
    def total_s(self) -> float:
        return self.boot_s + self.import_s + self.quorum_s + self.transfer_s + self.step_s


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Recovery from one killed rank."""

    stall_s: float
    """The longest gap between two commits of the survivor, or of all if none survives, beyond the
    median step."""
    donor_stall_s: float | None
    """The same for the step in which the other rejoins; None if there is no donor."""
    failed_steps: int
    """Aborted steps of the survivor."""
    repeated_steps: int
    """Committed steps that were trained again."""
    survivors_dead: int
    restart: RestartTimes


@dataclass(kw_only=True)
class FaultyRun:
    """Measurements of a run with faults."""

    reader: Reader
    recoveries: list[Recovery] = field(default_factory=list)
    lighthouse_stalls_s: list[float] = field(default_factory=list)
    lighthouse_deaths: int = 0
    """Ranks that died after their lighthouse."""
    undisturbed_s: float = 0.0
    """Time of the work of a `FailureSchedule` without failures."""
    disturbed_s: float = 0.0
    failures: int = 0
    """Ranks that were killed during it."""

    @property
    def goodput(self) -> float:
        """Wall time without failures over wall time with failures, for the same work."""
        return self.undisturbed_s / self.disturbed_s

    @property
    def step_s(self) -> float:
        """Median step without faults."""
        return self.reader.median_gap_s(max(step.num_replicas for step in self.reader.steps()))


def run_with_faults(
    variant: Variant, workload: Workload, schedule: FaultSchedule, folder: Path
) -> FaultyRun:
    """Run a variant and inject faults. Raises ChildFailed if it does not recover."""
    folder.mkdir(parents=True)
    draw = random.Random(schedule.seed)
    with variant.running(workload, folder) as running, Reader(running.metrics) as reader:
        faulty = FaultyRun(reader=reader)
        _wait_for_steps(running, reader, _WARMUP_STEPS, since_s=0.0)
        time.sleep(schedule.undisturbed_s)
        for index in range(schedule.faults):
            time.sleep(draw.uniform(0, _MAX_DELAY_S))
            victim = index % reader.num_replicas
            _wait(running, lambda: _now_if(running.has_spares()), "spare")
            faulty.recoveries.append(_kill_rank(running, reader, victim))
        for _ in range(schedule.lighthouse_faults):
            time.sleep(draw.uniform(0, _MAX_DELAY_S))
            _kill_lighthouse(running, reader, faulty)
    return faulty


def run_with_schedule(
    variant: Variant, workload: Workload, schedule: FailureSchedule, folder: Path
) -> FaultyRun:
    """Run a variant until it has done the work of a schedule, without failures and then with them.
    Raises ChildFailed if it does not."""
    folder.mkdir(parents=True)
    num_tokens = schedule.steps * workload.tokens_per_step
    with variant.running(workload, folder) as running, Reader(running.metrics) as reader:
        faulty = FaultyRun(reader=reader)
        _wait_for_steps(running, reader, _WARMUP_STEPS, since_s=0.0)
        faulty.undisturbed_s = _time_of(running, faulty, num_tokens, iter(()))
        faulty.disturbed_s = _time_of(running, faulty, num_tokens, schedule.failures())
    return faulty


def _time_of(
    running: Running, faulty: FaultyRun, num_tokens: int, failures: Iterator[tuple[float, int]]
) -> float:
    """Return the seconds until so many more tokens are trained, with failures."""
    first, never = faulty.reader.progress()[-1], (float("inf"), 0)
    began_s = time.time()
    deadline_s = began_s + _MAX_WORK_S
    at_s, victim = next(failures, never)
    while True:
        time.sleep(_POLL_S)
        left = num_tokens
        for line in faulty.reader.progress():
            if line.seen_s > first.seen_s:
                left -= line.values["num_target_tokens"]
            if left <= 0:
                return line.seen_s - first.seen_s
        running.check()
        if time.time() >= deadline_s:
            raise ChildFailed(f"{left} tokens are left after {_MAX_WORK_S:g} s:\n{running.log(0)}")
        if time.time() >= began_s + at_s:
            # A rank that is about to start again cannot fail.
            ranks = running.ranks(victim % faulty.reader.num_replicas)
            for rank in ranks[victim % len(ranks) :][:1] if ranks else ():
                rank.kill()
                faulty.failures += 1
            at_s, victim = next(failures, never)


def _kill_rank(running: Running, reader: Reader, victim: int) -> Recovery:
    survivors = [replica for replica in range(reader.num_replicas) if replica != victim]
    before = {rank.pid for replica in survivors for rank in running.ranks(replica)}
    own = running.ranks(victim)
    old = {rank.pid for rank in own}
    highest = max(step.step for step in reader.steps())
    killed_s = time.time()
    # The last rank, if several are one world: the first writes the steps.
    own[-1].kill()
    process_s = _wait(
        running,
        lambda: _now_if(any(rank.pid not in old for rank in running.ranks(victim))),
        "new process",
    )
    # From here, the log is that of the new generation.
    log_s = _wait(
        running, lambda: _now_if(bool(running.log(victim))), "log line of the restarted rank"
    )
    receiving_s = None
    if survivors:
        receiving_s = _wait(
            running, lambda: _now_if(RECEIVES_STATE in running.log(victim)), "state transfer"
        )
    committed = _wait(
        running,
        lambda: next((step for step in reader.steps(victim, since_s=log_s)), None),
        "step of the restarted rank",
    )
    _wait_for_steps(running, reader, _QUIET_STEPS, since_s=committed.seen_s)
    survivor = survivors[0] if survivors else victim
    stall, donor = _stalled_gaps(reader, survivor, killed_s, rejoins=bool(survivors))
    after = {rank.pid for replica in survivors for rank in running.ranks(replica)}
    transfer_s, quorum_s, ready_s = 0.0, 0.0, log_s
    if receiving_s is not None:
        healed = reader.events("healed", victim, since_s=killed_s)
        transfer_s, quorum_s = healed[-1].values["seconds"], receiving_s - log_s
        ready_s = receiving_s + transfer_s
    return Recovery(
        stall_s=reader.stall_s(stall),
        donor_stall_s=None if donor is None else reader.stall_s(donor),
        failed_steps=sum(
            len(_aborted(reader, replica, killed_s, committed.seen_s)) for replica in survivors
        ),
        repeated_steps=max(0, highest - committed.step + 1) if not survivors else 0,
        survivors_dead=len(before - after),
        restart=RestartTimes(
            boot_s=process_s - killed_s,
            import_s=log_s - process_s,
            quorum_s=quorum_s,
            transfer_s=transfer_s,
            step_s=committed.seen_s - ready_s,
        ),
    )


def _aborted(reader: Reader, replica: int, since_s: float, until_s: float) -> list[Line]:
    events = reader.events("step_failed", replica, since_s=since_s)
    return [event for event in events if event.seen_s <= until_s]


def _now_if(condition: bool) -> float | None:
    return time.time() if condition else None


def _stalled_gaps(
    reader: Reader, survivor: int, killed_s: float, *, rejoins: bool
) -> tuple[Gap, Gap | None]:
    """The survivor's longest gap before the other rejoins, and the gap in which it does."""
    gaps = reader.gaps(survivor, since_s=killed_s)
    if not rejoins:
        return max(gaps, key=lambda gap: gap.seconds), None
    place = next(
        place for place, gap in enumerate(gaps) if gap.end.num_replicas > gap.start.num_replicas
    )
    return max(gaps[:place], key=lambda gap: gap.seconds), gaps[place]


def _kill_lighthouse(running: Running, reader: Reader, faulty: FaultyRun) -> None:
    replicas = range(reader.num_replicas)
    before = {rank.pid for replica in replicas for rank in running.ranks(replica)}
    killed_s = time.time()
    running.lighthouse().kill()
    _wait_for_steps(running, reader, 5 * _QUIET_STEPS, since_s=killed_s)
    gaps = [
        max(reader.gaps(replica, since_s=killed_s), key=lambda gap: gap.seconds)
        for replica in replicas
    ]
    faulty.lighthouse_stalls_s.append(max(map(reader.stall_s, gaps)))
    after = {rank.pid for replica in replicas for rank in running.ranks(replica)}
    faulty.lighthouse_deaths += len(before - after)


def _wait_for_steps(running: Running, reader: Reader, steps: int, *, since_s: float) -> float:
    """Wait until each replica has committed so many steps with all others; return when."""

    def committed() -> float | None:
        committed_s = []
        for replica in range(reader.num_replicas):
            together = [
                line
                for line in reader.steps(replica, since_s=since_s)
                if line.num_replicas >= reader.num_replicas
            ]
            if len(together) < steps:
                return None
            committed_s.append(together[steps - 1].seen_s)
        return max(committed_s)

    return _wait(running, committed, "step of all replicas")


def _wait(running: Running, find: Callable[[], _Found | None], what: str) -> _Found:
    try:
        return wait_for(find, what, timeout_s=_TIMEOUT_S, check=running.check, poll_s=_POLL_S)
    except ChildTimeout as error:
        raise ChildFailed(f"{error}\n{running.log(0)[-3000:]}") from None
