"""Changes of the mesh of all replicas: when the number of available ranks changes, or on request.

Replicas whose ranks have an agent (`--spares`) move to the new mesh in their processes. Otherwise,
or if one of them cannot, all replicas save, leave and start again.

Invariant: replicas that run at the same time have the same mesh, because each rank reduces its
shards of the gradients with the same shards of the others.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.fault_tolerance.supervision.launcher.replica_process import (
    ReplicaProcess,
    ReplicaState,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    LEAVE_S,
    Permission,
    RequestInbox,
    ResizeRequest,
    ResizeState,
    RunMesh,
)

_MAX_FAILURES = 3
"""Consecutive failures of one rank after which its slot counts as lost."""
_STREAK_GAP_S = 120.0
"""Maximum time between two failures of a streak: a start, some steps, and the delay of a
restart."""
_READY_S = 600.0
"""Time in which the new processes of all replicas must have imported everything."""
_DONE_S = 1800.0
"""Time for the first step on a new mesh, which may compile."""
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
        slots = None if content is None else parse_slots(content)
        if slots is not None:
            self._slots = slots
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

    @property
    def most(self) -> int:
        """The largest allowed number of ranks."""
        return self._allowed[-1]

    def available(self, slots: Mapping[int, int], now_s: float) -> tuple[int, str]:
        """Return the number of ranks that every replica has slots for, at most the largest allowed
        one, and what limits it. `slots` holds the number of ranks available to a replica, where
        known."""
        available, reasons = self.most, []
        for replica in range(self._num_replicas):
            loss = self._lost.get(replica)
            if slots.get(replica, self.most) < self.most:
                reasons.append(f"replica {replica} has slots for {slots[replica]}")
                available = min(available, slots[replica])
            if loss is not None and now_s < loss.back_at_s:
                reasons.append(f"a rank of replica {replica} failed {_MAX_FAILURES} times in a row")
                available = min(available, loss.left)
        return available, "; ".join(reasons)

    def largest(self, available: int) -> int:
        """Return the largest allowed number of ranks that fits, or else the smallest."""
        return max((size for size in self._allowed if size <= available), default=self._allowed[0])


class Resizer:
    """Resizes all replicas when the number of ranks available changes, and on request."""

    def __init__(
        self,
        policy: ResizePolicy,
        slots: SlotsFile,
        inbox: RequestInbox,
        *,
        grace_s: float,
        report_event: Callable[[str], None],
    ) -> None:
        """`inbox` receives requests; `grace_s` is the time for replicas to save and leave."""
        self._policy, self._slots, self._inbox = policy, slots, inbox
        self._grace_s, self._report_event = grace_s, report_event
        self.mesh = RunMesh(policy.most)
        """Mesh of each replica that starts now."""
        self._requested: RunMesh | None = None
        """Mesh of the newest request that was followed, while there are slots for it."""
        self._request: _UserRequest | None = None
        self._in_place: _InPlaceResize | None = None
        self._cancelled: _InPlaceResize | None = None
        """A resize that not all agents have been told to cancel."""
        self._former = self._target = self.mesh
        self._deadline_s: float | None = None
        """Time by which all replicas must have left; None while they are not restarted."""

    def choose_initial(self, now_s: float) -> None:
        """Choose the mesh of the first start."""
        self.mesh, reason = self._wanted(now_s)
        if reason:
            self._report_event(f"replicas start with {self.mesh} each: {reason}")

    def record_failure(self, replica: int, rank: int, now_s: float) -> None:
        """Record that a rank of a replica has failed."""
        self._policy.record_failure(replica, rank, self.mesh.num_ranks, now_s)

    def poll(self, replicas: Sequence[ReplicaProcess], now_s: float) -> None:
        """Start, continue or complete a resize."""
        self._inbox.repeat(now_s)
        if self._cancelled is not None and self._cancelled.write_permissions(now_s):
            self._cancelled = None
        if self._in_place is not None:
            self._continue_in_place(self._in_place, replicas, now_s)
        elif self._deadline_s is None:
            self._read_request(replicas, now_s)
            self._check_target(replicas, now_s)
        elif all(replica.has_left for replica in replicas):
            self.mesh, self._deadline_s = self._target, None
            for replica in replicas:
                if not replica.is_over:
                    replica.start_generation()
        elif now_s >= self._deadline_s:
            for replica in replicas:
                replica.kill()

    def end(self, reason: str) -> None:
        """Answer the request that is being followed: the replicas stop or have stopped."""
        if self._request is not None:
            self._inbox.answer(self._request.request, ResizeState.FAILED, reason)
            self._request = None

    def _wanted(self, now_s: float) -> tuple[RunMesh, str]:
        """Return the mesh that each replica should have, and what limits it."""
        available, reason = self._policy.available(self._slots.read(now_s), now_s)
        if self._requested is not None and self._requested.num_ranks <= available:
            return self._requested, "it was requested"
        return RunMesh(self._policy.largest(available)), reason

    def _read_request(self, replicas: Sequence[ReplicaProcess], now_s: float) -> None:
        if not _all_train(replicas):
            return
        request = self._inbox.poll(now_s)
        if request is None:
            return
        available, limit = self._policy.available(self._slots.read(now_s), now_s)
        problem = ""
        if not all(replica.has_agent for replica in replicas):
            problem = "replicas are resized on request only with --spares of 1 or more"
        elif request.mesh.num_ranks > available:
            limit = limit or f"--nproc-per-replica allows {self._policy.most}"
            problem = f"each replica can have {available} ranks: {limit}"
        if problem:
            self._inbox.answer(request, ResizeState.REJECTED, problem)
        elif request.mesh == self.mesh:
            self._requested = request.mesh
            self._inbox.answer(request, ResizeState.DONE)
        else:
            self._request = _UserRequest(request, before=self._requested)
            self._requested = request.mesh
            self._inbox.answer(request, ResizeState.ACCEPTED)

    def _check_target(self, replicas: Sequence[ReplicaProcess], now_s: float) -> None:
        target, reason = self._wanted(now_s)
        if target == self.mesh or any(replica.is_over for replica in replicas):
            # When one replica has finished, all are about to finish.
            return
        if target.num_ranks > self.mesh.num_ranks:
            if not _all_train(replicas):
                # Growing can wait until all replicas train again.
                return
            reason = reason or "slots are available again"
        self._former, self._target = self.mesh, target
        where = ""
        if all(replica.is_training and replica.has_agent for replica in replicas):
            where = " in their processes"
            self._in_place = _InPlaceResize(replicas, target)
        else:
            self._restart(replicas, now_s)
        self._report_event(f"all replicas resize to {target} each{where}: {reason}")

    def _restart(self, replicas: Sequence[ReplicaProcess], now_s: float) -> None:
        """Let all replicas save, leave, and start again on the target."""
        self._deadline_s = now_s + self._grace_s
        for replica in replicas:
            replica.resize()

    def _continue_in_place(
        self, resize: "_InPlaceResize", replicas: Sequence[ReplicaProcess], now_s: float
    ) -> None:
        """Continue the resize. If it fails, a requested mesh is abandoned, and another one, which
        the number of slots demands, is tried by starting the replicas again."""
        outcome = resize.poll(now_s)
        if resize.may_start:
            self.mesh = self._target
        if outcome is None:
            return
        self._in_place = None
        request, self._request = self._request, None
        if request is not None:
            self._inbox.answer(request.request, outcome, resize.reason)
        if outcome is ResizeState.DONE:
            return
        self._report_event(f"resizing in their processes was not possible: {resize.reason}")
        if not resize.may_leave:
            self._cancelled = resize
        if request is not None:
            self._requested = request.before
            self._target = self.mesh = self._former
            if resize.may_leave:
                self._restart(replicas, now_s)
        elif not resize.may_start:
            # Otherwise all have the target, also those that are started again.
            self._restart(replicas, now_s)


class _InPlaceResize:
    """A resize of all replicas in their processes. They go through its phases together."""

    def __init__(self, replicas: Sequence[ReplicaProcess], target: RunMesh) -> None:
        self._replicas = replicas
        self._request = ResizeRequest(mesh=target, is_joint=True)
        self._permission: Permission | None = None
        self._unwritten: list[ReplicaProcess] = []
        """Replicas whose permission could not be written yet."""
        self._is_sent = False
        self._until_s = math.inf
        """When this phase must be completed."""
        self.reason = ""
        """Why it failed."""

    @property
    def may_leave(self) -> bool:
        """Whether ranks were permitted to leave their training."""
        return self._permission in (Permission.LEAVE, Permission.START)

    @property
    def may_start(self) -> bool:
        """Whether replicas were permitted to train on the new mesh."""
        return self._permission is Permission.START

    def poll(self, now_s: float) -> ResizeState | None:
        """Permit the next phase if all replicas have completed this one. Returns the outcome; None
        while it goes on."""
        # One that has finished the last step has no part in it.
        replicas = [replica for replica in self._replicas if not replica.is_over]
        outcome = self._advance(replicas, now_s) if self._is_sent else self._send(replicas, now_s)
        if outcome in (ResizeState.REJECTED, ResizeState.FAILED) and not self.may_leave:
            self._permission, self._unwritten = Permission.CANCEL, replicas
            self.write_permissions(now_s)
        return outcome

    def _send(self, replicas: Sequence[ReplicaProcess], now_s: float) -> ResizeState | None:
        self._is_sent, self._until_s = True, now_s + _READY_S
        try:
            for replica in replicas:
                replica.resize_in_place(self._request)
        except OSError as error:
            self.reason = f"the agents cannot be asked: {error}"
            return ResizeState.FAILED
        return None

    def _advance(self, replicas: Sequence[ReplicaProcess], now_s: float) -> ResizeState | None:
        self.write_permissions(now_s)
        answers = {replica.number: replica.resize_answer(self._request) for replica in replicas}
        for number, answer in answers.items():
            if answer is not None and answer.state in (ResizeState.REJECTED, ResizeState.FAILED):
                self.reason = f"replica {number}: {answer.reason}"
                return answer.state
        lost = [replica.number for replica in replicas if not replica.is_running]
        phase = _PHASES[self._permission]
        late = [
            n
            for n, answer in answers.items()
            if answer is None or answer.state is not phase.completed
        ]
        if lost:
            self.reason = f"replica {lost[0]} has failed"
            return ResizeState.FAILED
        if late and now_s >= self._until_s:
            self.reason = f"replica {late[0]} did not {phase.what} within {phase.limit_s:.0f} s"
            return ResizeState.FAILED
        if late:
            return None
        if phase.following is None:
            return ResizeState.DONE
        self._permission, self._unwritten = phase.following, list(replicas)
        self._until_s = now_s + _PHASES[self._permission].limit_s
        self.write_permissions(now_s)
        return None

    def write_permissions(self, now_s: float) -> bool:
        """Write the permission for all replicas; return whether all have it. What a full disk
        prevents is repeated by the next call, because others may have theirs."""
        for replica in list(self._unwritten):
            assert self._permission is not None
            with suppress(OSError):
                replica.permit(self._request, self._permission, now_s)
                self._unwritten.remove(replica)
        return not self._unwritten


class _Phase(NamedTuple):
    """Phase of a resize, which begins with a permission."""

    completed: ResizeState
    """Answer that completes the phase."""
    following: Permission | None
    what: str
    """Action of a replica in it, for display."""
    limit_s: float


_PHASES: Mapping[Permission | None, _Phase] = {
    None: _Phase(ResizeState.READY, Permission.LEAVE, "start its processes", _READY_S),
    Permission.LEAVE: _Phase(ResizeState.LEFT, Permission.START, "leave its training", LEAVE_S),
    Permission.START: _Phase(ResizeState.DONE, None, "take a step on the new mesh", _DONE_S),
}
"""Phases by the last permission."""


@dataclass(frozen=True)
class _UserRequest:
    """A request that is being followed."""

    request: ResizeRequest
    before: RunMesh | None
    """The requested mesh before it."""


def _all_train(replicas: Sequence[ReplicaProcess]) -> bool:
    return all(replica.state is ReplicaState.TRAINING for replica in replicas)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse the allowed numbers of ranks per replica, ascending: "2", "1:4" (1 to 4) or "1,2,4".
    Raises ConfigError."""
    low, is_range, high = text.partition(":")
    try:
        numbers = range(int(low), int(high) + 1) if is_range else map(int, text.split(","))
        allowed = set(numbers)
    except ValueError:
        allowed = set()
    if not allowed or min(allowed) < 1:
        raise ConfigError(
            f"--nproc-per-replica is {text}, but must be a number of ranks such as 2, or several "
            "of them: 1:4 for 1 to 4, or 1,2,4."
        )
    return tuple(sorted(allowed))


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
