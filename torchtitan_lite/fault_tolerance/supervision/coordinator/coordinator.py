"""A coordinator that may be one of several: it decides about the run only while it leads.

Invariant: no clock and no I/O, as its parts.
"""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from torchtitan_lite.fault_tolerance.supervision.coordinator.leadership import Leadership
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    Answer,
    Claim,
    Report,
    RunState,
    Vote,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.run_coordinator import RunCoordinator
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import report_interval_s


class Coordinator:
    """Decisions of one coordinator, for the machines that have acknowledged it."""

    def __init__(self, term: int, *, is_sole: bool = False) -> None:
        """See `Leadership`."""
        self._leadership = Leadership(term, is_sole=is_sole)
        self._run: RunCoordinator | None = None
        """Decisions of the present leadership. A new one learns anew: others may have decided."""
        self._knows_machines = False

    @property
    def states(self) -> list[RunState]:
        """The state of each replica; empty if it does not lead."""
        return [] if self._run is None else self._run.states

    def news(self, replica: int) -> Hashable:
        """See `ReplicaCoordinator.news`."""
        return None if self._run is None else self._run.news(replica)

    def may_decide(self, now_s: float) -> bool:
        """Return whether it leads, or no machine has ever reported."""
        return not self._knows_machines or self._leadership.leads(now_s)

    def status(self, now_s: float) -> dict[str, Any]:
        """Return whether it leads, the voters, and what it knows of replicas and machines, as JSON
        values. Ages are in seconds before `now_s`."""
        leadership = self._leadership.status(now_s)
        if not self._knows_machines:
            leadership["problem"] = "no machine has reported"
        # Without a run: that of no machines.
        return {**leadership, **(self._run or RunCoordinator(now_s)).status(now_s)}

    def report(self, report: Report, vote: Vote, now_s: float) -> tuple[Claim, Answer | None]:
        """Record a report and return the answer, none unless it leads. Raises Rejected or Busy."""
        self._knows_machines = True
        self._leadership.record(report.machine, vote, now_s)
        run = self._current_run(now_s)
        if run is None:
            return self._leadership.claim(now_s), None
        leads = self._leadership.leads(now_s)
        answer = run.report(report, now_s, is_outage=not leads)
        self._leadership.update(lambda: run.machines, now_s)
        claim = self._leadership.claim(now_s)
        if not self._leadership.is_voter(report.machine):
            claim = replace(claim, report_s=report_interval_s(report.num_machines))
        return claim, answer if leads else None

    def restart_s(self, replica: int) -> float:
        """See `RunCoordinator.restart_s`; 0 if it does not lead."""
        return 0.0 if self._run is None else self._run.restart_s(replica)

    def advance(self, replica: int, now_s: float) -> None:
        """See `RunCoordinator.advance`; without effect if it does not lead."""
        run = self._run if self._leadership.leads(now_s) else None
        if run is not None and replica < len(run.states):
            run.advance(replica, now_s)

    def disconnected(self, machine: str, now_s: float) -> None:
        """See `RunCoordinator.disconnected`."""
        if self._run is not None:
            self._run.disconnected(machine, now_s)

    def check_breaks(self, now_s: float) -> None:
        """See `RunCoordinator.check_breaks`; without effect if it does not lead."""
        run = self._run if self._leadership.leads(now_s) else None
        if run is not None:
            run.check_breaks(now_s)

    def leave(self, report: Report, vote: Vote, reason: str, now_s: float) -> None:
        """Forget a machine, see `ReplicaCoordinator.leave`."""
        self._leadership.leave(report.machine, vote, now_s)
        run = self._current_run(now_s)
        if run is not None:
            run.leave(report, reason, now_s)

    def _current_run(self, now_s: float) -> RunCoordinator | None:
        if not self._leadership.is_elected:
            self._run = None
        elif self._run is None:
            self._run = RunCoordinator(now_s)
        return self._run
