"""Decisions of the coordinator about the mesh of the run: a resize of all replicas together.

A resize, which any member may request, has three phases: all members start missing processes, all
ranks leave the training, each replica after the same step of its own, and the next generations are
on the new mesh. If one of these ends before all its ranks have committed a step, all replicas
return to the former mesh.

Invariants: as those of `replica_coordinator`; replicas that train at the same time have the same
mesh, because each rank reduces its shards of the gradients with the same shards of the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    Report,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import HOLD_S
from torchtitan_lite.fault_tolerance.supervision.resize_request import LEAVE_S, ResizeState

_PREPARE_S = 600.0
"""Time for all machines to start the processes that a resize needs."""
_FAILED_LEAVES = 2
"""Generations that fail instead of being left, after which a resize ends."""
_RETURN = "return"
"""Id of a resize that no machine has requested: that to the former mesh."""


class Replica(Protocol):
    """What a resize reads of a replica."""

    @property
    def state(self) -> RunState: ...

    @property
    def reports(self) -> list[Report]:
        """The last reports of its machines."""
        ...

    def may_train(self, now_s: float) -> bool:
        """Return whether ranks of it may start, train, or not have returned to standby."""
        ...

    def training_members(self) -> list[Report] | None:
        """Return the members of its generation, none if it waits for machines; None unless all
        ranks have committed a step."""
        ...


@dataclass
class MeshResize:
    """A resize that has not ended."""

    id: str
    mesh: str
    former: str
    """The mesh before."""
    deadline_s: float
    """When the present phase must have ended."""
    state: ResizeState = ResizeState.ACCEPTED
    is_late: bool = False
    """Whether ranks did not leave in time, so that they are aborted."""
    num_failures: int = 0
    """Generations that failed instead of being left."""


class ResizeCoordinator:
    """The mesh of all replicas, and the resize that changes it."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        """`replicas` may change."""
        self._replicas = replicas
        self.start()

    def start(self) -> None:
        """Start with nothing known of a run."""
        self.mesh = ""
        """Mesh of the present or next generations per machine, see `Report`."""
        self.resize: MeshResize | None = None
        self._outcomes: dict[str, tuple[ResizeState, str]] = {}
        """Outcomes of ended requests and their reasons, as long as a member reports them."""

    @property
    def is_leaving(self) -> bool:
        """Whether all ranks are leaving their generations."""
        return self.resize is not None and self.resize.state is ResizeState.READY

    @property
    def is_returning(self) -> bool:
        """Whether all replicas leave a mesh that one of them could not train on."""
        return self.is_leaving and self.resize is not None and self.resize.id == _RETURN

    @property
    def must_wait(self) -> bool:
        """Whether no generation may start yet: ranks are leaving, or train on another mesh."""
        reports = (report for replica in self._replicas for report in replica.reports)
        return self.is_leaving or any(r.is_busy and r.mesh != self.mesh for r in reports)

    @property
    def is_first_on_mesh(self) -> bool:
        """Whether not all ranks have committed a step on a mesh that was requested."""
        resize = self.resize
        return resize is not None and resize.state is ResizeState.LEFT and resize.id != _RETURN

    def outcome(self, request: str) -> tuple[ResizeState, str]:
        """Return the state of a request, and the reason of a failure."""
        resize = self.resize
        if resize is not None and resize.id == request:
            return resize.state, ""
        return self._outcomes.get(request, (ResizeState.ACCEPTED, ""))

    def learn(self) -> None:
        """Learn the mesh from the reports while the last generation of a replica is not known."""
        if self.resize is not None or any(r.state is RunState.RUNNING for r in self._replicas):
            return
        reports = [report for replica in self._replicas for report in replica.reports]
        newest = max(reports, key=lambda report: report.generation)
        # Generations of two replicas do not compare: the mesh for which others leave, or have left,
        # is the newest.
        targets = {report.leaving_for for report in reports if report.leaving_for}
        arrived = (report.mesh for report in reports if report.generation)
        self.mesh = next((mesh for mesh in arrived if mesh in targets), newest.mesh)

    def rebuild(self, members: Sequence[Report], now_s: float) -> None:
        """Learn the present resize from the members of a replica: the ranks leave the last
        generation, or it is the first one on its mesh."""
        if self.resize is not None:
            return
        leaving = next((member for member in members if member.leaving_for), None)
        if leaving is not None and leaving.leaving_for != self.mesh:
            self.resize = MeshResize(
                leaving.ready_for,
                leaving.leaving_for,
                self.mesh,
                now_s + LEAVE_S,
                state=ResizeState.READY,
            )
            return
        trained = [member.trained_mesh for member in members if not member.has_progress]
        former = next(filter(None, trained), None)
        if former is not None and self.mesh not in trained:
            requests = (m.request for m in members if m.request_mesh == self.mesh)
            self.resize = MeshResize(
                next(requests, ""), self.mesh, former, math.inf, state=ResizeState.LEFT
            )

    def follow(self, now_s: float) -> None:
        """Begin, continue or end a resize once all ranks that train have committed a step, so that
        they can be ordered to leave."""
        members: list[Report] = []
        for replica in self._replicas:
            trained = replica.training_members()
            if trained is None:
                self._end_if_overdue(now_s)
                return
            members += trained
        if self.resize is not None and self.resize.state is ResizeState.LEFT:
            self.end(ResizeState.DONE)
        reported = {report.request: report.request_mesh for report in members if report.request}
        known = {report.request for replica in self._replicas for report in replica.reports}
        self._outcomes = {key: outcome for key, outcome in self._outcomes.items() if key in known}
        stopping = next((report for report in members if report.is_stopping), None)
        resize = self.resize
        if resize is None:
            new = next((key for key in reported if key not in self._outcomes), None)
            if new is not None and reported[new] == self.mesh:
                self._outcomes[new] = ResizeState.DONE, ""
            elif new is not None and stopping is None:
                self.resize = MeshResize(new, reported[new], self.mesh, now_s + _PREPARE_S)
            return
        if resize.state is ResizeState.READY:
            if stopping is not None:
                # Its ranks save and exit once they train again.
                resize.deadline_s = min(resize.deadline_s, now_s + HOLD_S / 2)
            return
        refused = next((member for member in members if member.refused == resize.id), None)
        waits_for = [member.name for member in members if member.ready_for != resize.id]
        if refused is not None:
            self.end(ResizeState.REJECTED, refused.refusal)
        elif stopping is not None:
            self.end(ResizeState.FAILED, f"{stopping.name} was asked to stop")
        elif not waits_for:
            resize.state, resize.deadline_s = ResizeState.READY, now_s + LEAVE_S
        elif now_s >= resize.deadline_s:
            names = ", ".join(waits_for)
            text = f"{names} did not start missing processes in {_PREPARE_S:.0f} s"
            self.end(ResizeState.FAILED, text)

    def _end_if_overdue(self, now_s: float) -> None:
        """End a resize for which a replica has not trained in time."""
        resize = self.resize
        is_preparing = resize is not None and resize.state is ResizeState.ACCEPTED
        if resize is not None and is_preparing and now_s >= resize.deadline_s:
            text = f"not all replicas have committed a step in {_PREPARE_S:.0f} s"
            self.end(ResizeState.FAILED, text)

    def is_overdue(self, now_s: float) -> bool:
        """Return whether ranks that leave have had enough time; then all are aborted."""
        assert self.resize is not None
        self.resize.is_late = now_s >= self.resize.deadline_s
        return self.resize.is_late

    def advance(self, now_s: float) -> None:
        """Let the next generations be on the new mesh once no replica trains on the former one."""
        resize = self.resize
        if resize is not None and self.is_leaving and not self._may_train(now_s):
            resize.state, self.mesh = ResizeState.LEFT, resize.mesh

    def generation_failed(self, reason: str, now_s: float) -> None:
        """Record that a generation failed instead of being left. The resize is followed once the
        ranks train again."""
        resize = self.resize
        assert resize is not None
        resize.state, resize.deadline_s = ResizeState.ACCEPTED, now_s + _PREPARE_S
        resize.is_late = False
        resize.num_failures += 1
        if resize.num_failures == _FAILED_LEAVES:
            self.end(ResizeState.FAILED, reason)

    def return_to_former(self, reason: str, now_s: float) -> None:
        """Return to the mesh before the resize, because the first generation of a replica on the
        new one failed; generations of others are aborted first."""
        assert self.resize is not None
        former, mesh = self.resize.former, self.mesh
        self.end(ResizeState.FAILED, reason)
        if self._may_train(now_s):
            self.resize = MeshResize(_RETURN, former, mesh, now_s, state=ResizeState.READY)
        else:
            self.mesh = former

    def end(self, state: ResizeState, reason: str = "") -> None:
        """Record the outcome of the present resize."""
        assert self.resize is not None
        self._outcomes[self.resize.id] = state, reason
        self.resize = None

    def _may_train(self, now_s: float) -> bool:
        return any(replica.may_train(now_s) for replica in self._replicas)
