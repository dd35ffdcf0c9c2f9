"""Changes of the mesh of all replicas: when the number of available ranks changes, or on request.

Replicas that train move to the new mesh in their processes. If one of them does not train or
cannot, and slots require another mesh, all replicas save, leave and start again.

Invariant: replicas that run at the same time have the same mesh, because each rank reduces its
shards of the gradients with the same shards of the others.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.rank.processes import kill_process_group, spawn
from torchtitan_lite.fault_tolerance.supervision.launcher.replica import Replica, ReplicaState
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
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

    def allows(self, mesh: RunMesh) -> bool:
        """Whether a mesh differs from the configured one in an allowed number of ranks only."""
        return mesh.num_ranks in self._allowed and not mesh.arguments

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
    """Decides about the mesh of all replicas, when the number of ranks available changes and on
    request. Their members find in it the resize to follow, see `resize_follower.Requests`."""

    is_open = True

    def __init__(
        self,
        policy: ResizePolicy,
        slots: SlotsFile,
        inbox: RequestInbox,
        *,
        refusal: str = "",
        check_command: Callable[[RunMesh], Sequence[str]],
        environment: Mapping[str, str],
        grace_s: float,
        report_event: Callable[[str], None],
    ) -> None:
        """`inbox` receives requests. `refusal` is why replicas cannot change their number of ranks
        in their processes, empty if they can: the allowed numbers were checked. `check_command`
        returns the command line of a process that prints why they cannot move to another mesh, see
        `cli.resize_check`. `grace_s` is the time for replicas to save and leave."""
        self._policy, self._slots, self._inbox = policy, slots, inbox
        self._own_refusal = refusal
        self._check_command, self._environment = check_command, environment
        self._grace_s, self._report_event = grace_s, report_event
        self.mesh = RunMesh(policy.most)
        """Mesh of each replica that starts now."""
        self._requested: RunMesh | None = None
        """Mesh of the newest request that was followed, while there are slots for it."""
        self.request: ResizeRequest | None = None
        """The resize that the replicas follow in their processes."""
        self._is_users = False
        """Whether a user has requested it."""
        self._reason = ""
        """Why the replicas resize, for display."""
        self._state = ResizeState.ACCEPTED
        self._outcome: tuple[ResizeState, str] | None = None
        """Its final answer."""
        self._target = self.mesh
        self._deadline_s: float | None = None
        """Time by which all replicas must have left; None while they are not restarted."""
        self._checked_id = ""
        self._check: _Check | None = None
        self._refusal: str | None = None

    @property
    def pids(self) -> list[int]:
        """Process id of a running check."""
        return [] if self._check is None else [self._check.pid]

    def choose_initial(self, now_s: float) -> None:
        """Choose the mesh of the first start."""
        self.mesh, reason = self._wanted(now_s)
        if reason:
            self._report_event(f"replicas start with {self.mesh} each: {reason}")

    def record_failure(self, replica: int, rank: int, now_s: float) -> None:
        """Record that a rank of a replica has failed."""
        self._policy.record_failure(replica, rank, self.mesh.num_ranks, now_s)

    def poll(self, replicas: Sequence[Replica], now_s: float) -> bool:
        """Begin, continue or complete a resize. Return whether all replicas have left, so that they
        must be started on `mesh`."""
        self._inbox.repeat(now_s)
        if self._deadline_s is not None:
            if all(replica.has_left for replica in replicas):
                self.mesh, self._deadline_s = self._target, None
                return True
            if now_s >= self._deadline_s:
                for replica in replicas:
                    replica.kill()
        elif self.request is None:
            self._read_request(replicas, now_s)
            if self.request is None:
                self._check_target(replicas, now_s)
        elif self._outcome is not None:
            self._complete(*self._outcome, replicas, now_s)
        elif not self._is_users and self._state is not ResizeState.LEFT:
            failed = (ReplicaState.ENDING, ReplicaState.RESTARTING)
            if any(replica.state in failed for replica in replicas):
                # It may have lost the slot that it can no longer have.
                mesh, self.request = self.request.mesh, None
                self._restart(mesh, self._reason, replicas, now_s)
        return False

    def end(self, reason: str) -> None:
        """Answer the request that is being followed: the replicas stop or have stopped."""
        if self.request is not None and self._is_users:
            self._inbox.answer(self.request, ResizeState.FAILED, reason)
        self.request = None
        self._end_check()

    def parse(self, text: str) -> RunMesh:
        """See `Requests`. The mesh was checked before a member could name it."""
        return RunMesh.from_text(text)

    def refusal(self, request_id: str, mesh: str) -> str | None:
        """See `Requests`: one answer for all members."""
        wanted = RunMesh.from_text(mesh)
        if self._policy.allows(wanted):
            return self._own_refusal
        if self._checked_id != request_id:
            self._checked_id, self._refusal = request_id, None
            self._start_check(wanted)
        elif self._check is not None and (refusal := self._check.refusal()) is not None:
            self._end_check()
            self._refusal = refusal
        return self._refusal

    def answer(self, state: ResizeState, reason: str = "") -> None:
        """See `Requests`. The first final answer of a member is that of all."""
        if self.request is None or self._outcome is not None:
            return
        self._state = state
        if self._is_users:
            self._inbox.answer(self.request, state, reason)
        if state.is_final:
            self._outcome = state, reason

    def close(self, reason: str) -> None:
        """See `Requests`: other members may go on."""

    def _start_check(self, mesh: RunMesh) -> None:
        self._end_check()
        try:
            self._check = _Check(self._check_command(mesh), self._environment)
        except OSError as error:
            self._refusal = f"it cannot be checked: {error}"

    def _end_check(self) -> None:
        if self._check is not None:
            self._check.close()
            self._check = None

    def _wanted(self, now_s: float) -> tuple[RunMesh, str]:
        """Return the mesh that each replica should have, and what limits it."""
        available, reason = self._policy.available(self._slots.read(now_s), now_s)
        if self._requested is not None and self._requested.num_ranks <= available:
            return self._requested, "it was requested"
        return RunMesh(self._policy.largest(available)), reason

    def _read_request(self, replicas: Sequence[Replica], now_s: float) -> None:
        if not _all_train(replicas):
            return
        request = self._inbox.poll(now_s)
        if request is None:
            return
        available, limit = self._policy.available(self._slots.read(now_s), now_s)
        if request.mesh.num_ranks > available:
            limit = limit or f"--nproc-per-replica allows {self._policy.most}"
            problem = f"each replica can have {available} ranks: {limit}"
            self._inbox.answer(request, ResizeState.REJECTED, problem)
        elif request.mesh == self.mesh:
            self._requested = request.mesh
            self._inbox.answer(request, ResizeState.DONE)
        else:
            self._inbox.answer(request, ResizeState.ACCEPTED)
            self._follow(request, "it was requested", is_users=True)

    def _check_target(self, replicas: Sequence[Replica], now_s: float) -> None:
        target, reason = self._wanted(now_s)
        if target == self.mesh or any(replica.is_over for replica in replicas):
            # When one replica has finished, all are about to finish.
            return
        if target.num_ranks > self.mesh.num_ranks:
            if not _all_train(replicas):
                # Growing can wait until all replicas train again.
                return
            reason = reason or "slots are available again"
        if all(replica.is_training for replica in replicas):
            self._follow(ResizeRequest(mesh=target), reason, is_users=False)
        else:
            self._restart(target, reason, replicas, now_s)

    def _follow(self, request: ResizeRequest, reason: str, *, is_users: bool) -> None:
        """Let the replicas resize in their processes."""
        self.request, self._is_users, self._outcome = request, is_users, None
        self._state = ResizeState.ACCEPTED
        self._reason = reason
        text = f"all replicas resize to {request.mesh} each in their processes: {reason}"
        self._report_event(text)

    def _complete(
        self, state: ResizeState, reason: str, replicas: Sequence[Replica], now_s: float
    ) -> None:
        """End a resize in the replicas' processes. If it has failed, a requested mesh is abandoned,
        and another one, which the number of slots demands, is tried by starting the replicas
        again."""
        assert self.request is not None
        mesh, self.request = self.request.mesh, None
        if state is ResizeState.DONE:
            self.mesh = mesh
            if self._is_users:
                self._requested = mesh
            return
        self._report_event(f"resizing in their processes was not possible: {reason}")
        if not self._is_users:
            self._restart(mesh, self._reason, replicas, now_s)

    def _restart(
        self, target: RunMesh, reason: str, replicas: Sequence[Replica], now_s: float
    ) -> None:
        """Let all replicas save, leave, and start again on `target`."""
        self._target, self._deadline_s = target, now_s + self._grace_s
        for replica in replicas:
            replica.leave_to_resize()
        self._report_event(f"all replicas resize to {target} each: {reason}")


def _all_train(replicas: Sequence[Replica]) -> bool:
    return all(replica.state is ReplicaState.TRAINING for replica in replicas)


def refusal_in(output: str) -> str:
    """Return the refusal that a process has printed as a line of JSON, among warnings of
    libraries."""
    for line in reversed(output.splitlines()):
        with suppress(ValueError, LookupError, TypeError):
            return str(json.loads(line)["refusal"])
    return f"it cannot be checked: {output.strip()[-300:]}"


class _Check:
    """A process that prints why a mesh is refused, as the last line of its output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError."""
        # A file rather than a pipe, which would block without a reader.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = spawn(command, environment, stdout=self._output.fileno())

    @property
    def pid(self) -> int:
        return self._process.pid

    def refusal(self) -> str | None:
        """Return the refusal, empty if there is none; None until it is known."""
        if self._process.poll() is None:
            return None
        self._output.seek(0)
        return refusal_in(self._output.read(_MAX_BYTES).decode(errors="replace"))

    def close(self) -> None:
        """End it."""
        kill_process_group(self._process.pid)
        self._process.wait()
        self._output.close()


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
