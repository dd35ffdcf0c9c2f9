"""Decisions of the coordinator about one replica: a state machine that reports drive.

Each generation has a number, and a node rank for each of its members. A generation ends for all
members when a machine is lost or a rank fails. The next one is decided when every machine that
still answers has its ranks on standby: members keep their node ranks, spare machines fill the
others.

When a machine is asked to stop, all ranks save and exit. A run of one replica ends with that; with
several replicas, the next generation of the replica waits for another machine.

Invariants: it has no clock and no I/O; a machine is recorded before others expire; what must
survive a restart is in the reports, so that none of it is stored.
"""

import math
import os
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_lite.core.errors import MACHINE_FAULT, TRANSIENT
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    Answer,
    FailureKind,
    NodeState,
    Report,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.resize_coordinator import (
    ResizeCoordinator,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    ALL_LOST_S,
    LEARN_S,
    LOST_S,
    QUIET_S,
    REPORT_S,
    SUSPECT_S,
    report_interval_s,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import ResizeState
from torchtitan_lite.fault_tolerance.supervision.restart_policy import (
    HEALTHY_S,
    Failure,
    GiveUp,
    RestartPolicy,
    with_final_reason,
)

_MAX_RESTARTS = 10
_MAX_MACHINES = 4096
_OUTAGE_DELAY_S = 1.0
"""Delay of the next generation if all members lost their leases."""
_FAILURES_OF_A_MACHINE = 2
"""Failures in a row on one machine, without progress in between, after which a spare machine takes
its place."""


def _default_policy(replica: int) -> RestartPolicy:
    return RestartPolicy(_MAX_RESTARTS, first_delay_s=0.1, max_delay_s=1.0)


@dataclass(frozen=True, kw_only=True)
class RunRules:
    """What differs between runs."""

    policy: Callable[[int], RestartPolicy] = _default_policy
    """Returns the restart policy of a replica."""
    is_local: bool = False
    """Whether the members are in this process: they are never lost, and there is nothing to
    learn."""
    outlives_stops: bool = False
    """Whether a single replica, too, is started again after its ranks, but not its machine, were
    asked to stop."""

    def end_with(self, report: Report) -> bool:
        """Whether the run ends when the replica of a member stops."""
        return report.num_replicas == 1 and not self.outlives_stops


class Rejected(Exception):
    """A report that can never be accepted; the text is for the user."""


class Busy(Exception):
    """A report that can be accepted when the machines of the last run have left."""


@dataclass
class _Machine:
    report: Report
    heard_s: float
    was_joined: bool = False
    """Whether it has reported the present generation."""
    failed_at_s: float = 0.0
    joins_until: int = 0
    """Number of the report until which it may join a generation that an answer has named."""


class ReplicaCoordinator:
    """Decisions for one replica, which is the run if there are no others."""

    def __init__(
        self,
        now_s: float,
        replica: int,
        *,
        rules: RunRules,
        resizes: ResizeCoordinator,
        borrow: Callable[["ReplicaCoordinator", float], list[str]],
    ) -> None:
        """`resizes` decides about the mesh; `borrow` lets a spare machine of another replica, if
        there is one, become this one's."""
        self._replica, self._rules = replica, rules
        self._resizes, self._borrow = resizes, borrow
        self._machines: dict[str, _Machine] = {}
        self._dismissed: set[str] = set()
        """Machines at fault, which must not train again."""
        self._left_s: dict[str, float] = {}
        """Machines that have left, until no earlier report of them can arrive any more."""
        self._leases_until_s = 0.0
        """When the leases of all machines whose places were given away have certainly ended."""
        self._is_alone = True
        """Whether the run ends with this replica's."""
        # Machines may train that were members before a restart of this process.
        self.start(now_s, learn_s=0.0 if rules.is_local else LEARN_S)

    def start(self, now_s: float, learn_s: float) -> None:
        """Start with nothing known of a run, and learn what the machines know for `learn_s` after
        the first report."""
        self._started_s = now_s
        self._policy = self._rules.policy(self._replica)
        self._state = RunState.REBUILDING
        self._learn_s = learn_s
        self._first_report_s: float | None = None
        self._first_member_s: float | None = None
        """Time of the first report of a member of the last generation, while it is learned."""
        self._generation = 0
        self._members: list[str] = []
        """Machines of the present or last generation, by node rank; "" for one that is unknown."""
        self._node_ranks: dict[str, int] = {}
        """The reverse, without the unknown ones."""
        self._joined = ""
        """Names of its machines."""
        self._finished: dict[int, int] = {}
        """Generation in which all ranks of a node rank finished before its machine left."""
        self._lost: list[str] = []
        """Names of the members that were lost in this generation."""
        self._departed: list[str] = []
        """Names of those that have left it because they were asked to stop."""
        self._was_stopped = False
        """Whether ranks of a machine that has left ended it before the last step."""
        self._num_failures: dict[str, int] = {}
        """Failures since the run was last healthy, by machine."""
        self._progress_since_s: float | None = None
        self._is_judged = True
        """Whether the end of the last generation has been evaluated."""
        self._not_before_s = 0.0
        self._blamed = self._reason = ""
        self._status = 0

    def record(self, report: Report, now_s: float) -> bool:
        """Record a report, and return whether it says anything new. Raises Rejected or Busy.
        `check_newcomer` has accepted a new machine."""
        if report.machine not in self._machines:
            self._check_room()
        return self._record(report, now_s)

    def leave(self, report: Report, reason: str, now_s: float) -> None:
        """Forget a machine, all of whose ranks have ended; `reason` is why if they could not save.
        `report` is its last one."""
        machine, self._is_alone = report.machine, self._rules.end_with(report)
        self._left_s = {m: s for m, s in self._left_s.items() if now_s - s <= LOST_S}
        self._left_s[machine] = now_s
        is_known = self._machines.pop(machine, None) is not None
        has_finished = report.phase is NodeState.ENDED and not reason
        if has_finished and self._state in (RunState.REBUILDING, RunState.RUNNING):
            self._finished[report.node_rank] = report.generation
            self._was_stopped |= report.was_stopped
            if report.is_stopping:
                self._departed.append(report.name)
        if not is_known or machine not in self._members or self._state is RunState.ENDED:
            return
        if reason and self._is_alone:
            self._end(1, f"{report.name}: {reason}")
            return
        if not has_finished:
            self._lost.append(report.name)
        self.advance(now_s)

    def _has_finished(self, node_rank: int) -> bool:
        """Return whether a machine has left whose ranks have finished in the present generation."""
        return self._finished.get(node_rank) == self._generation

    def check_welcome(self, report: Report, now_s: float) -> None:
        """Raise Rejected for a machine that may not take part any more."""
        if report.machine in self._dismissed:
            raise Rejected(
                f"{report.name} is at fault, and another machine has taken its place: see "
                "its log, and replace it."
            )
        if now_s - self._left_s.get(report.machine, -math.inf) <= LOST_S:
            raise Rejected(f"{report.name} has left: this report was late.")

    def _check_room(self) -> None:
        if self._state is RunState.ENDED:
            raise Busy(f"the last run has ended ({self._reason}), and its machines have not left")
        if len(self._machines) >= _MAX_MACHINES:
            raise Rejected(f"{_MAX_MACHINES} machines have joined already.")

    def check_newcomer(self, report: Report) -> None:
        """Raise Rejected for a machine that cannot take part in the run of this replica's."""
        if self._state is RunState.ENDED:
            return
        if self._state is RunState.REBUILDING and report.generation:
            # Machines of the run precede those that reached a restarted coordinator before them.
            for machine, entry in list(self._machines.items()):
                if not entry.report.generation and _difference(entry.report, report):
                    del self._machines[machine]
        if not self._machines:
            return
        newest = max(self.reports, key=lambda peer: peer.generation)
        if difference := _difference(newest, report):
            label, theirs, own = difference
            raise Rejected(
                f"{label} is {own} here, but {theirs} on {newest.name}, which has joined: "
                "start all machines with the same options and configuration, or start another "
                "coordinator for this run."
            )

    def _record(self, report: Report, now_s: float) -> bool:
        self._is_alone = self._rules.end_with(report)
        known = self._machines.get(report.machine)
        is_new = known is None
        if known is None:
            known = self._machines[report.machine] = _Machine(report, now_s)
        elif report.sequence <= known.report.sequence:
            return False
        before = known.report
        known.report, known.heard_s = report, now_s
        if report.failure and (before.failure, before.generation) != (
            report.failure,
            report.generation,
        ):
            known.failed_at_s = now_s - report.failure_age_s
        return is_new or before != replace(report, sequence=before.sequence)

    @property
    def has_finished(self) -> bool:
        """Whether its ranks have taken the last step of the run."""
        return self._state is RunState.ENDED and not self._status

    def end_with_run(self) -> None:
        """End it, if it waits for machines, because another replica has finished the run."""
        reports = self.reports
        is_short = not reports or self.num_missing(reports[0].machines_per_replica) > 0
        if self._state is RunState.FORMING and is_short:
            self._end(0, "another replica has finished the run")

    @property
    def state(self) -> RunState:
        return self._state

    @property
    def news(self) -> Hashable:
        """What its machines should learn of at once; a value that differs whenever that does."""
        resize = self._resizes.resize
        first = self._machines.get(self._members[0]) if self._members else None
        port = 0 if first is None else (first.report.store_port, first.report.generation)
        return self._state, self._generation, port, resize and (resize.id, resize.state)

    @property
    def not_before_s(self) -> float:
        """When the next generation may start."""
        return self._not_before_s

    @property
    def reports(self) -> list[Report]:
        """The last reports of its machines."""
        return [entry.report for entry in self._machines.values()]

    @property
    def machines(self) -> list[str]:
        """Its machines, members before spare ones."""
        return sorted(self._machines, key=lambda machine: machine not in self._node_ranks)

    def status(self, now_s: float) -> dict[str, Any]:
        """Return its state and its machines, members before spare ones, as JSON values."""
        entries = [self._machines[machine] for machine in self.machines]
        return {
            "replica": self._replica,
            "state": self._state,
            "generation": self._generation,
            "reason": self._reason,
            "machines": [self._machine_status(entry, now_s) for entry in entries],
        }

    def _machine_status(self, entry: _Machine, now_s: float) -> dict[str, Any]:
        report = entry.report
        node_rank = self._node_ranks.get(report.machine)
        return {
            "machine": report.machine,
            "name": report.name,
            "node_rank": node_rank,
            "is_spare": node_rank is None and self._state is RunState.RUNNING,
            "generation": report.generation,
            "phase": report.phase,
            "has_progress": report.has_progress,
            "is_stopping": report.is_stopping,
            "report_age_s": now_s - entry.heard_s,
        }

    def may_train(self, now_s: float) -> bool:
        """Return whether ranks of it may start, train, or not have returned to standby."""
        # Machines that have not reached a restarted coordinator yet may have leases.
        is_unknown = self._state is RunState.REBUILDING and now_s < self._started_s + LEARN_S
        joins = any(map(self._may_join, self._machines.values()))
        is_running = self._state is RunState.RUNNING
        is_busy = any(report.is_busy for report in self.reports)
        return is_unknown or is_running or joins or is_busy or now_s < self._leases_until_s

    def _may_join(self, entry: _Machine) -> bool:
        """Return whether a machine may have joined the generation without having reported it."""
        report = entry.report
        return report.generation < self._generation and report.sequence < entry.joins_until

    def training_members(self) -> list[Report] | None:
        """Return the members of its generation, none if it waits for machines; None unless all
        ranks have committed a step."""
        if self._state is RunState.ENDED or not self._machines:
            return []
        if self._state is not RunState.RUNNING:
            is_short = self.num_missing(self.reports[0].machines_per_replica) > 0
            return [] if self._state is RunState.FORMING and is_short else None
        members = self._present_members()
        reports = [member.report for member in members if member is not None and member.was_joined]
        trained = [report for report in reports if report.has_progress]
        return trained if len(trained) == len(members) else None

    def has(self, machine: str) -> bool:
        """Return whether a machine is one of its own, as a member or as a spare one."""
        return machine in self._machines

    def is_member(self, machine: str) -> bool:
        """Return whether a machine has a place in the present or last generation."""
        return machine in self._node_ranks

    def num_missing(self, size: int) -> int:
        """Return the number of machines without which there is no next generation of `size`
        machines; negative if there are more. A generation that runs, or a replica that has ended,
        needs none."""
        is_forming = self._state in (RunState.REBUILDING, RunState.FORMING)
        return (size if is_forming else 0) - sum(not r.is_stopping for r in self.reports)

    @property
    def num_members(self) -> int:
        """Number of machines that have a place, as long as the replica has not ended."""
        return 0 if self._state is RunState.ENDED else len(self._members)

    def free_spare(self, size: int, now_s: float) -> str | None:
        """Return a spare machine that it does not need, the one that has failed least; None if it
        needs all."""
        if self.num_missing(size) >= 0:
            return None
        return next((m for m in self._ranked() if self._is_free(m, now_s)), None)

    def pass_on(self, machine: str, receiver: "ReplicaCoordinator") -> None:
        """Let a spare machine be for another replica."""
        receiver._machines[machine] = self._machines.pop(machine)

    def expire(self, now_s: float, except_for: str, *, is_outage: bool) -> None:
        """Forget the machines that are lost, `except_for` the one that reports now."""
        if self._rules.is_local:
            return
        limit_s = ALL_LOST_S if is_outage and self._state is not RunState.ENDED else LOST_S
        for machine, entry in list(self._machines.items()):
            if machine != except_for and now_s - entry.heard_s > limit_s:
                del self._machines[machine]
                if machine in self._members:
                    self._lost.append(entry.report.name)

    def expire_early(
        self, now_s: float, *, except_for: str, breaks: Collection[str], steady_since_s: float
    ) -> None:
        """Forget members that are probably lost, if spare machines can take their places at once:
        those of `breaks`, whose connections broke, and those that are silent. Silence counts from
        `steady_since_s`. The next generation must wait with what others see."""
        if self._rules.is_local or self._state not in (RunState.RUNNING, RunState.FORMING):
            return
        lost = [
            machine
            for machine in self._node_ranks
            if machine in self._machines
            and machine != except_for
            and (machine in breaks or self._is_silent(machine, now_s, steady_since_s))
        ]
        spares = [m for m in self._ranked() if self._is_free(m, now_s)]
        while len(spares) < len(lost) and (borrowed := self._borrow(self, now_s)):
            spares += borrowed
        if len(spares) < len(lost):
            return
        for machine in lost:
            entry = self._machines.pop(machine)
            self._lost.append(entry.report.name)
            self._leases_until_s = max(self._leases_until_s, entry.heard_s + LOST_S)

    def _is_free(self, machine: str, now_s: float) -> bool:
        """Return whether a machine is a spare one that is not silent."""
        entry = self._machines[machine]
        longest_s = QUIET_S + report_interval_s(entry.report.num_machines) - REPORT_S
        return machine not in self._node_ranks and now_s - entry.heard_s < longest_s

    def _is_silent(self, machine: str, now_s: float, steady_since_s: float) -> bool:
        """Return whether a machine has not reported for so long that it is probably lost."""
        entry = self._machines[machine]
        interval_s = report_interval_s(entry.report.num_machines)
        return now_s - max(entry.heard_s, steady_since_s) > SUSPECT_S + interval_s - REPORT_S

    def advance(self, now_s: float) -> None:
        """Decide what follows from the reports and from the time."""
        self._joined = ", ".join(sorted(report.name for report in self.reports))[:1000]
        if self._state is RunState.REBUILDING and self._machines:
            self._rebuild(now_s)
        if self._state is RunState.RUNNING:
            self._watch(now_s)
        if self._state is RunState.FORMING and self._machines:
            self._form(now_s)
        # Members of an earlier generation that another coordinator has given up, and that this one
        # did not know when it renewed their leases.
        for entry in self._machines.values():
            report = entry.report
            is_own = report.is_busy and report.replica == self._replica
            if is_own and report.generation < self._generation:
                self._leases_until_s = max(self._leases_until_s, entry.heard_s + LOST_S)

    def _rebuild(self, now_s: float) -> None:
        """Learn the last generation from the reports."""
        if self._first_report_s is None:
            # The start of this process does not count: all machines may reach it late.
            self._first_report_s = now_s
        reports = self.reports
        own = [report for report in reports if report.replica == self._replica]
        self._generation = max(
            (r.seen_generation for r in reports if r.seen_replica == self._replica), default=0
        )
        self._resizes.learn()
        size = reports[0].machines_per_replica
        seats = {r.node_rank: r for r in own if r.generation == self._generation and r.generation}
        members = [seats[n].machine if n in seats else "" for n in range(size)]
        self._seat(members if self._generation else [])
        if seats and all(n in seats or self._has_finished(n) for n in range(size)):
            self._state = RunState.RUNNING
            self._resizes.rebuild([*seats.values()], now_s)
            return
        if seats and self._first_member_s is None:
            self._first_member_s = now_s
        if self._generation and self._first_member_s is None:
            # Spares that know of a generation prove that it had members, all of which are silent.
            until_s = self._first_report_s + ALL_LOST_S
        else:
            until_s = (self._first_member_s or self._first_report_s) + self._learn_s
        if now_s >= until_s:
            self._state = RunState.FORMING
            self._resizes.rebuild([*seats.values()], now_s)

    def _watch(self, now_s: float) -> None:
        """End the generation when a member has left it, or the run when all have finished."""
        members = self._present_members()
        living = [member for member in members if member is not None]
        for member in living:
            member.was_joined = member.was_joined or member.report.generation == self._generation
        if len(living) == len(members):
            if all(self._has_ended(member.report) for member in living):
                self._end_training([member.report for member in living], now_s)
                return
            if all(member.report.has_progress and member.was_joined for member in living):
                self._policy.made_progress(now_s)
                self._progress_since_s = self._progress_since_s or now_s
            if self._continues(living, now_s):
                return
        self._state, self._is_judged = RunState.FORMING, False

    def _present_members(self) -> list[_Machine | None]:
        """Return the members of the generation except for those that have finished and left; None
        for one that is lost."""
        return [
            self._machines.get(machine)
            for node_rank, machine in enumerate(self._members)
            if not self._has_finished(node_rank)
        ]

    def _end_training(self, members: list[Report], now_s: float) -> None:
        """End the run, because all ranks have finished, or form the next generation without the
        machines that were asked to stop."""
        was_stopped = self._was_stopped or any(member.was_stopped for member in members)
        if not was_stopped or self._is_alone:
            self._end(0, "all ranks have finished")
            return
        stopping = [member.name for member in members if member.is_stopping]
        names = ", ".join([*self._departed, *stopping])
        self._state, self._not_before_s = RunState.FORMING, now_s
        self._blamed, self._reason = "", f"a stop was requested on {names or 'a rank'}"
        if not names:
            # Nobody wants the replica to leave: something else may ask it again and again.
            self._decide(Failure(self._reason, "", Path(os.devnull)), now_s)

    def _continues(self, members: list[_Machine], now_s: float) -> bool:
        """Return whether all members train, or their ranks are still leaving to resize the run."""
        if not self._resizes.is_leaving:
            return not any(map(self._has_stopped, members))
        if any(self._has_stopped(member) and not member.report.has_left for member in members):
            return False
        if all(member.report.has_left or self._has_ended(member.report) for member in members):
            return False
        return not self._resizes.is_overdue(now_s)

    def _has_ended(self, report: Report) -> bool:
        """Return whether all ranks of a machine have finished in the present generation."""
        return report.generation == self._generation and report.phase is NodeState.ENDED

    def _has_stopped(self, member: _Machine) -> bool:
        """Return whether a member does not train in the present generation any more."""
        if member.report.generation == self._generation:
            return member.report.phase in (NodeState.STANDBY, NodeState.FAILED)
        return member.was_joined

    def _form(self, now_s: float) -> None:
        """Start the next generation if there are enough machines, all of them on standby."""
        former = [self._machines[m] for m in self._members if m in self._machines]
        if any(entry.report.is_busy or self._may_join(entry) for entry in self._machines.values()):
            return
        if not self._is_judged:
            self._is_judged = True
            self._judge(former, now_s)
        if self._state is not RunState.FORMING or now_s < self._not_before_s:
            return
        self._resizes.advance(now_s)
        size = self.reports[0].machines_per_replica
        if self._resizes.must_wait:
            return
        # The only machine of a replica must train once more: its ranks have left for a resize, and
        # save only while they train.
        departs = not self._is_alone and not self._rules.is_local
        departing = {r.machine for r in self.reports if r.is_stopping and departs}
        seats: dict[int, str] = {
            node_rank: machine
            for node_rank, machine in enumerate(self._members)
            if machine in self._machines and machine not in departing
        }
        spares = [machine for machine in self._ranked() if machine not in seats.values()]
        if len(seats) + len(spares) < size:
            return
        for node_rank in range(size):
            if node_rank not in seats:
                seats[node_rank] = spares.pop(0)
        seen = max(report.seen_generation for report in self.reports)
        self._generation = max(self._generation, seen) + 1
        self._seat([seats[node_rank] for node_rank in range(size)])
        self._state, self._lost, self._departed = RunState.RUNNING, [], []
        self._was_stopped = False
        self._policy.started()
        self._progress_since_s = None
        for member in self._machines.values():
            member.was_joined = False

    def _ranked(self) -> Iterable[str]:
        """Return the machines that were not asked to stop, those first that have not failed."""
        staying = [report.machine for report in self.reports if not report.is_stopping]
        return sorted(staying, key=lambda machine: self._num_failures.get(machine, 0))

    def _judge(self, former: list[_Machine], now_s: float) -> None:
        """Find why the generation ended, and whether there is a next one."""
        failed = [
            member
            for member in former
            if member.report.failure and member.report.generation == self._generation
        ]
        by_kind = {
            kind: [member for member in failed if member.report.failure is kind]
            for kind in FailureKind
        }
        self._blamed = ""
        cause = None
        # A machine that is lost, or has stopped its ranks at the end of its lease, explains the
        # exceptions of the others, as a process that died does, and not the reverse.
        cut = [
            member
            for member in former
            if member.report.has_lost_lease and member.report.generation == self._generation
        ]
        was_cut = bool(self._lost or cut)
        resize, is_leaving = self._resizes.resize, self._resizes.is_leaving
        # Exceptions of ranks that are aborted because others leave too late are explained, too.
        is_explained = was_cut or (resize is not None and is_leaving and resize.is_late)
        for kind in (FailureKind.USER_ERROR, FailureKind.DEATH, FailureKind.EXCEPTION):
            if by_kind[kind] and (kind is not FailureKind.EXCEPTION or not is_explained):
                cause = min(by_kind[kind], key=lambda member: member.failed_at_s)
                break
        stopping = next((member.report for member in former if member.report.is_stopping), None)
        left = [
            member
            for member in former
            if member.report.has_left and member.report.generation == self._generation
        ]
        if cause is None and not was_cut and (left or is_leaving):
            self._end_leaving(stopping)
            self._not_before_s = now_s
            return
        if cause is None and not was_cut and stopping is not None and not self._is_alone:
            # Its ranks had not trained yet, and have nothing to save.
            self._reason, self._not_before_s = f"a stop was requested on {stopping.name}", now_s
            return
        if cause is None:
            names = ", ".join(self._lost or [member.report.name for member in cut])
            self._reason = f"lost {names}" if self._lost else f"{names or 'a machine'} was cut off"
            # An outage of the coordinator cuts all of them off, and a bad network one of them.
            suspects = cut if len(cut) < len(self._members) - len(left) else []
            failure = Failure(self._reason, "", Path(os.devnull))
            named = self._reason
        else:
            report, suspects = cause.report, [cause]
            self._blamed = report.machine
            named = f"{report.name}: {report.failure_text}"
            # In this process, the rank says enough.
            self._reason = report.failure_text if self._rules.is_local else named
            failure = Failure(
                self._reason,
                report.failure_signature,
                Path(os.devnull),
                report.failure_rank,
                report.failure_status,
            )
        is_returning = self._resizes.is_returning
        if is_leaving and not is_returning:
            self._resizes.generation_failed(named, now_s)
        if stopping is not None and self._is_alone:
            self._end(failure.status or 1, f"{self._reason}; {stopping.name} was asked to stop")
            return
        if not suspects and not self._lost:
            self._not_before_s = now_s + _OUTAGE_DELAY_S
            return
        is_at_fault = failure.status == MACHINE_FAULT
        if is_returning or self._resizes.is_first_on_mesh:
            if not is_returning:
                self._resizes.return_to_former(named, now_s)
            if not is_at_fault:
                self._not_before_s = now_s
                return
        is_user_error = cause is not None and cause.report.failure is FailureKind.USER_ERROR
        # With other replicas, or storage, an error such as a lost state may be repaired.
        may_restart = not self._is_alone and (failure.signature or failure.status == TRANSIENT)
        if is_user_error and not is_at_fault and not may_restart:
            self._end(failure.status, with_final_reason(self._reason, failure.status))
            return
        is_replaced = self._replace(
            [suspect.report.machine for suspect in suspects], failure, now_s
        )
        self._decide(failure, now_s, is_replaced=is_replaced)

    def _decide(self, failure: Failure, now_s: float, *, is_replaced: bool = False) -> None:
        """Let the restart policy decide whether and when the next generation starts: at once if
        another machine takes the place of the one that failed."""
        decision = self._policy.failed(failure, now_s)
        if is_replaced:
            self._not_before_s = now_s
        elif isinstance(decision, GiveUp):
            self._end(decision.exit_status, f"{self._reason}: {decision.reason}")
        else:
            self._not_before_s = now_s + decision.delay_s

    def _end_leaving(self, stopping: Report | None) -> None:
        """Let the next generation be on the mesh of a resize, for which all ranks have left; on the
        former one if the only replica was asked to stop: to save and exit, its ranks must train."""
        self._reason = "all ranks have left to resize the run"
        # A coordinator that was restarted meanwhile has no resize.
        if self._resizes.is_leaving and stopping is not None and self._is_alone:
            self._resizes.end(ResizeState.FAILED, f"{stopping.name} was asked to stop")

    def _replace(self, machines: list[str], failure: Failure, now_s: float) -> bool:
        """Take the node ranks from those of `machines` that are at fault or cause failures
        repeatedly, as long as there are spare ones. Returns whether it did."""
        since_s = self._progress_since_s
        if since_s is not None and now_s - since_s >= HEALTHY_S:
            self._num_failures = {}
        for machine in machines:
            self._num_failures[machine] = self._num_failures.get(machine, 0) + 1
        is_at_fault = failure.status == MACHINE_FAULT
        spares = [machine for machine in self._ranked() if machine not in self._members]
        is_replaced = False
        for machine in machines:
            num_failures = self._num_failures[machine]
            if not is_at_fault and num_failures < _FAILURES_OF_A_MACHINE:
                continue
            spares = spares or self._borrow(self, now_s)
            if not spares or self._num_failures.get(spares[0], 0) >= num_failures:
                continue
            del spares[0]
            self._seat(["" if member == machine else member for member in self._members])
            is_replaced = True
            if is_at_fault:
                self._dismissed.add(machine)
                del self._machines[machine]
        return is_replaced

    def _seat(self, members: list[str]) -> None:
        """Let these be the members."""
        self._members = members
        self._node_ranks = {machine: place for place, machine in enumerate(members) if machine}

    def _end(self, status: int, reason: str) -> None:
        self._state, self._status, self._reason = RunState.ENDED, status, reason

    def answer(self, machine: str, now_s: float) -> Answer:
        """Return the answer to the last report of a machine."""
        members, entry = self._members, self._machines.get(machine)
        is_seated = self._state is RunState.RUNNING and machine in self._node_ranks
        if entry is not None and is_seated and entry.report.generation < self._generation:
            # By the second report after it, a later answer has replaced this one.
            entry.joins_until = entry.report.sequence + 2
        store_address, store_port = "", 0
        if self._state is RunState.RUNNING and members[0] in self._machines:
            first = self._machines[members[0]].report
            if first.generation == self._generation and first.store_port:
                store_address, store_port = first.address, first.store_port
        resize = self._resizes.resize
        request = entry.report.request if entry is not None else ""
        state, reason = self._resizes.outcome(request)
        return Answer(
            state=self._state,
            replica=self._replica,
            generation=self._generation,
            node_rank=self._node_ranks.get(machine, -1),
            store_address=store_address,
            store_port=store_port,
            is_blamed=machine == self._blamed,
            reason=self._reason[:1000],
            status=self._status,
            num_joined=len(self._machines),
            joined=self._joined,
            mesh=self._resizes.mesh,
            # Machines of which a restarted coordinator knows nothing may have leases, too.
            withholds_outputs=now_s < max(self._leases_until_s, self._started_s + self._learn_s),
            resize=resize.id if resize else "",
            resize_mesh=resize.mesh if resize else "",
            resize_state=resize.state if resize else ResizeState.ACCEPTED,
            request=request,
            request_state=state,
            request_reason=reason[:1000],
        )


def _difference(expected: Report, report: Report) -> tuple[str, object, object] | None:
    """Return the first setting in which two machines differ, and its values: they cannot take part
    in the same run."""
    for label, theirs, own in (
        ("--rdzv-id", expected.run_id, report.run_id),
        ("--nnodes", expected.num_machines, report.num_machines),
        ("--replicas", expected.num_replicas, report.num_replicas),
        ("--nproc", expected.num_ranks, report.num_ranks),
        ("job.dump_folder", expected.dump_folder, report.dump_folder),
        ("the configuration's fingerprint", expected.fingerprint, report.fingerprint),
    ):
        if theirs != own:
            return label, theirs, own
    return None
