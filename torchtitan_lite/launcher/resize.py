"""Changes of the number of ranks per replica: all replicas save, leave, and restart with the new
number.

Invariant: replicas that run at the same time have the same number of ranks, because each rank
reduces its shards of the gradients with the same shards of the others.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.launcher.replica_process import ReplicaProcess, ReplicaState

_MAX_FAILURES = 3
"""Consecutive failures of one rank after which its slot counts as lost."""
_STREAK_GAP_S = 120.0
"""Maximum time between two failures of a streak: a start, some steps, and the delay of a
restart."""
_MAX_BYTES = 1 << 16
_READ_INTERVAL_S = 0.25


class SlotsFile:
    """File with the number of ranks available to each replica.

    Whatever manages the machines writes it: JSON such as {"0": 2, "1": 1}, by the number of the
    replica; a replica that is not listed has no limit. Invariant: a file that is missing, malformed
    or being written changes nothing.
    """

    def __init__(self, path: Path | None, report_event: Callable[[str], None]) -> None:
        """`path` is None if there is no such file. `report_event` reports a malformed file to the
        user."""
        self._path, self._report_event = path, report_event
        self._slots: Mapping[int, int] = {}
        self._content: bytes | None = b""
        self._read_at_s = float("-inf")

    def read(self, now_s: float) -> Mapping[int, int]:
        """Return the number of ranks available, by replica."""
        if self._path is not None and now_s >= self._read_at_s:
            self._read_at_s = now_s + _READ_INTERVAL_S
            self._read(self._path)
        return self._slots

    def _read(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES)
        except OSError:
            content = None
        if content == self._content:
            return
        self._content = content
        found = None if content is None else parse_slots(content)
        if found is not None:
            self._slots = found
        else:
            self._report_event(f'{path} is not of the form {{"0": 2, "1": 1}}: it is ignored')


class ResizePolicy:
    """Decides the number of ranks per replica: the largest that all replicas can run. It has no
    clock and no I/O.

    A rank that fails repeatedly is taken for a lost slot, which is tried again later, each time
    after twice the delay.
    """

    def __init__(self, allowed: Sequence[int], num_replicas: int, *, regrow_after_s: float) -> None:
        """`allowed` holds the numbers of ranks, ascending. A lost slot is tried again after
        `regrow_after_s`."""
        self._allowed, self._num_replicas, self._regrow_after_s = (
            allowed,
            num_replicas,
            regrow_after_s,
        )
        self._streaks: dict[int, _FailureStreak] = {}
        self._lost: dict[int, _LostSlot] = {}

    def record_failure(self, replica: int, rank: int, num_ranks: int, now_s: float) -> None:
        """Record that a rank of a replica with `num_ranks` ranks has failed."""
        row = self._streaks.get(replica)
        is_in_row = row is not None and row.rank == rank and now_s - row.last_s <= _STREAK_GAP_S
        count = 1 + (row.count if is_in_row and row is not None else 0)
        self._streaks[replica] = _FailureStreak(rank, count, now_s)
        if count >= _MAX_FAILURES and num_ranks > self._allowed[0]:
            before = self._lost.get(replica)
            times = 1 if before is None else before.times + 1
            back_at_s = now_s + self._regrow_after_s * 2 ** (times - 1)
            self._lost[replica] = _LostSlot(num_ranks - 1, back_at_s, times)
            del self._streaks[replica]

    def target(self, slots: Mapping[int, int], now_s: float) -> tuple[int, str]:
        """Return the number of ranks that each replica should have, and what limits it. `slots`
        holds the number of ranks available to a replica, where known."""
        most = self._allowed[-1]
        given, reasons = most, []
        for replica in range(self._num_replicas):
            loss = self._lost.get(replica)
            if slots.get(replica, most) < most:
                reasons.append(f"replica {replica} has slots for {slots[replica]}")
                given = min(given, slots[replica])
            if loss is not None and now_s < loss.back_at_s:
                reasons.append(f"a rank of replica {replica} failed {_MAX_FAILURES} times in a row")
                given = min(given, loss.left)
        fitting = [number for number in self._allowed if number <= given]
        return (fitting or self._allowed)[-1 if fitting else 0], "; ".join(reasons)


class Resizer:
    """Resizes all replicas when the number of ranks available changes."""

    def __init__(
        self,
        policy: ResizePolicy,
        slots: SlotsFile,
        *,
        grace_s: float,
        report_event: Callable[[str], None],
    ) -> None:
        """`grace_s` is the time for replicas to save and leave."""
        self._policy, self._slots, self._grace_s, self._report_event = (
            policy,
            slots,
            grace_s,
            report_event,
        )
        self.num_ranks = 0
        """Number of ranks of each replica that starts now."""
        self._target = 0
        self._deadline_s: float | None = None
        """Time by which all replicas must have left; None while no resize is in progress."""

    def choose_initial(self, now_s: float) -> None:
        """Choose the number of ranks for the first start."""
        self.num_ranks, reason = self._policy.target(self._slots.read(now_s), now_s)
        if reason:
            self._report_event(f"replicas start with {_ranks(self.num_ranks)} each: {reason}")

    def record_failure(self, replica: int, rank: int, now_s: float) -> None:
        """Record that a rank of a replica has failed."""
        self._policy.record_failure(replica, rank, self.num_ranks, now_s)

    def poll(self, replicas: Sequence[ReplicaProcess], now_s: float) -> None:
        """Start, continue or complete a resize."""
        if self._deadline_s is None:
            self._check_target(replicas, now_s)
        elif all(one.has_left for one in replicas):
            self.num_ranks, self._deadline_s = self._target, None
            for replica in replicas:
                if not replica.is_over:
                    replica.start_attempt()
        elif now_s >= self._deadline_s:
            for replica in replicas:
                replica.kill()

    def _check_target(self, replicas: Sequence[ReplicaProcess], now_s: float) -> None:
        target, reason = self._policy.target(self._slots.read(now_s), now_s)
        if target == self.num_ranks or any(one.is_over for one in replicas):
            # When one replica has finished, all are about to finish.
            return
        if target > self.num_ranks:
            if any(one.state is not ReplicaState.TRAINING for one in replicas):
                # Growing can wait until all replicas train again.
                return
            reason = reason or "slots are available again"
        self._target, self._deadline_s = target, now_s + self._grace_s
        self._report_event(f"all replicas resize to {_ranks(target)} each: {reason}")
        for replica in replicas:
            replica.resize()


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse the allowed numbers of ranks per replica, ascending: "2", "1:4" (1 to 4) or "1,2,4".
    Raises ConfigError."""
    low, is_range, high = text.partition(":")
    try:
        numbers = range(int(low), int(high) + 1) if is_range else map(int, text.split(","))
        found = set(numbers)
    except ValueError:
        found = set()
    if not found or min(found) < 1:
        raise ConfigError(
            f"--nproc-per-replica is {text}, but must be a number of ranks such as 2, or several "
            "of them: 1:4 for 1 to 4, or 1,2,4."
        )
    return tuple(sorted(found))


def parse_slots(content: bytes) -> Mapping[int, int] | None:
    """Parse the number of ranks available, by replica. Return None if the content is malformed."""
    try:
        values = json.loads(content)
        if not isinstance(values, dict):
            return None
        if not all(type(number) is int and number >= 0 for number in values.values()):
            return None
        return {int(replica): number for replica, number in values.items()}
    except (ValueError, RecursionError):
        return None


@dataclass
class _FailureStreak:
    """Consecutive failures of one rank."""

    rank: int
    count: int
    last_s: float


@dataclass
class _LostSlot:
    """Loss of the last slots of a replica."""

    left: int
    """Number of slots that remain."""
    back_at_s: float
    """Time at which the lost slots are tried again."""
    times: int


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"
