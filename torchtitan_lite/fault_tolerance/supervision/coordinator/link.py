"""Connection of a member to the coordinator that decides about it: in this process, or, as
`remote_link`, over the network."""

import math
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from torchtitan_lite.core.addresses import loopback_address
from torchtitan_lite.core.output_fence import lease_clock_s
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    MAX_CHARS,
    Answer,
    Report,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.replica_coordinator import (
    Busy,
    Rejected,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.run_coordinator import RunCoordinator
from torchtitan_lite.fault_tolerance.supervision.resize_request import RunMesh

_REPORT_S = 0.05
"""Interval of the reports to a coordinator in this process, which act on the passing of time."""


class Link(ABC):
    """Reports of a member, and the last answer."""

    report: Report
    """The report that is sent next, except for its number."""
    answer: Answer | None = None
    """The last answer."""
    rejection = ""
    """Why this member must end: the coordinator has never accepted it, or its machine is at
    fault."""
    problem = ""
    """Why the last report had no answer; empty if it had one."""

    @property
    @abstractmethod
    def lease_until_s(self) -> float:
        """End of the lease (`lease_clock_s`); infinite if none is needed."""

    @property
    def has_lease(self) -> bool:
        """Whether ranks of this member may train."""
        return lease_clock_s() < self.lease_until_s

    @property
    def is_alone(self) -> bool:
        """Whether the run ends when this member stops."""
        return self.report.num_replicas == 1

    @abstractmethod
    def beat(self) -> None:
        """Show that the main loop runs."""

    @abstractmethod
    def update(self, **changes: Any) -> None:
        """Change the report, and send it at once."""

    @abstractmethod
    def leave(self, reason: str = "") -> None:
        """End the reports, and notify the coordinator. All ranks must have ended. `reason`: why the
        ranks could not save, which ends a run of one replica."""

    def missing_machines(self, waited_s: float) -> str:
        """Return why there is no generation after `waited_s`."""
        answer = self.answer
        if answer is None or self.problem:
            return f"the coordinator cannot be reached: {self.problem}"
        return (
            f"{answer.num_joined} of {self.report.machines_per_replica} machines have joined in "
            f"{waited_s:g} s ({answer.joined}): start the others, or raise --rdzv-timeout-s"
        )


class LocalLink(Link):
    """Link to a coordinator in this process. Not for several threads."""

    def __init__(
        self, coordinator: RunCoordinator, mesh: RunMesh, *, replica: int = 0, num_replicas: int = 1
    ) -> None:
        """`mesh` is that of the first generation; the member is that of `replica`."""
        self._coordinator = coordinator
        self.report = Report(
            machine=secrets.token_hex(16),
            sequence=0,
            name=f"replica {replica}" if num_replicas > 1 else "this machine",
            address=loopback_address(),
            run_id="",
            num_machines=num_replicas,
            num_replicas=num_replicas,
            num_ranks=mesh.num_ranks,
            fingerprint="",
            replica=replica,
            mesh=mesh.to_text(),
        )
        self._reported_s = -math.inf
        self._has_left = False

    @property
    def lease_until_s(self) -> float:
        return math.inf

    @property
    def is_alone(self) -> bool:
        return self._coordinator.rules.end_with(self.report)

    def beat(self) -> None:
        if time.monotonic() >= self._reported_s + _REPORT_S:
            self._send()

    def update(self, **changes: Any) -> None:
        self.report = replace(self.report, **changes)
        self._send()

    def leave(self, reason: str = "") -> None:
        if not self._has_left:
            self._has_left = True
            self._coordinator.leave(self.report, reason[:MAX_CHARS], time.monotonic())

    def _send(self) -> None:
        self._reported_s = time.monotonic()
        if self._has_left or self.rejection:
            return
        self.report = replace(self.report, sequence=self.report.sequence + 1)
        try:
            self.answer = self._coordinator.report(self.report, self._reported_s)
        except (Rejected, Busy) as error:
            self.rejection = str(error)
