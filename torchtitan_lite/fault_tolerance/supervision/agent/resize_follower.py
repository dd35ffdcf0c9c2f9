"""What a member does for a resize of the run: it passes its own request on to the coordinator,
reports whether it can follow the present resize, and orders its ranks to leave their training."""

import logging
from typing import Protocol

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.fault_tolerance.supervision.agent.process_pool import ProcessPool
from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import RankState
from torchtitan_lite.fault_tolerance.supervision.coordinator.link import Link
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    MAX_CHARS,
    Answer,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    ResizeRequest,
    ResizeState,
    RunMesh,
)


class Requests(Protocol):
    """Requests to resize the run, one at a time, and checks of those of all members."""

    request: ResizeRequest | None
    """The request that was made here, until its final answer."""
    is_open: bool
    """Whether requests are received: all ranks train."""

    def parse(self, text: str) -> RunMesh:
        """Return the mesh of a message. Raises ConfigError for arguments that may not change, and
        ValueError for what is not a mesh."""
        ...

    def refusal(self, request_id: str, mesh: str) -> str | None:
        """Return why this member cannot follow a request, empty if it can; None until that is
        known."""
        ...

    def answer(self, state: ResizeState, reason: str = "") -> None:
        """Answer the request; a final answer ends it."""
        ...

    def close(self, reason: str) -> None:
        """Let a request that has no final answer fail because of `reason`, and end."""
        ...


class ResizeFollower:
    """Follows the answers of the coordinator about the mesh of the run."""

    def __init__(
        self, mesh: RunMesh, link: Link, inbox: Requests, pool: ProcessPool, log: logging.Logger
    ) -> None:
        """`mesh` is that with which this machine was started."""
        self.mesh = mesh
        """The mesh of the present or next generation."""
        self._link, self._inbox, self._pool, self._log = link, inbox, pool, log
        self._answered: ResizeState | None = None
        """The last answer to the request of this machine."""
        self.left_generation = 0
        """Last generation that its ranks were ordered to leave."""

    def adopt_mesh(self, text: str) -> str:
        """Let the next generation have the mesh of an answer. Returns why this machine cannot have
        it, empty if it can."""
        if text == self.mesh.to_text():
            return ""
        try:
            mesh = self._inbox.parse(text)
        except (ConfigError, ValueError) as error:
            return f"it cannot have the mesh of the run, {text}: {error}"
        self._log.warning("The ranks of this machine change to %s.", mesh)
        self.mesh = mesh
        self._pool.end_surplus_ranks(mesh.num_ranks)
        return ""

    def answer_request(self, answer: Answer, *, is_spare: bool) -> None:
        """Report the request of this machine, and write its outcome."""
        request = self._inbox.request
        if request is None:
            if self._link.report.request:
                self._link.update(request="", request_mesh="")
            return
        if self._link.report.request != request.id:
            self._answered = ResizeState.ACCEPTED
            self._link.update(request=request.id, request_mesh=request.mesh.to_text())
        state, reason = answer.request_state, answer.request_reason
        if is_spare:
            state, reason = ResizeState.FAILED, "its machine no longer trains"
        elif answer.request != request.id or state is self._answered:
            return
        self._answered = state
        self._inbox.answer(state, reason)

    def prepare(self, answer: Answer, *, is_stopping: bool) -> None:
        """Report whether this machine can follow the present resize, once the processes that it
        needs are warm."""
        self._inbox.is_open = self._link.report.has_progress and not is_stopping
        if answer.state is not RunState.RUNNING:
            return
        if not answer.resize:
            self._pool.end_surplus_spares()
            return
        report = self._link.report
        is_known = answer.resize in (report.ready_for, report.refused)
        if is_known or answer.resize_state is ResizeState.LEFT:
            return
        refusal = self._inbox.refusal(answer.resize, answer.resize_mesh)
        if refusal:
            self._link.update(refused=answer.resize, refusal=refusal[:MAX_CHARS])
        elif refusal is None or not report.has_progress:
            # The imports of new processes would compete with the start of the ranks.
            return
        elif self._pool.prepare(RunMesh.from_text(answer.resize_mesh).num_ranks):
            self._link.update(ready_for=answer.resize)

    def order_to_leave(self, answer: Answer, generation: int) -> None:
        """Let the ranks leave the training if all machines are ready to."""
        is_ready = answer.resize_state is ResizeState.READY and not self.is_ordered(generation)
        ranks = self._pool.ranks.values()
        if is_ready and all(process.has_progress for process in ranks):
            self.left_generation = generation
            self._link.update(leaving_for=answer.resize_mesh)
            for process in ranks:
                process.leave_training()

    def is_ordered(self, generation: int) -> bool:
        """Return whether the ranks were ordered to leave a generation."""
        return self.left_generation == generation

    def has_left(self, generation: int) -> bool:
        """Return whether all ranks have left the training as they were ordered to."""
        ranks = self._pool.ranks.values()
        return self.is_ordered(generation) and all(
            rank.state is RankState.STANDBY for rank in ranks
        )

    def is_between(self, answer: Answer, generation: int) -> bool:
        """Return whether ranks cannot handle a signal, because they leave, or have left and do not
        train yet."""
        report = self._link.report
        # Ranks that leave would disagree with those of other machines; the coordinator may already
        # have decided that they do, also one that was restarted and is still learning it.
        is_present = answer.resize == report.ready_for or answer.state is RunState.REBUILDING
        leaves = self.is_ordered(generation) or (bool(report.ready_for) and is_present)
        # Ranks that start would die.
        is_first = (
            answer.resize_state is ResizeState.LEFT or self.left_generation == generation - 1 > 0
        )
        starts = is_first and not all(rank.has_progress for rank in self._pool.ranks.values())
        return leaves or starts
