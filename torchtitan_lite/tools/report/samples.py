"""Proof from files alone that a run used every sample exactly once: the check of sample ledgers.

The history of a replica is replayed from its ledgers, generation by generation. A generation, or a
state that was received, begins at a step; the later ones of the replica's own history are
abandoned. An attempt without an outcome, of a process that died, is committed if another rank or
replica committed it, or if a later generation begins at its step or after it. Steps of a state that
another replica received stay, even where their sender restarted from an older one. What remains is
one attempt for each step, whose shares must be exactly the samples from its position on, and whose
position must be the end of the step before it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.core.errors import UserError
from torchtitan_lite.core.outputs import (
    LEDGER_COMMITTED,
    LEDGER_GENERATION,
    LEDGER_OUTCOME,
    LEDGER_PLACED,
    LEDGER_SAMPLES,
)

_LEDGER = re.compile(r"samples_rank_(\d{1,9})\.jsonl")
_REPLICA = re.compile(r"replica_\d{1,9}")
_FORMER_GENERATION = "session"
"""What `LEDGER_GENERATION` and the key `generation_id` were called: a run may have continued such a
ledger."""
_MAX_SHOWN = 5

Key = tuple[str, int, int]
"""An attempt: token, step and position. Equal on all ranks and replicas that take part."""


@dataclass(frozen=True, kw_only=True)
class SampleCheck:
    """Result of a check."""

    samples: Mapping[int, Sequence[int]]
    """Samples of each committed step, ascending."""
    num_abandoned: int
    """Attempts that are not part of the history: aborted, or of a state that was lost."""
    num_recovered: int
    """Attempts of processes that died before they recorded the outcome, but had committed."""
    num_skipped: int
    """Samples of skipped steps and of steps that were rolled back on purpose."""
    problems: Sequence[str]

    def summary(self) -> str:
        """Return the result, one line per problem."""
        if self.problems:
            shown = [f"FAILED: {problem}" for problem in self.problems[:_MAX_SHOWN]]
            more = len(self.problems) - _MAX_SHOWN
            return "\n".join([*shown, *([f"and {more} more problems"] if more > 0 else [])])
        used = sum(map(len, self.samples.values()))
        return (
            f"OK: {len(self.samples)} steps used {used} samples, each exactly once; "
            f"{self.num_skipped} samples skipped, {self.num_abandoned} attempts abandoned, "
            f"{self.num_recovered} decided by the state that a later process restored"
        )


@dataclass
class _StepAttempt:
    """An attempt at a step by one replica: the lines of its ranks."""

    key: Key
    size: int
    share: int
    shares: int
    time: float
    by_batch_rank: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    outcome: str | None = None
    after: tuple[int, int] | None = None
    """Step and position after it."""


@dataclass
class _Generation:
    """A start of a replica: what happened in it, in order. A pair is a received state."""

    step: int
    cursor: int
    time: float
    happened: list[_StepAttempt | tuple[int, int]] = field(default_factory=list[Any])


@dataclass
class _History:
    """Last commit of a replica at each step."""

    attempts: dict[int, _StepAttempt] = field(default_factory=dict[int, _StepAttempt])
    is_placed_after: dict[int, bool] = field(default_factory=dict[int, bool])
    """Whether the replica received another state after the step."""
    received: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Steps and positions of received states that the replica has not gone back behind."""
    voided: dict[Key, _StepAttempt] = field(default_factory=dict[Key, _StepAttempt])
    rolled_back: list[_StepAttempt] = field(default_factory=list[_StepAttempt])


def check_samples(folder: Path) -> SampleCheck:
    """Check the sample ledgers in the dump folder of a run. Raises UserError if there are none."""
    problems: list[str] = []
    replicas = [_generations(path, problems) for path in _folders(folder)]
    replicas = [replica for replica in replicas if replica]
    if not replicas:
        raise UserError(
            f"{folder} has no sample ledger. Set debug.sample_ledger = true before the run."
        )
    num_recovered = _decide(replicas)
    histories = [_history(generations) for generations in replicas]
    merged = _merged(histories, problems)
    of_replica = [
        [
            attempt
            for generation in generations
            for attempt in generation.happened
            if isinstance(attempt, _StepAttempt)
        ]
        for generations in replicas
    ]
    by_key: dict[Key, list[list[_StepAttempt]]] = {}
    for own in of_replica:
        own_by_key: dict[Key, list[_StepAttempt]] = {}
        for attempt in own:
            own_by_key.setdefault(attempt.key, []).append(attempt)
        for key, some in own_by_key.items():
            by_key.setdefault(key, []).append(some)
    attempts = [attempt for own in of_replica for attempt in own]
    first = min(generation.step for generations in replicas for generation in generations)
    starts = {
        (generation.step, generation.cursor)
        for generations in replicas
        for generation in generations
    }
    dropped = _dropped(attempts, histories)
    samples: dict[int, list[int]] = {}
    end = min(cursor for step, cursor in starts if step == first)
    last = max(merged, default=first)
    num_skipped = 0
    for step in range(first + 1, last + 1):
        key = merged.get(step)
        if key is None:
            problems.append(
                f"step {step} is not in the ledgers: its samples from {end} on are lost"
            )
            continue
        used = _used(key, by_key[key], problems)
        samples[step] = used
        if key[2] < end:
            problems.append(f"step {step} began at sample {key[2]}, but {end} was next: used twice")
        elif lost := [sample for sample in range(end, key[2]) if sample not in dropped]:
            problems.append(
                f"step {step} began at sample {key[2]}, but {end} was next: {len(lost)} samples "
                "are lost"
            )
        num_skipped += max(0, key[2] - end)
        end = key[2] + max(attempt.size for own in by_key[key] for attempt in own)
    kept = set(merged.values())
    return SampleCheck(
        samples=samples,
        num_abandoned=len(
            {(attempt.key, attempt.outcome) for attempt in attempts if attempt.key not in kept}
        ),
        num_recovered=num_recovered,
        num_skipped=num_skipped,
        problems=problems,
    )


def _folders(folder: Path) -> Iterator[Path]:
    yield folder
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if _REPLICA.fullmatch(path.name))


def _generations(folder: Path, problems: list[str]) -> list[_Generation]:
    """Read the ledgers of a replica: its generations, as the leader recorded them. Lines of another
    generation of another rank belong to an earlier run with more ranks."""
    by_rank = {
        int(match[1]): path
        for path in (sorted(folder.iterdir()) if folder.is_dir() else [])
        if (match := _LEDGER.fullmatch(path.name))
    }
    generations: dict[str, _Generation] = {}
    attempts: dict[tuple[str, Key, int], _StepAttempt] = {}
    for rank in sorted(by_rank):
        reader = _RankReader(by_rank[rank], rank == min(by_rank), generations, attempts, problems)
        for number, line in _lines(by_rank[rank], problems):
            reader.read(number, line)
    return list(generations.values())


def _lines(path: Path, problems: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise ValueError
            yield number, values
        except (ValueError, RecursionError):
            if line.endswith(b"\n"):
                problems.append(f"{path}: line {number} is not a record")


class _RankReader:
    """Reader of the ledger of one rank, which checks that the rank was where it says."""

    def __init__(
        self,
        path: Path,
        is_leader: bool,
        generations: dict[str, _Generation],
        attempts: dict[tuple[str, Key, int], _StepAttempt],
        problems: list[str],
    ) -> None:
        self._path, self._is_leader = path, is_leader
        self._generations, self._attempts, self._problems = generations, attempts, problems
        self._generation: _Generation | None = None
        self._generation_id = ""
        self._batch_rank = 0
        self._position = (0, 0)
        self._open: _StepAttempt | None = None
        self._misplaced: str | None = None
        """Problem with the position of the open attempt, if it is committed."""
        self._tries: Counter[Key] = Counter()

    def read(self, number: int, line: Mapping[str, Any]) -> None:
        """Read a line. A line with wrong types is a problem."""
        try:
            self._read(line)
        except (KeyError, TypeError, ValueError) as error:
            self._problems.append(f"{self._path}: line {number}: {error!r}")

    def _read(self, line: Mapping[str, Any]) -> None:
        event, step, cursor = line["event"], int(line["step"]), int(line["cursor"])
        if event in (LEDGER_GENERATION, _FORMER_GENERATION):
            key = "generation_id" if event == LEDGER_GENERATION else _FORMER_GENERATION
            self._begin_generation(str(line[key]), line, step, cursor)
        elif self._generation is None:
            # The leader has not recorded this generation.
            return
        elif event == LEDGER_SAMPLES:
            self._begin_attempt(line, step, cursor)
        elif event == LEDGER_OUTCOME:
            self._end_attempt(str(line["outcome"]), step, cursor)
        elif event == LEDGER_PLACED:
            self._position = step, cursor
            if self._is_leader:
                self._generation.happened.append((step, cursor))

    def _begin_generation(
        self, generation_id: str, line: Mapping[str, Any], step: int, cursor: int
    ) -> None:
        self._generation_id, self._open = generation_id, None
        self._batch_rank = int(line["batch_rank"])
        self._position = step, cursor
        self._tries.clear()
        if self._is_leader:
            self._generations[self._generation_id] = _Generation(step, cursor, float(line["time"]))
        self._generation = self._generations.get(self._generation_id)

    def _begin_attempt(self, line: Mapping[str, Any], step: int, cursor: int) -> None:
        assert self._generation is not None
        if self._open is not None:
            self._problem(f"step {self._open.key[1]} has no outcome, but the rank continued")
        self._misplaced = None
        if (step - 1, cursor) != self._position:
            at, place = self._position
            self._misplaced = (
                f"step {step} began at sample {cursor}, but the rank was at sample {place} after "
                f"step {at}"
            )
        key = (str(line["attempt"]), step, cursor)
        self._tries[key] += 1
        name = (self._generation_id, key, self._tries[key])
        if name not in self._attempts:
            share, shares = int(line["share"]), int(line["shares"])
            made = _StepAttempt(key, int(line["size"]), share, shares, float(line["time"]))
            self._attempts[name] = made
            self._generation.happened.append(made)
        self._open = self._attempts[name]
        used = [int(sample) for sample in line["samples"]]
        first_used = self._open.by_batch_rank.setdefault(self._batch_rank, used)
        if first_used != used:
            self._problem(
                f"step {step}: ranks that read the same samples have {used} and {first_used}"
            )

    def _end_attempt(self, outcome: str, step: int, cursor: int) -> None:
        if self._open is None:
            self._problem(f"an outcome after step {step}, but no attempt: its line is lost")
            self._position = step, cursor
            return
        attempt, self._open = self._open, None
        if self._misplaced is not None and outcome == LEDGER_COMMITTED:
            # Steps of a rank at a wrong position are aborted.
            self._problem(self._misplaced)
        if attempt.outcome not in (None, outcome):
            self._problem(f"step {attempt.key[1]}: {outcome} and {attempt.outcome}")
        _, own_step, start = attempt.key
        if outcome == LEDGER_COMMITTED and (step, cursor) != (own_step, start + attempt.size):
            self._problem(f"step {own_step} was committed, but the rank is at sample {cursor}")
        attempt.outcome, attempt.after = outcome, (step, cursor)
        self._position = step, cursor

    def _problem(self, text: str) -> None:
        self._problems.append(f"{self._path}: {text}")


def _decide(replicas: Sequence[Sequence[_Generation]]) -> int:
    """Decide the attempts without an outcome, and return how many steps are committed by the
    position of a later generation alone."""
    attempts = [
        (place, generations, attempt)
        for generations in replicas
        for place, generation in enumerate(generations)
        for attempt in generation.happened
        if isinstance(attempt, _StepAttempt)
    ]
    committed = {attempt.key for *_, attempt in attempts if attempt.outcome == LEDGER_COMMITTED}
    known = _merged([_history(generations) for generations in replicas], [])
    recovered: set[Key] = set()
    for place, generations, attempt in attempts:
        if attempt.outcome is None and attempt.key not in committed and attempt.key[1] not in known:
            later = generations[place + 1 : place + 2]
            if any(generation.step >= attempt.key[1] for generation in later):
                recovered.add(attempt.key)
    for *_, attempt in attempts:
        if attempt.outcome is None and attempt.key in committed | recovered:
            attempt.outcome = LEDGER_COMMITTED
            attempt.after = attempt.key[1], attempt.key[2] + attempt.size
    return len(recovered)


def _history(generations: Sequence[_Generation]) -> _History:
    """Replay what a replica did."""
    history = _History()
    for generation in generations:
        _go_back(history, generation.step)
        for event in generation.happened:
            if isinstance(event, tuple):
                _go_back(history, event[0])
                history.received.append(event)
            elif event.outcome == LEDGER_COMMITTED:
                history.attempts[event.key[1]] = event
                history.is_placed_after[event.key[1]] = False
            elif event.after is not None and event.after[0] < event.key[1] - 1:
                history.rolled_back += [
                    kept for step, kept in history.attempts.items() if step > event.after[0]
                ]
                _go_back(history, event.after[0])
    return history


def _go_back(history: _History, step: int) -> None:
    """Continue from a state after `step`."""
    for undone in [attempted for attempted in history.attempts if attempted > step]:
        attempt = history.attempts.pop(undone)
        history.voided[attempt.key] = attempt
    history.received = [entry for entry in history.received if entry[0] <= step]
    history.is_placed_after = dict.fromkeys(history.attempts, True)


def _merged(histories: Sequence[_History], problems: list[str]) -> dict[int, Key]:
    """Return the attempt of each step that is part of the final state."""
    merged: dict[int, Key] = {}
    for step in sorted({step for history in histories for step in history.attempts}):
        candidates = [
            (history, history.attempts[step]) for history in histories if step in history.attempts
        ]
        keys = {attempt.key for _, attempt in candidates}
        if len(keys) > 1:
            # A replica that went on from another state, or died, has left its own history.
            valid = {
                attempt.key
                for history, attempt in candidates
                if not history.is_placed_after[step] and step != max(history.attempts)
            }
            keys = valid or keys
        if len(keys) > 1:
            keys = {
                key for key in keys if all(key not in history.voided for history in histories)
            } or keys
        if len(keys) > 1:
            newest = max(candidates, key=lambda candidate: candidate[1].time)
            if step != max(step for history in histories for step in history.attempts):
                problems.append(f"step {step} was committed in {len(keys)} histories")
            keys = {newest[1].key}
        (merged[step],) = keys
    _add_inherited(histories, merged)
    return merged


def _add_inherited(histories: Sequence[_History], merged: dict[int, Key]) -> None:
    """Add the steps that only their sender committed, before it died and restarted from an older
    state: they are part of the state that another replica had received."""
    ends: dict[tuple[int, int], _StepAttempt] = {}
    for attempt in sorted(
        (attempt for history in histories for attempt in history.voided.values()),
        key=lambda attempt: attempt.time,
    ):
        ends[attempt.key[1], attempt.key[2] + attempt.size] = attempt
    for history in histories:
        for step, cursor in history.received:
            while step not in merged and (step, cursor) in ends:
                merged[step] = key = ends[step, cursor].key
                step, cursor = step - 1, key[2]


def _dropped(attempts: Sequence[_StepAttempt], histories: Sequence[_History]) -> set[int]:
    """Return the samples of skipped steps, and of those that were rolled back on purpose."""
    skipped = [
        attempt
        for attempt in attempts
        if attempt.after is not None
        and attempt.after[1] > attempt.key[2]
        and attempt.outcome != LEDGER_COMMITTED
    ]
    rolled_back = [attempt for history in histories for attempt in history.rolled_back]
    return {
        sample
        for attempt in (*skipped, *rolled_back)
        for sample in range(attempt.key[2], attempt.key[2] + attempt.size)
    }


def _used(key: Key, attempts: Sequence[Sequence[_StepAttempt]], problems: list[str]) -> list[int]:
    """Return the samples of a committed attempt, which must be those from its position on.
    `attempts` are those of each replica."""
    used: list[int] = []
    for own in attempts:
        # A replica may record its share again, after a restart.
        by_place: dict[tuple[int, int], list[int]] = {}
        for attempt in own:
            for batch_rank, samples in attempt.by_batch_rank.items():
                if attempt.share >= 0:
                    by_place[attempt.share, batch_rank] = samples
        used += [sample for samples in by_place.values() for sample in samples]
    used.sort()
    start, size = key[2], max(attempt.size for own in attempts for attempt in own)
    if used != list(range(start, start + size)):
        twice = sorted(sample for sample, times in Counter(used).items() if times > 1)
        missing = sorted(set(range(start, start + size)) - set(used))
        of_others = sorted(set(used) - set(range(start, start + size)))
        for name, some in (("used twice", twice), ("lost", missing), ("of other steps", of_others)):
            if some:
                problems.append(f"step {key[1]}: samples {some[:_MAX_SHOWN]} are {name}")
    return used
