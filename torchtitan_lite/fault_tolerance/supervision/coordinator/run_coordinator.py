"""Decisions of the coordinator about all replicas of a run: which machine is for which of them.

A machine stays with its replica as long as it has a place there. Spare machines are for whichever
replica needs one: that with the fewest machines missing first, so that replicas become complete one
after the other.

Invariants: as those of `replica_coordinator`, of which each replica has one.
"""

import math
from collections.abc import Collection, Hashable
from typing import Any

from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    Answer,
    Report,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.replica_coordinator import (
    Rejected,
    ReplicaCoordinator,
    RunRules,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.resize_coordinator import (
    ResizeCoordinator,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    BROKEN_S,
    LEASE_S,
    LOST_S,
    OUTAGE_S,
    PASS_S,
    QUIET_S,
)

_MAX_REPLICAS = 1024
_FEW_MACHINES = 64


class RunCoordinator:
    """Decisions for one run, and for the next one when its machines have left."""

    def __init__(self, now_s: float, rules: RunRules | None = None) -> None:
        self.rules = rules or RunRules()
        self._replicas: list[ReplicaCoordinator] = []
        self._resizes = ResizeCoordinator(self._replicas)
        self._owners: dict[str, ReplicaCoordinator] = {}
        """Replicas of machines when they were last looked for."""
        self._contact_s = self._outage_ended_s = now_s
        """When a machine that may train last reported, and when such a report ended an outage."""
        self._steady_since_s = now_s
        """When such a report ended a silence of all of them."""
        self._breaks: dict[str, float] = {}
        """When the connections of members broke that have not reported since."""
        self._broke_s = -math.inf
        """When one of a member broke last."""
        self._next_pass_s = now_s
        self._add_replica(now_s)

    @property
    def states(self) -> list[RunState]:
        """The state of each replica."""
        return [replica.state for replica in self._replicas]

    def news(self, replica: int) -> Hashable:
        """See `ReplicaCoordinator.news`."""
        return self._replicas[replica].news

    def restart_s(self, replica: int) -> float:
        """Return when the next generation of a replica may start (time.monotonic())."""
        return self._replicas[replica].not_before_s

    @property
    def machines(self) -> list[str]:
        """The machines that have joined, members before spare ones."""
        return [machine for replica in self._replicas for machine in replica.machines]

    def status(self, now_s: float) -> dict[str, Any]:
        """Return the run and its replicas as JSON values, see `ReplicaCoordinator.status`."""
        reports = [report for replica in self._replicas for report in replica.reports]
        return {
            "run_id": reports[0].run_id if reports else "",
            "machines_per_replica": reports[0].machines_per_replica if reports else 0,
            "replicas": [replica.status(now_s) for replica in self._replicas] if reports else [],
        }

    def advance(self, replica: int, now_s: float) -> None:
        """Decide what follows for a replica from the time alone."""
        self._replicas[replica].advance(now_s)

    def report(self, report: Report, now_s: float, *, is_outage: bool = False) -> Answer:
        """Record a report and return the answer. `is_outage`: whether machines that are silent may
        be so because of the network of this coordinator. Raises Rejected or Busy."""
        is_number = 1 <= report.num_replicas <= _MAX_REPLICAS
        if not is_number or report.num_machines % report.num_replicas:
            raise Rejected(
                f"{report.num_machines} machines are not the same number for each of "
                f"{report.num_replicas} replicas: --nnodes must be a multiple of --replicas, which "
                f"is at most {_MAX_REPLICAS}."
            )
        is_known, is_pass = self._owner_of(report.machine) is not None, now_s >= self._next_pass_s
        self._breaks.pop(report.machine, None)
        if not is_known or is_pass:
            for replica in self._replicas:
                replica.check_welcome(report, now_s)
            self._expire(now_s, except_for=report.machine, is_outage=is_outage)
        if not is_known and not any(replica.reports for replica in self._replicas):
            self._begin(report.num_replicas, now_s)
        owner = self._replica_of(report)
        self._record_contact(owner.is_member(report.machine), now_s)
        if owner.record(report, now_s) or is_pass:
            owner.advance(now_s)
        if is_pass:
            self._advance_all(now_s, done=owner)
        return owner.answer(report.machine, now_s)

    def disconnected(self, machine: str, now_s: float) -> None:
        """Record that the connection of a machine has ended. One that lives reports at once. Those
        of several end because of the network, or of a machine between, and mean nothing."""
        owner = self._owner_of(machine)
        if owner is None or not owner.is_member(machine):
            return
        is_single, self._broke_s = now_s - self._broke_s > 2 * BROKEN_S, now_s
        if is_single:
            self._breaks[machine] = now_s
        else:
            self._breaks.clear()

    def check_breaks(self, now_s: float) -> None:
        """Decide about the machines whose connections broke BROKEN_S ago."""
        breaks = [m for m, s in self._breaks.items() if now_s - s >= BROKEN_S]
        self._expire(now_s, breaks=breaks)
        for machine in breaks:
            self._breaks.pop(machine, None)
        self._advance_all(now_s)

    def _expire(
        self,
        now_s: float,
        *,
        except_for: str = "",
        breaks: Collection[str] = (),
        is_outage: bool = False,
    ) -> None:
        """Forget the machines that are lost, or probably so, but not one that reports now."""
        is_outage = (
            is_outage
            or now_s - self._contact_s > OUTAGE_S
            or (
                # It ends with this report, and the other machines get the same time as ever.
                now_s - self._outage_ended_s <= LOST_S
            )
        )
        is_steady = not is_outage and now_s - self._contact_s <= QUIET_S
        for replica in self._replicas:
            replica.expire(now_s, except_for=except_for, is_outage=is_outage)
            if is_steady:
                replica.expire_early(
                    now_s,
                    except_for=except_for,
                    breaks=breaks,
                    steady_since_s=self._steady_since_s,
                )

    def _record_contact(self, is_member: bool, now_s: float) -> None:
        """Record that machines of the run can reach the coordinator. A spare, which may be the only
        one that does, must not take the places of the members."""
        if is_member or sum(replica.num_members for replica in self._replicas) < 2:
            if now_s - self._contact_s > OUTAGE_S:
                self._outage_ended_s = now_s
            if now_s - self._contact_s > QUIET_S:
                self._steady_since_s = now_s
            self._contact_s = now_s

    def _advance_all(self, now_s: float, done: ReplicaCoordinator | None = None) -> None:
        """Decide what follows for all replicas but one that is `done`, and for all together."""
        for replica in self._replicas:
            if replica is not done:
                replica.advance(now_s)
        if any(replica.state is RunState.RUNNING for replica in self._replicas):
            self._resizes.follow(now_s)
        if any(replica.has_finished for replica in self._replicas):
            for replica in self._replicas:
                replica.end_with_run()
        num_machines = sum(len(replica.reports) for replica in self._replicas)
        self._next_pass_s = now_s + (PASS_S if num_machines > _FEW_MACHINES else 0.0)

    def leave(self, report: Report, reason: str, now_s: float) -> None:
        """Forget a machine, see `ReplicaCoordinator.leave`."""
        self._breaks.pop(report.machine, None)
        owner = self._owner_of(report.machine)
        # A coordinator that was restarted does not know it yet.
        if owner is None and 0 <= report.replica < len(self._replicas):
            owner = self._replicas[report.replica]
        if owner is not None:
            owner.leave(report, reason, now_s)

    def _begin(self, num_replicas: int, now_s: float) -> None:
        """Begin a run, or go on with one whose machines have left or lost their leases: some may
        return."""
        while len(self._replicas) > num_replicas:
            self._replicas.pop()
        while len(self._replicas) < num_replicas:
            self._add_replica(now_s)
        self._resizes.start()
        self._contact_s = self._outage_ended_s = self._steady_since_s = now_s
        for replica in self._replicas:
            if replica.state is not RunState.REBUILDING:
                replica.start(now_s, learn_s=0.0 if self.rules.is_local else LEASE_S)

    def _add_replica(self, now_s: float) -> None:
        number = len(self._replicas)
        self._replicas.append(
            ReplicaCoordinator(
                now_s, number, rules=self.rules, resizes=self._resizes, borrow=self._lend
            )
        )

    def _replica_of(self, report: Report) -> ReplicaCoordinator:
        """Return the replica of a machine, which changes for a spare one that another replica
        needs. Raises Rejected if it cannot take part in this run."""
        owner, size = self._owner_of(report.machine), report.machines_per_replica
        if owner is not None and owner.is_member(report.machine):
            return owner
        if owner is None:
            for replica in self._replicas:
                replica.check_newcomer(report)
        going_on = [replica for replica in self._replicas if replica.state is not RunState.ENDED]
        if owner is None and 0 <= report.replica < len(self._replicas):
            former = self._replicas[report.replica]
            if former in going_on:
                return former
        if owner is not None and (report.is_stopping or owner.num_missing(size) >= 0):
            return owner
        needy = [replica for replica in going_on if replica.num_missing(size) > 0]
        if needy:
            chosen = min(needy, key=lambda replica: replica.num_missing(size))
        elif owner in going_on:
            return owner
        else:
            # If all have ended, the answer says so.
            default = owner or self._replicas[0]
            chosen = min(going_on, key=lambda replica: len(replica.reports), default=default)
        if owner is not None and chosen is not owner:
            owner.pass_on(report.machine, chosen)
        return chosen

    def _lend(self, borrower: ReplicaCoordinator, now_s: float) -> list[str]:
        """Let a spare machine that another replica does not need be for `borrower`, and return
        it."""
        size = borrower.reports[0].machines_per_replica
        for replica in self._replicas:
            machine = None if replica is borrower else replica.free_spare(size, now_s)
            if machine is not None:
                replica.pass_on(machine, borrower)
                return [machine]
        return []

    def _owner_of(self, machine: str) -> ReplicaCoordinator | None:
        owner = self._owners.get(machine)
        if owner is None or not owner.has(machine):
            owner = next((replica for replica in self._replicas if replica.has(machine)), None)
            if owner is None:
                self._owners.pop(machine, None)
            else:
                self._owners[machine] = owner
        return owner
