"""Which of several coordinators may decide: the one that a majority of the voters has acknowledged.

The scheduler should run one coordinator, but two may serve a run at once: one that was cut off, or
paused, and its successor. Each has a term. A machine acknowledges the highest that it is offered,
and never a lower one afterwards. The voters are up to MAX_VOTERS machines of the run. A coordinator
leads as long as enough of them have acknowledged it recently: a majority for its election, half of
them afterwards, because any majority that elects another one includes one of this half. Only a
leader grants leases, and a new one gives no place away before every decision of its predecessor and
every lease of it have ended (LEARN_S).

The list of voters is in every answer and every report, so that a new coordinator learns it. It
changes in two steps as in Raft (Ongaro and Ousterhout 2014, section 6, joint consensus): while it
does, decisions need both lists. A machine that has left acknowledges nobody any more, and counts
for the coordinator that it has left.

Invariants: no clock and no I/O; times are those of `lease_clock_s` of this machine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import Claim, Vote, VoterList
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    ACKNOWLEDGED_S,
    ALL_LOST_S,
    LEARN_S,
)

MAX_VOTERS = 8
"""More would only lengthen the messages. Even, because half of them is enough for a leader."""
_UPDATE_S = 0.5
_SALTS = 1 << 20
"""Numbers of coordinators, of which a term contains one, so that no two offer the same term."""


def new_term(now_s: float, random: Random) -> int:
    """Return the term of a coordinator that starts at `now_s` (time.time()). The newest coordinator
    should win."""
    return int(now_s) * _SALTS + random.randrange(_SALTS)


@dataclass
class _Acknowledgment:
    """What a machine that has acknowledged the own term has reported last."""

    answered_s: float
    """When this coordinator sent the last answer that the machine had received: a lower bound of
    the time at which it reported."""
    voters: tuple[int, int]
    """Version of the voters that it knows."""


class Leadership:
    """Terms and acknowledgments from the view of one coordinator."""

    def __init__(self, term: int, *, is_sole: bool = False) -> None:
        """`term` is a `new_term`. `is_sole`: no other coordinator exists, so that acknowledgments
        are not needed."""
        self.term = term
        self._is_sole = is_sole
        self._voters = VoterList()
        self._acknowledged: dict[str, _Acknowledgment] = {}
        self._left: set[str] = set()
        """Voters that have left this coordinator."""
        self._elected_s: float | None = None
        self._heard_s = -math.inf
        """When a voter was heard last."""
        self._next_update_s = 0.0

    @property
    def is_elected(self) -> bool:
        """Whether it has been elected in its term. It may lead only with `leads`."""
        return self._elected_s is not None

    def record(self, machine: str, vote: Vote, now_s: float) -> None:
        """Record the vote in a report."""
        if vote.term > self.term and (not self._acknowledged or not vote.has_lease):
            # This coordinator has just been started, or the other one does not serve the machine.
            self._resign((vote.term // _SALTS + 1) * _SALTS + self.term % _SALTS)
        reported = VoterList.parse(vote.voters)
        self._learn_voters(machine, reported, now_s)
        if vote.term == self.term:
            self._acknowledge(machine, vote.answered_s, reported.version)
        if not self.is_elected and self._has_acknowledgments(now_s):
            self._elected_s = now_s

    def _learn_voters(self, machine: str, reported: VoterList, now_s: float) -> None:
        """Find the newest list. If there is none, a machine that reports is the only voter until
        all machines of an earlier run must have reported."""
        is_newer = reported.version > self._voters.version
        if is_newer:
            self._voters = reported
        is_real = any(self._voters.version)
        silent_s = now_s - self._heard_s
        if not any(reported.version) and silent_s > (ALL_LOST_S if is_real else ACKNOWLEDGED_S):
            # All machines of the last run have ended, or the only voter has.
            self._voters = VoterList(voters=(machine,))
            is_newer = True
        if is_newer:
            # It was elected by others.
            self._resign(self.term)
        if is_newer or machine in self._voters.all:
            self._heard_s = now_s

    def _acknowledge(self, machine: str, answered_s: float, voters: tuple[int, int]) -> None:
        known = self._acknowledged.setdefault(machine, _Acknowledgment(0.0, (0, 0)))
        known.answered_s = max(known.answered_s, answered_s)
        known.voters = max(known.voters, voters)

    def _resign(self, term: int) -> None:
        """End the leadership, and offer `term`."""
        if term != self.term:
            self._acknowledged = {}
        self.term, self._elected_s = term, None

    def leave(self, machine: str, vote: Vote, now_s: float) -> None:
        """Record that a machine has left this coordinator: it acknowledges no other one."""
        self.record(machine, vote, now_s)
        if machine in self._voters.all and vote.term <= self.term:
            self._left.add(machine)

    def is_voter(self, machine: str) -> bool:
        """Return whether the acknowledgments of a machine count."""
        return machine in self._voters.all

    def leads(self, now_s: float) -> bool:
        """Return whether it may decide, and grant leases."""
        return self.is_elected and self._has_acknowledgments(now_s)

    def _has_acknowledgments(self, now_s: float) -> bool:
        """Return whether enough voters have acknowledged the term recently."""
        return self._have(self._is_recent(now_s))

    @staticmethod
    def _is_recent(now_s: float) -> Callable[[_Acknowledgment], bool]:
        return lambda known: known.answered_s >= now_s - ACKNOWLEDGED_S

    def _have(self, counts: Callable[[_Acknowledgment], bool]) -> bool:
        """Return whether enough voters of each list count."""
        return self._is_sole or all(
            self._count(counts, voters) >= self._needed(voters) for voters in self._voters.lists
        )

    def _needed(self, voters: Sequence[str]) -> int:
        """Return how many voters it needs: half of them, and a majority to be elected."""
        return (len(voters) + 1) // 2 if self.is_elected else len(voters) // 2 + 1

    def _count(self, counts: Callable[[_Acknowledgment], bool], voters: Sequence[str]) -> int:
        known = self._acknowledged
        return sum(v in self._left or (v in known and counts(known[v])) for v in voters)

    def claim(self, now_s: float) -> Claim:
        """Return what an answer at this time says."""
        leads = self.leads(now_s)
        return Claim(
            term=self.term,
            leads=leads,
            answered_s=now_s,
            # Machines that have not been in a run must not know its voters, see `_learn_voters`.
            voters=self._voters.to_text() if leads else "",
            problem="" if leads else self._problem(now_s),
        )

    def _problem(self, now_s: float) -> str:
        """Return why it does not lead."""
        for voters in self._voters.lists:
            count, needed = self._count(self._is_recent(now_s), voters), self._needed(voters)
            if count < needed:
                return (
                    f"{count} of the {len(voters)} machines that elect the coordinator have "
                    f"acknowledged this one, and it needs {needed}: the others are lost, or follow "
                    "another one"
                )
        return "it has just been started"

    def status(self, now_s: float) -> dict[str, Any]:
        """Return whether it leads, and which voters have acknowledged it, as JSON values."""
        claim, is_recent = self.claim(now_s), self._is_recent(now_s)
        return {
            "leads": claim.leads,
            "problem": claim.problem,
            "term": self.term,
            "is_sole": self._is_sole,
            "voters": [
                {"machine": voter, "has_acknowledged": self._count(is_recent, [voter]) > 0}
                for voter in sorted(self._voters.all)
            ],
        }

    def update(self, find_machines: Callable[[], Sequence[str]], now_s: float) -> None:
        """Replace voters that are lost or have left by others of the run, which `find_machines`
        returns, and add some if there are fewer than MAX_VOTERS."""
        if now_s < self._next_update_s or not self.leads(now_s):
            return
        self._next_update_s = now_s + _UPDATE_S
        assert self._elected_s is not None
        voters, version = self._voters, self._voters.version
        if now_s - self._elected_s < LEARN_S:
            return
        if version[0] == self.term and not self._have(lambda known: known.voters >= version):
            return
        if voters.former and version[0] == self.term:
            self._propose(voters.voters)
            return
        if voters.former:
            # A predecessor began the change, and enough of either list must know it first.
            self._propose(voters.voters, voters.former)
            return
        machines = find_machines()
        known = {*machines, *voters.all}
        self._acknowledged = {m: k for m, k in self._acknowledged.items() if m in known}
        staying = [voter for voter in voters.voters if voter in machines]
        joining = [m for m in machines if m not in staying and m in self._acknowledged]
        chosen = (*staying, *joining)[:MAX_VOTERS]
        if chosen and set(chosen) != set(voters.voters):
            self._propose(chosen, voters.voters)

    def _propose(self, voters: Sequence[str], former: Sequence[str] = ()) -> None:
        term, index = self._voters.version
        index = index + 1 if term == self.term else 0
        self._voters = VoterList((self.term, index), tuple(voters), tuple(former))
        self._left &= self._voters.all
