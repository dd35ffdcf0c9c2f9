"""Decisions of the coordinator about all replicas of a run: which machine is for which of them.

A machine stays with its replica as long as it has a place there. Spare machines are for whichever
replica needs one: that with the fewest machines missing first, so that replicas become complete one
after the other.

Invariants: as those of `coordinator`, of which each replica has one.
"""

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
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import LEASE_S

_MAX_REPLICAS = 1024


class RunCoordinator:
    """Decisions for one run, and for the next one when its machines have left."""

    def __init__(self, now_s: float, rules: RunRules | None = None) -> None:
        self._rules = rules or RunRules()
        self._replicas: list[ReplicaCoordinator] = []
        self._resizes = ResizeCoordinator(self._replicas)
        self._add_replica(now_s)

    @property
    def states(self) -> list[RunState]:
        """The state of each replica."""
        return [replica.state for replica in self._replicas]

    @property
    def mesh(self) -> str:
        """Mesh of the present or next generations per machine, see `Report`; empty before the
        first."""
        return self._resizes.mesh

    def restart_s(self, replica: int) -> float:
        """Return when the next generation of a replica may start (time.monotonic())."""
        return self._replicas[replica].not_before_s

    def report(self, report: Report, now_s: float) -> Answer:
        """Record a report and return the answer. Raises Rejected or Busy."""
        is_number = 1 <= report.num_replicas <= _MAX_REPLICAS
        if not is_number or report.num_machines % report.num_replicas:
            raise Rejected(
                f"{report.num_machines} machines are not the same number for each of "
                f"{report.num_replicas} replicas: --nnodes must be a multiple of --replicas, which "
                f"is at most {_MAX_REPLICAS}."
            )
        for replica in self._replicas:
            replica.check_welcome(report, now_s)
            replica.expire(now_s, except_for=report.machine)
        if not any(replica.reports for replica in self._replicas):
            self._begin(report.num_replicas, now_s)
        replica = self._replica_of(report)
        # A spare, which may be the only machine that reaches the coordinator, must not take the
        # places of the members.
        num_members = sum(replica.num_members for replica in self._replicas)
        if replica.is_member(report.machine) or num_members < 2:
            for any_replica in self._replicas:
                any_replica.contact(now_s)
        answer = replica.report(report, now_s)
        for other in self._replicas:
            if other is not replica:
                other.advance(now_s)
        if any(replica.has_finished for replica in self._replicas):
            for other in self._replicas:
                other.end_with_run(report.machines_per_replica)
        return answer

    def leave(self, report: Report, reason: str, now_s: float) -> None:
        """Forget a machine, see `ReplicaCoordinator.leave`."""
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
        for replica in self._replicas:
            if replica.state is not RunState.REBUILDING:
                replica.start(now_s, learn_s=0.0 if self._rules.is_local else LEASE_S)

    def _add_replica(self, now_s: float) -> None:
        number = len(self._replicas)
        self._replicas.append(
            ReplicaCoordinator(
                now_s, number, rules=self._rules, resizes=self._resizes, borrow=self._lend
            )
        )

    def _replica_of(self, report: Report) -> ReplicaCoordinator:
        """Return the replica of a machine, which changes for a spare one that another replica
        needs. Raises Rejected if it cannot take part in this run."""
        owner, size = self._owner_of(report.machine), report.machines_per_replica
        if owner is None:
            for replica in self._replicas:
                replica.check_newcomer(report)
        going_on = [replica for replica in self._replicas if replica.state is not RunState.ENDED]
        if owner is None and 0 <= report.replica < len(self._replicas):
            former = self._replicas[report.replica]
            if former in going_on:
                return former
        stays = report.is_stopping or (owner is not None and owner.is_member(report.machine))
        if owner is not None and (stays or owner.num_missing(size) >= 0):
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

    def _lend(self, borrower: ReplicaCoordinator) -> list[str]:
        """Let a spare machine that another replica does not need be for `borrower`, and return
        it."""
        size = borrower.reports[0].machines_per_replica
        for replica in self._replicas:
            machine = None if replica is borrower else replica.free_spare(size)
            if machine is not None:
                replica.pass_on(machine, borrower)
                return [machine]
        return []

    def _owner_of(self, machine: str) -> ReplicaCoordinator | None:
        return next((replica for replica in self._replicas if replica.has(machine)), None)
