"""Rules by which waiting replicas form a quorum.

They are those of torchft's lighthouse (0.2.0), with four differences:

- A replica can be reported to have left: it stops counting at once. An id with a UUID, that is,
  with a colon, is a process that never returns; later messages from it are ignored.
- A replica whose call has ended is in no quorum until it requests one again. torchft keeps it while
  its last heartbeat is valid, and forms quorums with it.
- A replica that repeats its request, because its call timed out, does not restart the join timeout
  for the others. With torchft, calls shorter than the join timeout never get a quorum while another
  replica is alive and hangs.
- An empty quorum does not count. torchft takes it as the last quorum, all of whose members are
  present from then on, so that the next replica passes without any check.

Invariants: no clock and no I/O, the time is an argument (seconds of any monotonic clock); the same
events at the same times give the same quorums. Layer: imports errors only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torchtitan_lite.errors import LighthouseError

_FORGET_AFTER_S = 600.0
"""Time after its last heartbeat for which a replica is still shown."""


class Member(Protocol):
    """Part of a waiting replica's message that the rules read."""

    @property
    def replica_id(self) -> str:
        """Id of the replica. Members of a quorum are ordered by it."""
        ...

    @property
    def shrink_only(self) -> bool:
        """Whether it admits only members of the last quorum."""
        ...

    @property
    def commit_failures(self) -> int:
        """Consecutive steps that it could not commit."""
        ...


@dataclass(frozen=True)
class QuorumSettings:
    """Settings of the rules. Raises LighthouseError if they are invalid."""

    min_replicas: int = 1
    """Minimum number of replicas for a quorum."""
    join_timeout_ms: int = 60000
    """Time for which a quorum waits for replicas that send heartbeats but have not requested it."""
    heartbeat_timeout_ms: int = 5000
    """Time after its last heartbeat at which a replica counts as dead."""

    def __post_init__(self) -> None:
        least = {"min_replicas": 1, "join_timeout_ms": 0, "heartbeat_timeout_ms": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise LighthouseError(
                    f"{name} = {getattr(self, name)} is too small: it must be at least {bound}."
                )


@dataclass(frozen=True)
class Quorum:
    """Replicas that take the next step together."""

    quorum_id: int
    """Increases when the members change, or when a member could not commit."""
    members: tuple[Member, ...]
    """Members, in the order of their ids."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the members."""
        return tuple(member.replica_id for member in self.members)


@dataclass(frozen=True)
class QuorumDecision:
    """Outcome of the rules at one time."""

    members: tuple[Member, ...] | None
    """Members of the quorum; None if none can be formed."""
    reason: str
    """Reason, for display."""
    until_s: float | None
    """Time at which the outcome may change without an event; None if it cannot."""


@dataclass(frozen=True)
class WaitingReplica:
    """Replica that waits for a quorum."""

    member: Member
    since_s: float


class QuorumRules:
    """Heartbeats, requests and the last quorum, with the rules that form the next one."""

    def __init__(self, settings: QuorumSettings, first_id: int = 0) -> None:
        """Quorum ids are greater than `first_id`: ids of an earlier lighthouse must not be
        repeated."""
        self.settings, self._first_id = settings, first_id
        self._since_s: dict[str, float] = {}
        """Time since which a replica that has requested a quorum, even if its call was cut off, has
        been in none."""
        self.quorum: Quorum | None = None
        """The last quorum."""
        self.waiting: dict[str, WaitingReplica] = {}
        self.heartbeats: dict[str, float] = {}
        """Time of the last heartbeat, by id."""
        self._left_ids: set[str] = set()

    def request_quorum(self, member: Member, now_s: float) -> bool:
        """Record a replica's request for a quorum, which also counts as a heartbeat. Return False,
        without effect, if the replica has left for good."""
        if not self.heartbeat(member.replica_id, now_s):
            return False
        since_s = self._since_s.setdefault(member.replica_id, now_s)
        self.waiting[member.replica_id] = WaitingReplica(member, since_s)
        return True

    def heartbeat(self, replica_id: str, now_s: float) -> bool:
        """Record a heartbeat. Return False, without effect, if the replica has left for good."""
        if replica_id in self._left_ids:
            return False
        self.heartbeats[replica_id] = now_s
        return True

    def cancel_request(self, replica_id: str) -> None:
        """Remove a replica's request."""
        self.waiting.pop(replica_id, None)

    def mark_left(self, replica_id: str) -> list[str]:
        """Remove a replica that has left, by its id or its name, which is the part before the first
        colon. Return the known ids that no longer count."""
        known = self.heartbeats.keys() | self.waiting.keys()
        found = sorted(one for one in known if replica_id in (one, one.partition(":")[0]))
        for one in found:
            self.heartbeats.pop(one, None)
            self.waiting.pop(one, None)
            self._since_s.pop(one, None)
        # A heartbeat may still be in transit. An id without a UUID may return.
        self._left_ids.update(one for one in (*found, replica_id) if ":" in one)
        return found

    def is_healthy(self, replica_id: str, now_s: float) -> bool:
        """Return whether a replica's last heartbeat is still valid."""
        last_s = self.heartbeats.get(replica_id)
        return last_s is not None and now_s < self._expires_s(last_s)

    def form_quorum(self, now_s: float) -> Quorum | None:
        """Form a quorum if possible. The requests of its members are answered; for the other
        waiting replicas, the join timeout restarts."""
        members = self.evaluate(now_s).members
        if members is None:
            return None
        last = self.quorum
        quorum_id = last.quorum_id if last else self._first_id
        quorum = Quorum(quorum_id, members)
        could_not_commit = any(member.commit_failures > 0 for member in members)
        if last is None or quorum.ids != last.ids or could_not_commit:
            quorum = Quorum(quorum_id + 1, members)
        self.quorum = quorum
        self.waiting = {
            replica_id: WaitingReplica(asking.member, now_s)
            for replica_id, asking in self.waiting.items()
            if replica_id not in quorum.ids
        }
        self._since_s = dict.fromkeys(self.waiting, now_s)
        self.heartbeats = {
            replica_id: last_s
            for replica_id, last_s in self.heartbeats.items()
            if now_s < self._expires_s(last_s) + _FORGET_AFTER_S
        }
        return quorum

    def evaluate(self, now_s: float) -> QuorumDecision:
        """Return the outcome of the rules at this time, without side effects."""
        if not self.waiting:
            return QuorumDecision(None, "no replica waits", None)
        healthy = {one for one in self.heartbeats if self.is_healthy(one, now_s)}
        present = [self.waiting[one] for one in sorted(self.waiting.keys() & healthy)]
        until_s = min((self._expires_s(self.heartbeats[one]) for one in healthy), default=None)
        members = self._admitted([asking.member for asking in present])
        # The members of the last quorum continue at once, together with all that wait.
        if self.quorum and {*self.quorum.ids} <= {one.member.replica_id for one in present}:
            return QuorumDecision(members, "all members of the last quorum wait", until_s)
        needed = self.settings.min_replicas
        if len(present) < needed:
            return QuorumDecision(
                None, f"{len(present)} replicas wait, {needed} are required", until_s
            )
        # Otherwise each half of the replicas could continue without the other.
        if 2 * len(present) <= len(healthy):
            reason = (
                f"{len(present)} of {len(healthy)} live replicas wait, more than half are required"
            )
            return QuorumDecision(None, reason, until_s)
        absent = healthy - self.waiting.keys()
        waited_s = min((one.since_s for one in present), default=now_s)
        join_by_s = waited_s + self.settings.join_timeout_ms / 1000
        if absent and now_s < join_by_s:
            reason = f"{', '.join(sorted(absent))} may still join"
            return QuorumDecision(None, reason, min(join_by_s, until_s or join_by_s))
        if not members:
            return QuorumDecision(None, "only members of the last quorum are admitted", until_s)
        reason = "the join timeout is over" if absent else "all live replicas wait"
        return QuorumDecision(members, reason, until_s)

    def _admitted(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """Return the members that all others admit."""
        if self.quorum is None or not any(member.shrink_only for member in members):
            return tuple(members)
        return tuple(member for member in members if member.replica_id in self.quorum.ids)

    def _expires_s(self, heartbeat_s: float) -> float:
        return heartbeat_s + self.settings.heartbeat_timeout_ms / 1000
