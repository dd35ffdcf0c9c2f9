"""A run that is disturbed: what each fault has cost, and how far the run came meanwhile."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from benchmarks.processes import ChildFailed
from benchmarks.recovery_reader import Gap, Reader, Told
from benchmarks.recovery_sides import Running, Side, Work

_Found = TypeVar("_Found")
_PATIENCE_S = 120.0
_LOOK_S = 0.01
_QUIET_STEPS = 4
"""That all take together before a fault counts as over."""
_WARMUP_STEPS = 5
_LONGEST_DELAY_S = 0.5
_RECEIVING = "Receiving the state of another replica"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a run is disturbed."""

    undisturbed_s: float
    """After all take part, before the first fault."""
    faults: int
    """Ranks that are killed and return, of each replica in turn."""
    period_s: float
    """From one to the next; longer where the run has not recovered."""
    lighthouse_faults: int = 0
    """Lighthouses that are killed, after those."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Return:
    """Of the rank that was killed, in seconds one after the other."""

    boot_s: float
    """Until its new process is there."""
    import_s: float
    """Until that says the first word: interpreter, imports, configuration, data."""
    quorum_s: float
    """Until it receives the state: model, restoring, joining, the quorum."""
    transfer_s: float
    step_s: float
    """Until its first committed step can be read."""

    @property
    def total_s(self) -> float:
        return self.boot_s + self.import_s + self.quorum_s + self.transfer_s + self.step_s


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """From one rank that was killed."""

    stall_s: float
    """The longest gap between two commits of the survivor, or of all where nobody survives, less
    the median step."""
    donor_stall_s: float | None
    """The same for the step in which the other returns; None where nobody gives a state."""
    failed_steps: int
    """Of the survivor, uncommitted."""
    repeated_steps: int
    """That had been committed, and were taken again."""
    survivors_dead: int
    returned: Return


@dataclass(kw_only=True)
class Disturbed:
    """What came of a run."""

    reader: Reader
    recoveries: list[Recovery] = field(default_factory=list)
    lighthouse_stalls_s: list[float] = field(default_factory=list)
    lighthouse_deaths: int = 0
    """Of ranks, since their lighthouse died."""
    undisturbed_tokens_per_s: float = 0.0
    disturbed_tokens_per_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Undisturbed wall time over disturbed, for the same samples."""
        return self.disturbed_tokens_per_s / self.undisturbed_tokens_per_s

    @property
    def step_s(self) -> float:
        """Undisturbed."""
        return self.reader.median_gap_s(max(one.num_replicas for one in self.reader.steps()))


def disturb(side: Side, work: Work, schedule: Schedule, folder: Path) -> Disturbed:
    """Start the side, strike it, and end it. Raises ChildFailed where it does not recover."""
    folder.mkdir(parents=True)
    draw = random.Random(schedule.seed)
    with side.running(work, folder) as running, Reader(running.metrics) as reader:
        found = Disturbed(reader=reader)
        began_s = _all_take_part(running, reader, _WARMUP_STEPS, since_s=0.0)
        time.sleep(schedule.undisturbed_s)
        first_s = time.time()
        struck_at = []
        for number in range(schedule.faults):
            if number:
                time.sleep(max(0.0, struck_at[-1] + schedule.period_s - time.time()))
            time.sleep(draw.uniform(0, _LONGEST_DELAY_S))
            victim = number % reader.num_replicas
            struck_at.append(time.time())
            found.recoveries.append(_kill_rank(running, reader, victim))
        time.sleep(max(0.0, struck_at[-1] + schedule.period_s - time.time()))
        found.undisturbed_tokens_per_s = _tokens_per_s(reader, began_s, first_s)
        found.disturbed_tokens_per_s = _tokens_per_s(reader, first_s, time.time())
        for _ in range(schedule.lighthouse_faults):
            time.sleep(draw.uniform(0, _LONGEST_DELAY_S))
            _kill_lighthouse(running, reader, found)
    return found


def _kill_rank(running: Running, reader: Reader, victim: int) -> Recovery:
    others = [one for one in range(reader.num_replicas) if one != victim]
    before = {rank.pid for other in others for rank in running.ranks(other)}
    own = running.ranks(victim)
    old = {rank.pid for rank in own}
    highest = max(one.step for one in reader.steps())
    killed_s = time.time()
    # The last rank, where several are one world: the first one tells of the steps.
    own[-1].kill()
    process_s = _wait(
        running,
        lambda: _seen(any(rank.pid not in old for rank in running.ranks(victim))),
        "a new process",
    )
    # From here on the log is that of the new attempt.
    word_s = _wait(running, lambda: _seen(bool(running.log(victim))), "its first word")
    receiving_s = None
    if others:
        receiving_s = _wait(
            running, lambda: _seen(_RECEIVING in running.log(victim)), "a state to receive"
        )
    committed = _wait(
        running,
        lambda: next((one for one in reader.steps(victim, since_s=word_s)), None),
        "its first step",
    )
    _all_take_part(running, reader, _QUIET_STEPS, since_s=committed.seen_s)
    survivor = others[0] if others else victim
    stall, donor = _gaps_of(reader, survivor, killed_s, returns=bool(others))
    after = {rank.pid for other in others for rank in running.ranks(other)}
    transfer_s, quorum_s, ready_s = 0.0, 0.0, word_s
    if receiving_s is not None:
        healed = reader.events("healed", victim, since_s=killed_s)
        transfer_s, quorum_s = healed[-1].values["seconds"], receiving_s - word_s
        ready_s = receiving_s + transfer_s
    return Recovery(
        stall_s=reader.stall_s(stall),
        donor_stall_s=None if donor is None else reader.stall_s(donor),
        failed_steps=sum(
            len(_failed(reader, other, killed_s, committed.seen_s)) for other in others
        ),
        repeated_steps=max(0, highest - committed.step + 1) if not others else 0,
        survivors_dead=len(before - after),
        returned=Return(
            boot_s=process_s - killed_s,
            import_s=word_s - process_s,
            quorum_s=quorum_s,
            transfer_s=transfer_s,
            step_s=committed.seen_s - ready_s,
        ),
    )


def _failed(reader: Reader, replica: int, since_s: float, until_s: float) -> list[Told]:
    events = reader.events("step_failed", replica, since_s=since_s)
    return [one for one in events if one.seen_s <= until_s]


def _seen(there: bool) -> float | None:
    return time.time() if there else None


def _gaps_of(
    reader: Reader, survivor: int, killed_s: float, *, returns: bool
) -> tuple[Gap, Gap | None]:
    """The survivor's longest gap before the other returns, and the one in which it does."""
    gaps = reader.gaps(survivor, since_s=killed_s)
    if not returns:
        return max(gaps, key=lambda gap: gap.seconds), None
    place = next(
        place for place, gap in enumerate(gaps) if gap.end.num_replicas > gap.start.num_replicas
    )
    return max(gaps[:place], key=lambda gap: gap.seconds), gaps[place]


def _kill_lighthouse(running: Running, reader: Reader, found: Disturbed) -> None:
    replicas = range(reader.num_replicas)
    before = {rank.pid for one in replicas for rank in running.ranks(one)}
    killed_s = time.time()
    running.lighthouse().kill()
    _all_take_part(running, reader, 5 * _QUIET_STEPS, since_s=killed_s)
    gaps = [
        max(reader.gaps(one, since_s=killed_s), key=lambda gap: gap.seconds) for one in replicas
    ]
    found.lighthouse_stalls_s.append(max(map(reader.stall_s, gaps)))
    after = {rank.pid for one in replicas for rank in running.ranks(one)}
    found.lighthouse_deaths += len(before - after)


def _all_take_part(running: Running, reader: Reader, steps: int, *, since_s: float) -> float:
    """Wait until each replica has taken so many steps with all others. Returns when that was."""

    def look() -> float | None:
        found = []
        for replica in range(reader.num_replicas):
            together = [
                one
                for one in reader.steps(replica, since_s=since_s)
                if one.num_replicas >= reader.num_replicas
            ]
            if len(together) < steps:
                return None
            found.append(together[steps - 1].seen_s)
        return max(found)

    return _wait(running, look, "steps of all replicas")


def _wait(running: Running, look: Callable[[], _Found | None], what: str) -> _Found:
    deadline_s = time.monotonic() + _PATIENCE_S
    while (found := look()) is None:
        running.check()
        if time.monotonic() >= deadline_s:
            raise ChildFailed(
                f"{what} did not come in {_PATIENCE_S:g} s:\n{running.log(0)[-3000:]}"
            )
        time.sleep(_LOOK_S)
    return found


def _tokens_per_s(reader: Reader, start_s: float, stop_s: float) -> float:
    """Between the last commit before the start and the last before the stop."""
    steps = reader.progress()
    first = max((one for one in steps if one.seen_s <= start_s), key=lambda one: one.seen_s)
    within = [one for one in steps if first.seen_s < one.seen_s <= stop_s]
    tokens = sum(one.values["num_target_tokens"] for one in within)
    return tokens / (within[-1].seen_s - first.seen_s)
