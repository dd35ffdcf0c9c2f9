"""When replicas that ask for a quorum get one, and who is in it.

The rules are those of torchft's lighthouse (0.2.0), with four differences:

- A replica may be told to have left: it counts no more, at once. An id with a uuid, that is
  with a colon, is a process that is gone for good; what still arrives under it is not counted.
- A replica that asks no more (its call has ended) is in no quorum until it asks again. torchft's
  keeps such a one as long as its last heartbeat counts, and gives others a quorum with it.
- Who asks again, since its call took too long, does not make the others wait anew. By torchft's, a
  call that is shorter than the join timeout never gets a quorum beside one that hangs alive.
- A quorum of nobody is none. torchft's takes it as the last quorum, whose members are all back from
  then on, so that the next replica passes without any check.

Invariants: no clock and no I/O, the time comes as an argument (seconds, of any clock that does not
go back); the same events at the same times give the same quorums. Layer: imports errors only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torchtitan_lite.errors import LighthouseError

_REMEMBERED_S = 600.0
"""How long a replica that fell silent is still shown."""


class Member(Protocol):
    """What the rules read of a replica that asks."""

    @property
    def replica_id(self) -> str:
        """Its place in a quorum follows the order of these."""
        ...

    @property
    def shrink_only(self) -> bool:
        """Whether it wants nobody beside members of the last quorum."""
        ...

    @property
    def commit_failures(self) -> int:
        """Steps in a row that it could not commit."""
        ...


@dataclass(frozen=True)
class QuorumSettings:
    """The numbers in the rules. Raises LighthouseError for impossible ones."""

    min_replicas: int = 1
    """Replicas without which there is no new quorum."""
    join_timeout_ms: int = 60000
    """How long those who ask wait for others that send heartbeats and do not ask."""
    heartbeat_timeout_ms: int = 5000
    """How long after its last heartbeat a replica is taken for dead."""

    def __post_init__(self) -> None:
        least = {"min_replicas": 1, "join_timeout_ms": 0, "heartbeat_timeout_ms": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise LighthouseError(
                    f"{name} = {getattr(self, name)} is too little: {bound} or more is needed."
                )


@dataclass(frozen=True)
class Quorum:
    """Replicas that take the next step together."""

    quorum_id: int
    """Grows when others are in it than in the one before, or when a member could not commit."""
    members: tuple[Member, ...]
    """In the order of their ids."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the members."""
        return tuple(member.replica_id for member in self.members)


@dataclass(frozen=True)
class Verdict:
    """What the rules say of a moment."""

    members: tuple[Member, ...] | None
    """Who would be in a quorum; None when there is none."""
    reason: str
    """Why, in words."""
    until_s: float | None
    """When this may change without any event; None when it cannot."""


@dataclass(frozen=True)
class Asking:
    """A replica that waits for a quorum."""

    member: Member
    since_s: float


class Rules:
    """Who sends heartbeats, who asks, and the last quorum."""

    def __init__(self, settings: QuorumSettings, first_id: int = 0) -> None:
        """Quorum ids are greater than `first_id`: those of a lighthouse before this one must not
        come again."""
        self.settings, self._first_id = settings, first_id
        self._since_s: dict[str, float] = {}
        """Since when who asks, or has asked and was cut off, has been in no quorum."""
        self.quorum: Quorum | None = None
        """The last one."""
        self.asking: dict[str, Asking] = {}
        self.heartbeats: dict[str, float] = {}
        """Id -> time of the last one."""
        self._gone: set[str] = set()

    def ask(self, member: Member, now_s: float) -> bool:
        """A replica asks for a quorum, which is a heartbeat, too. False, and nothing changes, when
        it has left for good."""
        if not self.beat(member.replica_id, now_s):
            return False
        since_s = self._since_s.setdefault(member.replica_id, now_s)
        self.asking[member.replica_id] = Asking(member, since_s)
        return True

    def beat(self, replica_id: str, now_s: float) -> bool:
        """A replica sends a heartbeat. False, and nothing changes, when it has left for good."""
        if replica_id in self._gone:
            return False
        self.heartbeats[replica_id] = now_s
        return True

    def withdraw(self, replica_id: str) -> None:
        """A replica asks no more."""
        self.asking.pop(replica_id, None)

    def left(self, replica_id: str) -> list[str]:
        """A replica has left: its whole id, or its name, which is what stands before the first
        colon. Returns the ids that were known and now count no more."""
        known = self.heartbeats.keys() | self.asking.keys()
        found = sorted(one for one in known if replica_id in (one, one.partition(":")[0]))
        for one in found:
            self.heartbeats.pop(one, None)
            self.asking.pop(one, None)
            self._since_s.pop(one, None)
        # A heartbeat may still be under way. An id without a uuid may come back.
        self._gone.update(one for one in (*found, replica_id) if ":" in one)
        return found

    def is_healthy(self, replica_id: str, now_s: float) -> bool:
        """Whether its last heartbeat still counts."""
        last_s = self.heartbeats.get(replica_id)
        return last_s is not None and now_s < self._expires_s(last_s)

    def decide(self, now_s: float) -> Quorum | None:
        """Make a quorum if there is one to make. Its members ask no more; for those who are not in
        it, the wait for others begins anew."""
        members = self.verdict(now_s).members
        if members is None:
            return None
        last = self.quorum
        quorum_id = last.quorum_id if last else self._first_id
        quorum = Quorum(quorum_id, members)
        could_not_commit = any(member.commit_failures > 0 for member in members)
        if last is None or quorum.ids != last.ids or could_not_commit:
            quorum = Quorum(quorum_id + 1, members)
        self.quorum = quorum
        self.asking = {
            replica_id: Asking(asking.member, now_s)
            for replica_id, asking in self.asking.items()
            if replica_id not in quorum.ids
        }
        self._since_s = dict.fromkeys(self.asking, now_s)
        self.heartbeats = {
            replica_id: last_s
            for replica_id, last_s in self.heartbeats.items()
            if now_s < self._expires_s(last_s) + _REMEMBERED_S
        }
        return quorum

    def verdict(self, now_s: float) -> Verdict:
        """What the rules say at this time. Changes nothing."""
        if not self.asking:
            return Verdict(None, "nobody asks", None)
        healthy = {one for one in self.heartbeats if self.is_healthy(one, now_s)}
        present = [self.asking[one] for one in sorted(self.asking.keys() & healthy)]
        until_s = min((self._expires_s(self.heartbeats[one]) for one in healthy), default=None)
        members = self._allowed([asking.member for asking in present])
        # Whoever was in the last quorum may go on at once, and take others along.
        if self.quorum and {*self.quorum.ids} <= {one.member.replica_id for one in present}:
            return Verdict(members, "all members of the last quorum ask again", until_s)
        needed = self.settings.min_replicas
        if len(present) < needed:
            return Verdict(None, f"{len(present)} replicas ask, {needed} are needed", until_s)
        # Else each half of the replicas might go on without the other.
        if 2 * len(present) <= len(healthy):
            told = f"{len(present)} of {len(healthy)} live replicas ask, more than half are needed"
            return Verdict(None, told, until_s)
        absent = healthy - self.asking.keys()
        waited_s = min((one.since_s for one in present), default=now_s)
        join_by_s = waited_s + self.settings.join_timeout_ms / 1000
        if absent and now_s < join_by_s:
            told = f"{', '.join(sorted(absent))} may still join"
            return Verdict(None, told, min(join_by_s, until_s or join_by_s))
        if not members:
            return Verdict(None, "nobody is admitted but members of the last quorum", until_s)
        told = "nobody else is waited for" if absent else "all live replicas ask"
        return Verdict(members, told, until_s)

    def _allowed(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """Those that all the others put up with."""
        if self.quorum is None or not any(member.shrink_only for member in members):
            return tuple(members)
        return tuple(member for member in members if member.replica_id in self.quorum.ids)

    def _expires_s(self, heartbeat_s: float) -> float:
        return heartbeat_s + self.settings.heartbeat_timeout_ms / 1000
