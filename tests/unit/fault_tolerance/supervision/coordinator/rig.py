"""A coordinator on a clock of the test, with machines that follow its answers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    Answer,
    FailureKind,
    NodeState,
    Report,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.run_coordinator import RunCoordinator
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    BROKEN_S,
    LEARN_S,
    REPORT_S,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import ResizeState


class Rig:
    """A coordinator with machines that follow its answers."""

    def __init__(self, *names: str, num_machines: int = 2) -> None:
        self.now_s = 100.0
        self.coordinator = RunCoordinator(self.now_s)
        self.machines: dict[str, Report] = {}
        self.answers: dict[str, Answer] = {}
        self.silent: set[str] = set()
        self._breaks_due_s = math.inf
        self.ended: dict[str, tuple[ResizeState, str]] = {}
        """Outcomes of requests."""
        self.slow: set[str] = set()
        """Machines whose processes do not become warm."""
        self.stays: set[str] = set()
        """Machines whose ranks do not leave the training."""
        for name in names:
            self.add(name, num_machines=num_machines)

    def add(self, name: str, **changes: Any) -> None:
        """Add a machine."""
        report = Report(
            machine=name,
            sequence=0,
            name=name,
            address=f"10.0.0.{len(self.machines) + 1}",
            run_id="run",
            num_machines=2,
            num_ranks=1,
            mesh="1",
            fingerprint="2-abc",
        )
        self.machines[name] = replace(report, **changes)

    def send(self, name: str, **changes: Any) -> Answer:
        """Send the report of a machine, which then does what the answer says."""
        before = self.machines[name]
        report = replace(before, **changes, sequence=before.sequence + 1)
        answer = self.coordinator.report(report, self.now_s)
        self.answers[name] = answer
        seen = max(report.seen_generation, answer.generation)
        is_member = answer.state is RunState.RUNNING and answer.node_rank >= 0
        if is_member and answer.generation > report.generation:
            report = replace(
                report,
                phase=NodeState.JOINED,
                generation=answer.generation,
                replica=answer.replica,
                node_rank=answer.node_rank,
                store_port=29000 + answer.generation if answer.node_rank == 0 else 0,
                mesh=answer.mesh,
                leaving_for="",
                has_left=False,
                ready_for="",
                has_progress=False,
                has_lost_lease=False,
                was_stopped=False,
                failure=FailureKind.NONE,
            )
        elif answer.state is RunState.FORMING and report.phase is not NodeState.STANDBY:
            if report.machine in self.stays:
                # They wait for ranks of other machines, which are aborted first.
                failure = FailureKind.EXCEPTION
                report = replace(report, failure=failure, failure_text="connection closed")
            report = replace(report, phase=NodeState.STANDBY)
        elif is_member and report.phase is NodeState.JOINED and report.has_progress:
            report = self._resized(report, answer)
        if answer.request == report.request and answer.request_state.is_final:
            self.ended[report.request] = answer.request_state, answer.request_reason
            report = replace(report, request="", request_mesh="")
        self.machines[name] = replace(report, seen_generation=seen, seen_replica=answer.replica)
        return answer

    def _resized(self, report: Report, answer: Answer) -> Report:
        if answer.resize_state is ResizeState.ACCEPTED and report.machine not in self.slow:
            return replace(report, ready_for=answer.resize)
        if answer.resize_state is ResizeState.READY:
            report = replace(report, leaving_for=answer.resize_mesh)
            if report.machine not in self.stays:
                report = replace(report, phase=NodeState.STANDBY, has_left=True)
        return report

    def disconnect(self, name: str) -> None:
        """End the connection of a machine."""
        self.coordinator.disconnected(name, self.now_s)
        self._breaks_due_s = self.now_s + BROKEN_S

    def train(self, *names: str) -> None:
        """Let the ranks of machines commit a step."""
        for name in names:
            mesh = self.machines[name].mesh
            self.machines[name] = replace(self.machines[name], has_progress=True, trained_mesh=mesh)

    def leave(self, name: str) -> None:
        """Let a machine leave, which then is silent."""
        self.silent.add(name)
        self.coordinator.leave(self.machines[name], "", self.now_s)

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, with reports of all machines that are not silent."""
        end_s = self.now_s + seconds
        while self.now_s < end_s and not until():
            for name in self.machines:
                if name not in self.silent:
                    self.send(name)
            self.now_s += REPORT_S
            if self.now_s >= self._breaks_due_s:
                self._breaks_due_s = math.inf
                self.coordinator.check_breaks(self.now_s)

    def start(self) -> None:
        """Pass the time until the first generation runs."""
        self.run(LEARN_S + 2)
        assert self.state() is RunState.RUNNING

    def restart_server(self, *, outage_s: float = 0.0) -> None:
        """Replace the server by a new one."""
        self.now_s += outage_s
        self.coordinator = RunCoordinator(self.now_s)

    def state(self) -> RunState:
        """Return the state that the last answer names."""
        return list(self.answers.values())[-1].state

    def places(self) -> Mapping[str, int]:
        """Return the node ranks of the machines that have one."""
        return {name: one.node_rank for name, one in self.answers.items() if one.node_rank >= 0}

    def generation(self) -> int:
        return max(one.generation for one in self.answers.values())


def stand_by(rig: Rig, *names: str) -> None:
    """Stop the ranks of machines whose leases have ended."""
    for name in names:
        rig.machines[name] = replace(rig.machines[name], phase=NodeState.STANDBY)


def depart(rig: Rig, name: str, *, others: str) -> None:
    """Let a machine be asked to stop: all ranks of its replica, on it and on `others`, save and
    exit."""
    rig.send(name, is_stopping=True)
    for machine in (*others, name):
        rig.machines[machine] = replace(
            rig.machines[machine],
            phase=NodeState.ENDED,
            is_stopping=machine == name,
            was_stopped=True,
        )


def fail(
    rig: Rig,
    name: str,
    kind: FailureKind,
    text: str,
    signature: str = "",
    *,
    status: int = 0,
    age_s: float = 0.0,
    is_stopping: bool = False,
) -> None:
    rig.send(
        name,
        phase=NodeState.FAILED,
        failure=kind,
        failure_text=text,
        failure_signature=signature,
        failure_status=status,
        failure_age_s=age_s,
        is_stopping=is_stopping,
    )
