"""Rules by which waiting replicas form a quorum.

They are those of torchft's lighthouse (0.2.0), with these differences:

- A replica can be reported to have left: it stops counting at once. An id with a UUID, that is,
  with a colon, is a process that never returns; later messages from it are ignored.
- A replica whose call has ended is in no quorum until it requests one again. torchft keeps it while
  its last heartbeat is valid, and forms quorums with it.
- A replica that repeats its request, because its call timed out, does not restart the join timeout
  for the others. With torchft, calls shorter than the join timeout never get a quorum while another
  replica is alive and hangs.
- An empty quorum does not count. torchft takes it as the last quorum, all of whose members are
  present from then on, so that the next replica passes without any check.
- Replicas report which others they could not reach. The smallest set of waiting replicas without
  which all others can reach each other is left out: it waits until the reports are withdrawn.
- An id that sends heartbeats but has never requested a quorum counts as live for at most the join
  timeout. With torchft, such ids block all quorums for as long as they send heartbeats.
- An id with a UUID has one process: when a newer one requests a quorum, the older one has left.
  torchft waits for the older one until its heartbeat expires, and admits both while both live.

Invariants: no clock and no I/O, the time is an argument (seconds of any monotonic clock); the same
events at the same times give the same quorums.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchtitan_lite.core.errors import LighthouseError
from torchtitan_lite.fault_tolerance.lighthouse.links import (
    Link,
    LinkReports,
    replicas_to_leave_out,
)

_FORGET_AFTER_S = 600.0
"""Time after its last heartbeat for which a replica is still shown."""
LEFT = "was reported to have left: restart it under a new id"
"""Predicate of the error of a replica that was reported to have left."""
_MAX_DEPARTURES = 4096
"""Number of replicas that have left for good of which the reason is kept."""
_REPLACED = "was replaced by a newer process of the same replica id"


class MemberFacts(Protocol):
    """Part of a waiting replica's message that the rules read."""

    @property
    def replica_id(self) -> str:
        """Id of the replica. Members of a quorum are ordered by it."""
        ...

    @property
    def step(self) -> int:
        """Its step. The longest history has the highest step; of equals, the first id."""
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
    members: tuple[MemberFacts, ...]
    """Members, in the order of their ids."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the members."""
        return tuple(member.replica_id for member in self.members)


@dataclass(frozen=True)
class QuorumDecision:
    """Outcome of the rules at one time."""

    members: tuple[MemberFacts, ...] | None
    """Members of the quorum; None if none can be formed."""
    reason: str
    """Reason, for display."""
    until_s: float | None
    """Time at which the outcome may change without an event; None if it cannot."""
    left_out: tuple[str, ...] = ()
    """Ids of waiting replicas that are left out because of broken links."""


@dataclass(frozen=True)
class WaitingReplica:
    """Replica that waits for a quorum."""

    member: MemberFacts
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
        self._first_heartbeats: dict[str, float] = {}
        """Time of the first heartbeat of ids that have never requested a quorum."""
        self._links = LinkReports()
        self._departures: dict[str, str] = {}
        """Reason why an id has left for good."""

    def request_quorum(self, member: MemberFacts, now_s: float) -> bool:
        """Record a replica's request for a quorum, which also counts as a heartbeat; an older
        process of the same replica has then left for good. Return False, without effect, if the
        replica itself has left for good."""
        replica_id = member.replica_id
        if not self.heartbeat(replica_id, now_s):
            return False
        self._first_heartbeats.pop(replica_id, None)
        name, colon, _ = replica_id.rpartition(":")
        if colon:
            # An id that has only sent heartbeats is that of an even newer process.
            for known_id in sorted(self._known() - {replica_id} - self._first_heartbeats.keys()):
                if known_id.rpartition(":")[:2] == (name, colon):
                    self._forget(known_id)
                    self._record_departures([known_id], _REPLACED)
        since_s = self._since_s.setdefault(replica_id, now_s)
        self.waiting[replica_id] = WaitingReplica(member, since_s)
        return True

    def heartbeat(self, replica_id: str, now_s: float) -> bool:
        """Record a heartbeat. Return False, without effect, if the replica has left for good."""
        if replica_id in self._departures:
            return False
        if replica_id not in self.heartbeats:
            if replica_id not in self.waiting:
                self._first_heartbeats[replica_id] = now_s
        elif not self.is_healthy(replica_id, now_s):
            # It was dead, so its report is outdated.
            self._links.withdraw(replica_id)
        self.heartbeats[replica_id] = now_s
        return True

    def report_links(self, replica_id: str, unreachable: Collection[str]) -> None:
        """Replace a replica's report of the replicas that it could not reach, by id. An empty
        report withdraws the earlier one. Ignored if the replica has left for good."""
        if replica_id not in self._departures:
            self._links.replace(replica_id, unreachable)

    def broken_links(self, now_s: float) -> list[tuple[str, str]]:
        """Return the links between live replicas that at least one end reports as broken."""
        links = self._links.broken(self._live(now_s))
        return sorted((min(link), max(link)) for link in links)

    def departure(self, replica_id: str) -> str | None:
        """Return why a replica has left for good, as the predicate of a sentence; None if it has
        not."""
        return self._departures.get(replica_id)

    def cancel_request(self, replica_id: str) -> None:
        """Remove a replica's request."""
        self.waiting.pop(replica_id, None)

    def mark_left(self, replica_id: str) -> list[str]:
        """Remove a replica that has left, by its id or its name, which is the part before the first
        colon. Return the known ids that no longer count."""
        left_ids = sorted(
            known_id
            for known_id in self._known()
            if replica_id in (known_id, known_id.partition(":")[0])
        )
        for left_id in left_ids:
            self._forget(left_id)
        # A heartbeat may still be in transit. An id without a UUID may return.
        self._record_departures(
            [left_id for left_id in (*left_ids, replica_id) if ":" in left_id], LEFT
        )
        return left_ids

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
        for expired_id in self._first_heartbeats.keys() - self.heartbeats.keys():
            del self._first_heartbeats[expired_id]
        for reporter in set(self._links.reporters()) - self.heartbeats.keys():
            self._links.withdraw(reporter)
        return quorum

    def evaluate(self, now_s: float) -> QuorumDecision:
        """Return the outcome of the rules at this time, without side effects."""
        if not self.waiting:
            return QuorumDecision(None, "no replica waits", None)
        live = self._live(now_s)
        present = [self.waiting[waiting_id] for waiting_id in sorted(self.waiting.keys() & live)]
        until_s = self._next_expiry_s(live)
        admitted = self._admitted([asking.member for asking in present])
        broken = self._links.broken({member.replica_id for member in admitted})
        left_out = _left_out(admitted, broken)
        members = tuple(member for member in admitted if member.replica_id not in left_out)
        suffix = _describe_left_out(left_out, broken)

        def decide(
            reason: str, members: tuple[MemberFacts, ...] | None, until_s: float | None = until_s
        ) -> QuorumDecision:
            return QuorumDecision(members, reason + suffix, until_s, tuple(sorted(left_out)))

        # The members of the last quorum continue at once, together with all that wait.
        usable = {waiter.member.replica_id for waiter in present} - left_out
        if self.quorum and {*self.quorum.ids} <= usable:
            return decide("all members of the last quorum wait", members)
        needed, num_usable = self.settings.min_replicas, len(usable)
        if num_usable < needed:
            return decide(f"{num_usable} replicas wait, {needed} are required", None)
        # Otherwise each half of the replicas could continue without the other.
        is_half = left_out and 2 * num_usable == len(live) and _longest(admitted) in usable
        if 2 * num_usable <= len(live) and not is_half:
            reason = f"{num_usable} of {len(live)} live replicas wait, more than half are required"
            return decide(reason, None)
        # A replica without a link to a member would be left out.
        absent = {
            replica_id
            for replica_id in live - self.waiting.keys()
            if not any(replica_id in link for link in self._links.broken({*usable, replica_id}))
        }
        waited_s = min((waiter.since_s for waiter in present), default=now_s)
        join_by_s = waited_s + self.settings.join_timeout_ms / 1000
        if absent and now_s < join_by_s:
            reason = f"{', '.join(sorted(absent))} may still join"
            return decide(reason, None, min(join_by_s, until_s or join_by_s))
        if not members:
            return decide("only members of the last quorum are admitted", None)
        return decide("the join timeout is over" if absent else "all live replicas wait", members)

    def _admitted(self, members: Sequence[MemberFacts]) -> tuple[MemberFacts, ...]:
        """Return the members that all others admit."""
        if self.quorum is None or not any(member.shrink_only for member in members):
            return tuple(members)
        return tuple(member for member in members if member.replica_id in self.quorum.ids)

    def _live(self, now_s: float) -> set[str]:
        """Return the ids that count: their heartbeats are valid, and they have requested a quorum
        or still may, for the first time."""
        return {
            replica_id
            for replica_id in self.heartbeats
            if self.is_healthy(replica_id, now_s)
            and (replica_id not in self._first_heartbeats or now_s < self._request_by_s(replica_id))
        }

    def _next_expiry_s(self, live: Collection[str]) -> float | None:
        """Return the time at which the next of these ids stops to count by itself."""
        times_s = [self._expires_s(self.heartbeats[live_id]) for live_id in live]
        times_s += [self._request_by_s(live_id) for live_id in self._first_heartbeats.keys() & live]
        return min(times_s, default=None)

    def _request_by_s(self, replica_id: str) -> float:
        return self._first_heartbeats[replica_id] + self.settings.join_timeout_ms / 1000

    def _expires_s(self, heartbeat_s: float) -> float:
        return heartbeat_s + self.settings.heartbeat_timeout_ms / 1000

    def _known(self) -> set[str]:
        return self.heartbeats.keys() | self.waiting.keys()

    def _record_departures(self, ids: Iterable[str], reason: str) -> None:
        self._departures.update(dict.fromkeys(ids, reason))
        while len(self._departures) > _MAX_DEPARTURES:
            del self._departures[next(iter(self._departures))]

    def _forget(self, replica_id: str) -> None:
        for by_id in (self.heartbeats, self.waiting, self._since_s, self._first_heartbeats):
            by_id.pop(replica_id, None)
        self._links.forget(replica_id)


def _left_out(members: Sequence[MemberFacts], broken: frozenset[Link]) -> frozenset[str]:
    """Return the ids of the members to leave out so that all others can reach each other."""
    if not broken:
        return frozenset()
    ends = frozenset[str]().union(*broken)
    steps = tuple(
        sorted((member.replica_id, member.step) for member in members if member.replica_id in ends)
    )
    return replicas_to_leave_out(broken, steps)


def _longest(members: Sequence[MemberFacts]) -> str:
    """Return the id of the member with the longest history."""
    return min(members, key=lambda member: (-member.step, member.replica_id)).replica_id


def _describe_left_out(left_out: Collection[str], broken: Collection[Link]) -> str:
    parts = []
    for left_out_id in sorted(left_out):
        ends = sorted(
            end for link in broken if left_out_id in link for end in link if end != left_out_id
        )
        parts.append(f"{left_out_id} is left out, no link to {', '.join(ends)}")
    return "".join(f"; {part}" for part in parts)
