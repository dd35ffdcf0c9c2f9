"""The agent of one of several machines. The rendezvous decides when a generation starts and ends,
and which machines take part in it; this agent reports to it, and stops its ranks without being
asked to when the rendezvous does not answer in time. It passes a request to resize the run on to
the rendezvous, whose answers name the phase for all machines."""

import math
import os
import signal
import time
from collections.abc import Callable, Sequence

from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.stores import listening_store
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.agent import (
    AgentRendezvous,
    ProcessAgent,
    succeeded,
)
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.lease import AdoptedWriters
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.rank_process import (
    RankProcess,
    RankState,
)
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.resize_inbox import ResizeInbox
from torchtitan_lite.fault_tolerance.supervision.rendezvous.link import RendezvousLink
from torchtitan_lite.fault_tolerance.supervision.rendezvous.messages import (
    MAX_CHARS,
    Answer,
    FailureKind,
    NodeState,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.rendezvous.timing import (
    HOLD_S,
    LEASE_S,
    STANDBY_S,
    STOP_S,
    lease_clock_s,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import ResizeState, RunMesh
from torchtitan_lite.fault_tolerance.supervision.restart_policy import Failure


class MachineAgent(ProcessAgent):
    """Runs the ranks of this machine, as a member of the run or as a spare machine."""

    def __init__(
        self,
        start_process: Callable[[], RankProcess],
        num_ranks: int,
        num_spares: int,
        *,
        link: RendezvousLink,
        join_timeout_s: float,
        requests: Sequence[int],
        inbox: ResizeInbox,
        replica_arguments: Callable[[int], Sequence[str]] = lambda replica: (),
    ) -> None:
        """See `ProcessAgent`. `join_timeout_s` limits how long to wait for enough machines;
        `replica_arguments` are those of the ranks of a replica, given its number."""
        rendezvous = AgentRendezvous(self.join)

        def start() -> RankProcess:
            process = start_process()
            self._started.add(process.pid)
            process.renew_lease(self._leased_s + STOP_S)
            return process

        mesh = RunMesh(num_ranks)
        super().__init__(start, mesh, num_spares, rendezvous=rendezvous, requests=requests)
        # All machines have equally many ranks, so that torchelastic need not compare them in a
        # store, where it would block.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        self._writers = AdoptedWriters()
        self._started: set[int] = set()
        self._link, self._join_timeout_s = link, join_timeout_s
        self._replica_arguments = replica_arguments
        self._store: Store | None = None
        self._generation_number = 0
        """Number of the present or last generation of this machine."""
        self._leased_s = 0.0
        self._spare_generation = 0
        """Last generation in which this machine was found to be a spare one."""
        self._excepted: int | None = None
        """Rank that raised the first exception of the generation on this machine."""
        self._inbox = inbox
        self._answered: ResizeState | None = None
        """The last answer to the request of this machine."""
        self._left_generation = 0
        """Last generation that its ranks were ordered to leave for a resize."""
        self._stop_s = math.inf
        """When this machine was asked to stop."""
        self._has_unsaved_steps = False
        """Whether its ranks have committed steps since they saved and exited."""

    def join(self) -> RendezvousInfo:
        """Block until this machine has a node rank in a new generation. Raises
        RendezvousGracefulExitError if the run has ended, also for this machine alone."""
        since_s = time.monotonic()
        while True:
            self._pause()
            answer = self._link.answer
            self._inbox.is_open = False
            if answer is not None:
                self._answer_request(answer)
                if answer.state is RunState.RUNNING:
                    self._adopt_mesh(answer.mesh)
            for number in range(self._worker_group.spec.local_world_size):
                if number not in self._ranks:
                    # Warm before it is needed, also on a spare machine.
                    self._ranks[number] = self._take_spare() or self._start_process()
            for process in (*self._ranks.values(), *self._spares):
                process.poll()
            if answer is not None and self._is_spare(answer):
                if answer.generation != self._spare_generation:
                    self._writers.kill()
                    if not self._requests:
                        logger.info("This is a spare machine: all places are taken.")
                self._spare_generation = answer.generation
            if self._link.rejection:
                self._leave(self._link.report.failure_status or 1, self._link.rejection)
            self._report_stop()
            if self._requests and not self._stop_waits(answer):
                silent = f", and {self._link.problem}" if self._link.problem else ""
                self._leave(self._status_of_stop(answer), f"it was asked to stop{silent}")
            if answer is not None and answer.state is RunState.ENDED:
                self._finish(answer)
                raise RendezvousGracefulExitError
            if self._is_spare(answer) and self._link.has_lease:
                since_s = time.monotonic()
            elif time.monotonic() - since_s > self._join_timeout_s:
                self._leave(1, self._link.missing_machines(self._join_timeout_s))
            if answer is None or not self._has_seat(answer):
                if self._link.report.phase is NodeState.JOINED:
                    self._link.update(phase=NodeState.STANDBY)
                continue
            if not self._link.has_lease:
                continue
            if info := self._take_seat(answer):
                return info

    def _has_seat(self, answer: Answer) -> bool:
        """Return whether this machine is a member of a running generation that it has not left."""
        is_joined = self._link.report.phase is NodeState.JOINED
        is_new = answer.generation >= self._generation_number + (not is_joined)
        return answer.state is RunState.RUNNING and answer.node_rank >= 0 and is_new

    def _is_spare(self, answer: Answer | None) -> bool:
        return answer is not None and answer.state is RunState.RUNNING and answer.node_rank < 0

    def _take_seat(self, answer: Answer) -> RendezvousInfo | None:
        """Join the generation of `answer`. Returns None while its store is not known."""
        if answer.generation > self._generation_number:
            if answer.is_blamed and self._excepted in self._ranks:
                # Its state may be part of the cause. This prints its traceback, too.
                self._end([self._ranks.pop(self._excepted)], time.monotonic() + STANDBY_S)
            self._excepted = None
            living = {n: p for n, p in self._ranks.items() if p.state is not RankState.EXITED}
            self._ranks = living
            self._generation_number = answer.generation
            # The ranks of the former generation may have left before they could follow a signal.
            self._num_forwarded = 0
            port, self._store = 0, HashStore()
            if answer.node_rank == 0:
                self._store = listening_store(self._link.report.address)
                port = self._store.port
            self._link.update(
                phase=NodeState.JOINED,
                generation=answer.generation,
                replica=answer.replica,
                mesh=answer.mesh,
                leaving_for="",
                has_left=False,
                ready_for="",
                seen_generation=answer.generation,
                seen_replica=answer.replica,
                node_rank=answer.node_rank,
                store_port=port,
                has_progress=False,
                has_lost_lease=False,
                was_stopped=False,
                failure=FailureKind.NONE,
                failure_status=0,
            )
            if answer.reason:
                logger.warning(
                    "Generation %d starts. Before it: %s.", answer.generation, answer.reason
                )
        if not answer.store_port or self._store is None:
            return None
        return RendezvousInfo(
            self._store,
            answer.node_rank,
            self._link.report.machines_per_replica,
            RendezvousStoreInfo(answer.store_address, answer.store_port),
        )

    def _leave(self, status: int, reason: str) -> None:
        """End this machine's part of the run. Raises RendezvousGracefulExitError."""
        self.exit_status = status
        log = logger.error if status else logger.info
        log("Training ends on this machine: %s", reason)
        raise RendezvousGracefulExitError(reason)

    def _standby_deadline_s(self, began_s: float) -> float:
        # Ranks that do not return to standby are killed before the place may be given away, also
        # if the lease ends meanwhile.
        lease_s = self._link.lease_until_s - lease_clock_s()
        return min(super()._standby_deadline_s(began_s), time.monotonic() + lease_s + STANDBY_S)

    def _may_write(self) -> bool:
        """Whether the checkpoint writers of this machine may write: in its place of the present
        generation, or for ranks that have finished in it."""
        waits = self._link.report.phase is NodeState.STANDBY
        return self._link.has_lease or (not waits and self._has_finished())

    def _has_finished(self) -> bool:
        """Whether all ranks have finished their training."""
        ended = [rank for rank in self._ranks.values() if rank.state is RankState.ENDED]
        is_clean = all(process.status is not None and process.status.is_clean for process in ended)
        return 0 < len(self._ranks) == len(ended) and is_clean

    def _pause(self) -> None:
        self._link.beat()
        self._writers.check(may_write=self._may_write())
        answer = self._link.answer
        before, replica = self._link.report.seen_generation, self._link.report.seen_replica
        if answer is not None and (answer.generation > before or answer.replica != replica):
            seen = max(answer.generation, before)
            self._link.update(seen_generation=seen, seen_replica=answer.replica)
        if self._link.lease_until_s != self._leased_s:
            self._renew_leases()
        self._writers.reap(self._started)
        super()._pause()

    def _renew_leases(self) -> None:
        self._leased_s = self._link.lease_until_s
        for process in (*self._ranks.values(), *self._spares):
            process.renew_lease(self._leased_s + STOP_S)

    def _has_ended(self) -> bool:
        """Whether the generation has ended, or this machine may not train in it any more."""
        answer = self._link.answer
        assert answer is not None
        is_in = answer.generation == self._generation_number and answer.node_rank >= 0
        is_going = answer.state in (RunState.RUNNING, RunState.REBUILDING)
        return not (is_in and is_going and self._link.has_lease and not self._link.rejection)

    def _status_of_stop(self, answer: Answer | None) -> int:
        """Return the exit status of this machine if it leaves now: 1 if steps may be lost."""
        if self._link.report.num_replicas > 1:
            return int(self._has_unsaved_steps)
        return int(not self._is_spare(answer))

    def _departs_at_once(self) -> bool:
        """Whether this machine leaves its replica without a save: its ranks are starting, in which
        a signal would kill them, and have no steps to save."""
        has_trained = any(rank.has_progress for rank in self._ranks.values())
        return bool(self._requests) and self._link.report.num_replicas > 1 and not has_trained

    def _report_stop(self) -> None:
        if self._requests and not self._link.report.is_stopping:
            self._stop_s = time.monotonic()
            self._link.update(is_stopping=True)

    def _stop_waits(self, answer: Answer | None) -> bool:
        """Whether a request to stop waits: the ranks have left their training for a resize, and
        only ranks that train can save and exit."""
        before = self._generation_number - (self._link.report.phase is NodeState.JOINED)
        has_left = 0 < self._left_generation >= before
        is_soon = time.monotonic() < self._stop_s + HOLD_S
        return has_left and is_soon and self._link.has_lease and not self._is_spare(answer)

    def _may_forward(self) -> bool:
        answer, report = self._link.answer, self._link.report
        assert answer is not None
        if self._departs_at_once():
            return False
        # Ranks that leave would disagree with those of other machines; the rendezvous may already
        # have decided that they do, also one that was restarted and is still learning it.
        is_present = answer.resize == report.ready_for or answer.state is RunState.REBUILDING
        waits = self._is_ordered or (bool(report.ready_for) and is_present)
        # Ranks that start would die.
        is_first = (
            answer.resize_state is ResizeState.LEFT
            or self._left_generation == self._generation_number - 1 > 0
        )
        starts = is_first and not all(rank.has_progress for rank in self._ranks.values())
        return not (waits or starts) or time.monotonic() >= self._stop_s + HOLD_S

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._pause()
        self._report_stop()
        answer = self._link.answer
        assert answer is not None
        self._answer_request(answer)
        if answer.state is RunState.ENDED:
            return self._finish(answer)
        self._prepare_for(answer)
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.SUCCEEDED:
            if self._link.report.phase is not NodeState.ENDED:
                was_stopped = any(rank.was_stopped for rank in self._ranks.values())
                self._has_unsaved_steps = False
                self._link.update(phase=NodeState.ENDED, was_stopped=was_stopped)
            if not self._link.has_lease:
                logger.warning(
                    "All ranks of this machine have finished, but the rendezvous does not answer "
                    "whether those of the others have: see their logs."
                )
                return result
            result = RunResult(state=WorkerState.HEALTHY)
        if not self._has_ended():
            if result.state is not WorkerState.HEALTHY:
                return result
            self._order_to_leave(answer)
            if not self._has_left() and not self._departs_at_once():
                return result
            self._failed_at_s = time.monotonic()
            return RunResult(state=WorkerState.UNHEALTHY)
        if not self._link.has_lease:
            logger.warning(
                "No answer of the rendezvous for %.0f s (%s): the ranks of this machine stop.",
                LEASE_S,
                self._link.problem,
            )
        self._failed_at_s = time.monotonic()
        return RunResult(state=WorkerState.FAILED)

    def _decide(self, failure: Failure) -> RunResult:
        """Report the failure, and wait for the end of the generation."""
        self._lost = {n for n, process in self._ranks.items() if process.state is RankState.EXITED}
        if self._link.report.phase is not NodeState.FAILED:
            self._report_failure(failure)
        return RunResult(state=WorkerState.HEALTHY)

    def _report_failure(self, failure: Failure) -> None:
        assert failure.rank is not None
        process = self._ranks[failure.rank]
        kind, age_s = FailureKind.DEATH, 0.0
        if process.state is RankState.ENDED:
            kind = FailureKind.USER_ERROR
        elif process.state is not RankState.EXITED:
            kind, age_s = FailureKind.EXCEPTION, time.monotonic() - process.failed_at_s
            self._excepted = failure.rank
        first = self._link.report.node_rank * self._mesh.num_ranks
        self._link.update(
            phase=NodeState.FAILED,
            failure=kind,
            failure_text=failure.description[:1000],
            failure_signature=failure.signature[:1000],
            failure_rank=first + failure.rank,
            failure_status=failure.status,
            failure_age_s=age_s,
        )

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self.exit_status:
            super()._stop_workers(worker_group)
            return
        has_lost_lease = not self._link.has_lease
        has_left = self._has_left()
        # First of all: what they write must end with the lease, too.
        self._writers.check(may_write=self._may_write())
        for process in self._ranks.values():
            process.poll()
        self._lost = {n for n, process in self._ranks.items() if process.state is RankState.EXITED}
        failed = {n: process for n, process in self._ranks.items() if process.error}
        if failed and self._link.report.phase is NodeState.JOINED:
            # The order to stop came first; the cause may be here all the same.
            rank = min(failed, key=lambda number: failed[number].failed_at_s)
            self._report_failure(self._exception(rank))
        super()._stop_workers(worker_group)
        if not self._link.has_lease:
            self._writers.kill()
        self._link.update(
            phase=NodeState.STANDBY, has_lost_lease=has_lost_lease, has_left=has_left and not failed
        )

    def _adopt_mesh(self, text: str) -> None:
        """Let the next generation have the mesh of an answer. Raises
        RendezvousGracefulExitError."""
        if text == self._mesh.to_text():
            return
        try:
            mesh = self._inbox.parse(text)
        except (ConfigError, ValueError) as error:
            self._leave(1, f"it cannot have the mesh of the run, {text}: {error}")
        else:
            logger.warning("The ranks of this machine change to %s.", mesh)
            self._change_mesh(mesh)
            self._end_surplus_ranks()

    def _answer_request(self, answer: Answer) -> None:
        """Report the request of this machine, and write its outcome."""
        request = self._inbox.request
        if request is None:
            return
        if self._link.report.request != request.id:
            self._answered = ResizeState.ACCEPTED
            self._link.update(request=request.id, request_mesh=request.mesh.to_text())
        state, reason = answer.request_state, answer.request_reason
        if self._is_spare(answer):
            state, reason = ResizeState.FAILED, "its machine no longer trains"
        elif answer.request != request.id or state is self._answered:
            return
        self._answered = state
        self._inbox.answer(state, reason)
        if state.is_final:
            self._link.update(request="", request_mesh="")

    def _prepare_for(self, answer: Answer) -> None:
        """Report whether this machine can follow the present resize, once the processes that it
        needs are warm."""
        may_resize = self._link.report.has_progress and not self._requests
        self._inbox.is_open = may_resize and self._link.report.num_replicas == 1
        if answer.state is not RunState.RUNNING:
            return
        if not answer.resize:
            if len(self._spares) > self._num_spares:
                self._end_surplus_spares()
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
        elif self._prepare(RunMesh.from_text(answer.resize_mesh)):
            self._link.update(ready_for=answer.resize)

    def _order_to_leave(self, answer: Answer) -> None:
        """Let the ranks leave the training if all machines are ready to."""
        is_ready = answer.resize_state is ResizeState.READY and not self._is_ordered
        if is_ready and all(process.has_progress for process in self._ranks.values()):
            self._left_generation = self._generation_number
            self._link.update(leaving_for=answer.resize_mesh)
            for process in self._ranks.values():
                process.leave_training()

    @property
    def _is_ordered(self) -> bool:
        """Whether the ranks were ordered to leave this generation for a resize."""
        return self._left_generation == self._generation_number

    def _has_left(self) -> bool:
        """Whether all ranks have left the training as they were ordered to."""
        ranks = self._ranks.values()
        return self._is_ordered and all(rank.state is RankState.STANDBY for rank in ranks)

    def _finish(self, answer: Answer) -> RunResult:
        """End with the run."""
        has_finished = self._link.report.phase is NodeState.ENDED
        self.exit_status, self._remaining_restarts = answer.status, 0
        if answer.status:
            logger.error("Training ends: %s.", answer.reason)
            if answer.is_blamed and self._excepted in self._ranks:
                process = self._ranks[self._excepted]
                process.exit(answer.status)
                self._end([process], time.monotonic() + STANDBY_S, status=None)
        elif has_finished:
            return succeeded(self._worker_group)
        return RunResult(state=WorkerState.FAILED)

    def _exit_barrier(self) -> None:
        """Do nothing: the rendezvous has seen all machines finish."""

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._inbox.is_open = False
        super()._shutdown(death_sig, timeout)
        if self._link.report.phase is not NodeState.ENDED:
            self._writers.kill()
        self._inbox.close("the run has ended")
        self._link.leave("it was asked to stop" if self._requests and self.exit_status else "")

    def _arguments(self) -> Sequence[str]:
        return [*self._replica_arguments(self._link.report.replica), *super()._arguments()]

    def _generation_started(self) -> None: ...

    def _made_progress(self) -> None:
        self._has_unsaved_steps = True
        if not self._link.report.has_progress:
            self._link.update(has_progress=True, trained_mesh=self._mesh.to_text())

    def _generation(self) -> int:
        return self._generation_number - 1
