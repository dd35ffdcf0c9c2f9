"""One machine's part of a replica. A coordinator decides when a generation starts and ends, and
which machines take part in it: in this process if the run has one machine, or else in
`torchtitan-lite coordinator`. The member reports to it, gives the ranks of this machine their
processes, and stops them without being asked to when the coordinator does not answer in time. It
passes a request to resize the run on, and the answers name the phase for all members.

Each call of `poll` does what can be done at once, and never waits.
"""

import errno
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_fence import OUTPUTS_AFTER, lease_clock_s
from torchtitan_lite.core.rank.supervised import GENERATION, GENERATION_STARTED, rank_environment
from torchtitan_lite.fault_tolerance.supervision.agent.lease import Writers
from torchtitan_lite.fault_tolerance.supervision.agent.process_pool import (
    EXIT_S,
    ProcessPool,
    are_idle,
    is_idle,
)
from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import (
    RankProcess,
    RankState,
)
from torchtitan_lite.fault_tolerance.supervision.agent.resize_follower import (
    Requests,
    ResizeFollower,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.link import Link
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    Answer,
    FailureKind,
    NodeState,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    HOLD_S,
    LEASE_S,
    STANDBY_S,
    STOP_S,
    WITHHELD_S,
)
from torchtitan_lite.fault_tolerance.supervision.local_ranks import forwarded_signal
from torchtitan_lite.fault_tolerance.supervision.resize_request import RunMesh
from torchtitan_lite.fault_tolerance.supervision.restart_policy import Failure

_POLL_S = 0.02
_ABORT_S = 5.0
"""Time in which a surviving process must leave its training; then it is killed and replaced."""
_START_S = 600.0
"""Time in which a process must have imported what it needs; then it is killed."""


class MemberPhase(Enum):
    """Phase of a member."""

    WAITING = "waiting"
    """It has no place in a generation, as before the first one or on a spare machine."""
    STARTING = "starting"
    """The ranks of a generation get their processes."""
    TRAINING = "training"
    STOPPING = "stopping"
    """The ranks return to standby."""
    ENDING = "ending"
    """All processes end."""
    ENDED = "ended"


class Member:
    """Runs the ranks of this machine, as a member of the run or as a spare machine."""

    def __init__(
        self,
        start_process: Callable[[], RankProcess],
        mesh: RunMesh,
        num_spares: int,
        *,
        link: Link,
        inbox: Requests,
        requests: Sequence[int],
        join_timeout_s: float = math.inf,
        writers: Writers | None = None,
        replica_arguments: Callable[[int], Sequence[str]] = lambda replica: (),
        generation_environment: Callable[[int], Mapping[str, str]] = lambda generation: {},
        may_end: Callable[[Failure], bool] = lambda failure: True,
        log: logging.Logger = logger,
    ) -> None:
        """`start_process` starts a process on standby; `mesh` is that of the first generation.
        `inbox` receives requests to resize, `requests` the numbers of signals to forward to the
        ranks. `join_timeout_s` limits how long to wait for enough machines; `writers` are those
        that must end with the lease. `replica_arguments` are those of the ranks of a replica, given
        its number; `generation_environment` returns variables of the ranks of a generation.
        `may_end` returns whether what is to be read of the other ranks after a failure has been
        read."""

        def start() -> RankProcess:
            process = start_process()
            if self._leased_s < math.inf:
                process.renew_lease(self._leased_s + STOP_S)
            return process

        self._pool = ProcessPool(start, num_spares, log)
        self._resizing = ResizeFollower(mesh, link, inbox, self._pool, log)
        self._writers = writers or Writers()
        self._link, self._join_timeout_s = link, join_timeout_s
        self._requests, self._num_forwarded = requests, 0
        self._inbox, self._replica_arguments = inbox, replica_arguments
        self._generation_environment, self._may_end = generation_environment, may_end
        self._log = log
        self.phase = MemberPhase.WAITING
        self.exit_status = 0
        """Exit status of the run."""
        self._waits_since_s = time.monotonic()
        """Since when it waits for a place, or has known that it is a spare one."""
        self._generation = 0
        """Number of the present or last generation of this machine."""
        self._store = "", 0
        """Address of the store of the generation."""
        self._listener: socket.socket | None = None
        """Where rank 0 opens the store of the generation."""
        self._outputs_after_s = 0.0
        """When the ranks of the generation may write what others see, unless an answer allows it
        before (`lease_clock_s`)."""
        self._starting: set[int] = set()
        """Ranks that have not been ordered to train in this generation."""
        self._until_s = 0.0
        """When the present phase must have ended."""
        self._stopping_since_s = 0.0
        self._has_lost_lease = self._has_left_generation = False
        self._failed_at_s = 0.0
        """When the last generation ended."""
        self._has_finished = False
        """Whether its ranks had finished their training when their processes were ended."""
        self._leased_s = 0.0
        self._spare_generation = 0
        """Last generation in which this machine was found to be a spare one."""
        self._excepted: int | None = None
        """Rank that raised the first exception of the generation on this machine."""
        self._stop_s = math.inf
        """When this machine was asked to stop."""
        self._has_unsaved_steps = False
        """Whether its ranks have committed steps since they saved and exited."""

    def run(self) -> None:
        """Take part in the run until its end. Main thread only."""
        try:
            while self.phase is not MemberPhase.ENDED:
                self.poll()
                time.sleep(_POLL_S)
        finally:
            if self.phase is not MemberPhase.ENDED:
                self._pool.end_all(0.0, aborts=False)
                self._pool.poll()
                self._end()

    @property
    def generation(self) -> int:
        """Number of the present or last generation; 0 before the first."""
        return self._generation

    @property
    def answer(self) -> Answer | None:
        """The last answer."""
        return self._link.answer

    @property
    def ranks(self) -> Mapping[int, RankProcess]:
        """The processes of its ranks, by local rank."""
        return self._pool.ranks

    @property
    def pids(self) -> set[int]:
        """Process ids of all processes that it waits for."""
        return self._pool.pids

    @property
    def is_resizing(self) -> bool:
        """Whether its ranks were ordered to leave the generation for a resize."""
        return self._generation > 0 and self._resizing.is_ordered(self._generation)

    def kill(self) -> None:
        """Kill all processes, whose end a later `poll` finds."""
        if self.phase is not MemberPhase.ENDED:
            self.exit_status = self.exit_status or 1
            self.phase = MemberPhase.ENDING
            self._close_listener()
            self._pool.kill_all()

    def poll(self) -> None:
        """Follow the answers of the coordinator and the reports of the processes."""
        self._link.beat()
        self._writers.check(may_write=self._may_write())
        self._note_generation()
        if self._link.lease_until_s != self._leased_s:
            self._renew_leases()
        self._writers.reap(self._pool.pids)
        self._pool.poll()
        match self.phase:
            case MemberPhase.WAITING:
                self._wait()
            case MemberPhase.STARTING:
                self._start()
            case MemberPhase.TRAINING:
                self._train()
            case MemberPhase.STOPPING:
                self._stop()
            case MemberPhase.ENDING if not self._pool.is_ending:
                self._end()

    def _note_generation(self) -> None:
        """Report the newest generation that an answer has named."""
        answer, report = self._link.answer, self._link.report
        before, replica = report.seen_generation, report.seen_replica
        if answer is not None and (answer.generation > before or answer.replica != replica):
            seen = max(answer.generation, before)
            self._link.update(seen_generation=seen, seen_replica=answer.replica)

    def _renew_leases(self) -> None:
        self._leased_s = self._link.lease_until_s
        for process in self._pool.processes if self._leased_s < math.inf else ():
            process.renew_lease(self._leased_s + STOP_S)

    def _wait(self) -> None:
        """Wait until this machine has a place in a new generation, or the run has ended, also for
        this machine alone."""
        answer = self._link.answer
        is_spare = self._is_spare(answer)
        self._inbox.is_open = False
        if answer is not None:
            self._resizing.answer_request(answer, is_spare=is_spare)
            problem = ""
            if answer.state is RunState.RUNNING:
                problem = self._resizing.adopt_mesh(answer.mesh)
            if problem:
                self._leave(1, problem)
                return
        # Warm before it is needed, also on a spare machine.
        self._pool.fill(self._mesh.num_ranks)
        if is_spare:
            assert answer is not None
            if answer.generation != self._spare_generation:
                self._writers.kill()
                if not self._requests:
                    self._log.info("This is a spare machine: all places are taken.")
            self._spare_generation = answer.generation
        self._report_stop()
        now_s, may_wait = time.monotonic(), is_spare and self._link.has_lease
        if may_wait:
            self._waits_since_s = now_s
        if self._link.rejection:
            self._leave(self._link.report.failure_status or 1, self._link.rejection)
        elif answer is not None and answer.state is RunState.ENDED:
            self._finish(answer)
        elif self._requests and not self._stop_waits(answer):
            silent = f", and {self._link.problem}" if self._link.problem else ""
            self._leave(self._status_of_stop(answer), f"it was asked to stop{silent}")
        elif not may_wait and now_s - self._waits_since_s > self._join_timeout_s:
            self._leave(1, self._link.missing_machines(self._join_timeout_s))
        elif answer is None or not self._has_seat(answer):
            if self._link.report.phase is NodeState.JOINED:
                self._link.update(phase=NodeState.STANDBY)
        elif self._link.has_lease:
            self._take_seat(answer)

    def _has_seat(self, answer: Answer) -> bool:
        """Return whether this machine is a member of a running generation that it has not left."""
        is_joined = self._link.report.phase is NodeState.JOINED
        is_new = answer.generation >= self._generation + (not is_joined)
        return answer.state is RunState.RUNNING and answer.node_rank >= 0 and is_new

    def _is_spare(self, answer: Answer | None) -> bool:
        return answer is not None and answer.state is RunState.RUNNING and answer.node_rank < 0

    def _take_seat(self, answer: Answer) -> None:
        """Join the generation of `answer`, and start its ranks once its store is known."""
        if answer.generation > self._generation:
            listener = self._store_listener() if answer.node_rank == 0 else None
            if answer.node_rank == 0 and listener is None:
                return
            if answer.is_blamed and self._excepted in self._pool.ranks:
                # Its state may be part of the cause. This prints its traceback, too.
                self._pool.end(self._excepted, 1, STANDBY_S)
            self._excepted = None
            self._pool.forget_exited()
            self._generation = answer.generation
            self._outputs_after_s = 0.0
            if answer.withholds_outputs:
                self._outputs_after_s = lease_clock_s() + WITHHELD_S
            # The ranks of the former generation may have left before they could follow a signal.
            self._num_forwarded = 0
            self._close_listener()
            self._listener = listener
            self._report_joined(answer)
            if answer.reason:
                self._log.warning(
                    "Generation %d starts. Before it: %s.", answer.generation, answer.reason
                )
        if answer.store_port:
            self._store = answer.store_address, answer.store_port
            self._pool.generation_started()
            self._starting = set(range(self._mesh.num_ranks))
            self.phase, self._until_s = MemberPhase.STARTING, time.monotonic() + _START_S

    def _store_listener(self) -> socket.socket | None:
        """Return the socket at which the store of a generation listens: at the address of this
        machine only, and passed on, so that no other process can take its port. None if there is no
        free descriptor yet. Raises OSError."""
        address = self._link.report.address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, 0), family=family)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return None

    def _report_joined(self, answer: Answer) -> None:
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
            store_port=0 if self._listener is None else self._listener.getsockname()[1],
            has_progress=False,
            has_lost_lease=False,
            was_stopped=False,
            failure=FailureKind.NONE,
            failure_status=0,
        )

    def _start(self) -> None:
        """Order the processes of all ranks to train as soon as they are on standby."""
        self._report_stop()
        if self._has_ended() or self._departs_at_once():
            self._stop_ranks()
            return
        if self._pool.is_ending:
            return
        self._pool.fill(self._mesh.num_ranks)
        is_late = time.monotonic() >= self._until_s
        for number in sorted(self._starting & self._pool.ranks.keys()):
            process = self._pool.ranks[number]
            if process.state in (RankState.STANDBY, RankState.ENDED):
                listener = self._listener if number == 0 else None
                process.start_training(self._environment(number), self._arguments, listener)
            elif process.state is RankState.STARTING and is_late:
                self._log.error("Rank %d did not start in %.0f s: it is killed.", number, _START_S)
                process.signal(signal.SIGKILL)
            if process.state is not RankState.STARTING:
                # One that died is found while the others train.
                self._starting.discard(number)
        if is_late:
            # Once: a driver may delay the end of a process.
            self._until_s = math.inf
        if not self._starting:
            self._close_listener()
            self.phase = MemberPhase.TRAINING

    def _environment(self, number: int) -> dict[str, str]:
        """Return the environment variables of a rank in this generation."""
        num_ranks, generation = self._mesh.num_ranks, self._generation - 1
        return {
            **rank_environment(
                rank=self._first_rank + number,
                local_rank=number,
                machine=self._link.report.node_rank,
                num_ranks=num_ranks * self._link.report.machines_per_replica,
                num_local_ranks=num_ranks,
                store=self._store,
                generation=generation,
            ),
            GENERATION: str(generation),
            OUTPUTS_AFTER: str(self._outputs_after_s),
            **({GENERATION_STARTED: str(self._failed_at_s)} if self._failed_at_s else {}),
            **self._generation_environment(self._generation),
        }

    @property
    def _mesh(self) -> RunMesh:
        return self._resizing.mesh

    @property
    def _has_left(self) -> bool:
        """Whether all ranks have left the training for a resize."""
        return self._resizing.has_left(self._generation)

    @property
    def _first_rank(self) -> int:
        """The first rank of this machine in the world."""
        return self._link.report.node_rank * self._mesh.num_ranks

    @property
    def _arguments(self) -> list[str]:
        """The arguments that the ranks of the generation get beside their own."""
        return [*self._replica_arguments(self._link.report.replica), *self._mesh.arguments]

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _train(self) -> None:
        """Watch the ranks, and stop them when their generation has ended."""
        self._report_stop()
        answer = self._link.answer
        assert answer is not None
        self._resizing.answer_request(answer, is_spare=self._is_spare(answer))
        if self._finishes():
            return
        self._allow_outputs(answer)
        self._resizing.prepare(answer, is_stopping=bool(self._requests))
        self._forward_signals()
        ranks = self._pool.ranks.values()
        failure = self._pool.failure(self._first_rank)
        if failure is not None:
            is_reported = self._link.report.phase is NodeState.FAILED
            if not is_reported and self._may_end(failure):
                self._report_failure(failure)
        elif all(process.state is RankState.ENDED for process in ranks):
            self._report_end()
        elif self._outputs_after_s == 0 and all(process.has_progress for process in ranks):
            self._report_progress()
            # Only now, because their imports would compete with the start of the ranks.
            self._pool.start_spares()
        if self.phase is not MemberPhase.TRAINING or self._finishes():
            return
        if not self._has_ended():
            self._resizing.order_to_leave(answer, self._generation)
            if not self._has_left and not self._departs_at_once():
                return
        self._stop_ranks()

    def _finishes(self) -> bool:
        """End with the run, if it has ended; return whether it has. A report may have ended it."""
        answer = self._link.answer
        assert answer is not None
        if answer.state is not RunState.ENDED:
            return False
        self._finish(answer)
        return True

    def _forward_signals(self) -> None:
        for number in self._requests[self._num_forwarded :] if self._may_forward() else ():
            self._num_forwarded += 1
            for process in self._pool.ranks.values():
                # One that has finished would die of it, and with it the whole training.
                if process.state is not RankState.ENDED:
                    process.signal(forwarded_signal(number))

    def _report_end(self) -> None:
        """Report that all ranks have finished, and wait for those of the other machines."""
        if self._link.report.phase is not NodeState.ENDED:
            was_stopped = any(rank.was_stopped for rank in self._pool.ranks.values())
            self._has_unsaved_steps = False
            self._link.update(phase=NodeState.ENDED, was_stopped=was_stopped)
        if not self._link.has_lease:
            self._log.warning(
                "All ranks of this machine have finished, but the coordinator does not answer "
                "whether those of the others have: see their logs."
            )
            self._end_processes()

    def _allow_outputs(self, answer: Answer) -> None:
        """Let the ranks write what they have withheld, once no machine has a lease of an earlier
        generation."""
        is_present = answer.generation == self._generation and answer.state is RunState.RUNNING
        is_allowed = is_present and not answer.withholds_outputs
        if self._outputs_after_s and (is_allowed or lease_clock_s() >= self._outputs_after_s):
            has_read = [process.allow_outputs() for process in self._pool.ranks.values()]
            if all(has_read):
                self._outputs_after_s = 0.0

    def _report_progress(self) -> None:
        """Report that all ranks have committed a step."""
        self._has_unsaved_steps = True
        if not self._link.report.has_progress:
            self._link.update(has_progress=True, trained_mesh=self._mesh.to_text())

    def _report_failure(self, failure: Failure) -> None:
        assert failure.rank is not None
        process = self._pool.ranks[failure.rank]
        kind, age_s = FailureKind.DEATH, 0.0
        if process.state is RankState.ENDED:
            kind = FailureKind.USER_ERROR
        elif process.state is not RankState.EXITED:
            kind, age_s = FailureKind.EXCEPTION, time.monotonic() - process.failed_at_s
            self._excepted = failure.rank
        self._link.update(
            phase=NodeState.FAILED,
            failure=kind,
            failure_text=failure.description[:1000],
            failure_signature=failure.signature[:1000],
            failure_rank=self._first_rank + failure.rank,
            failure_status=failure.status,
            failure_age_s=age_s,
        )

    def _has_ended(self) -> bool:
        """Whether the generation has ended, or this machine may not train in it any more."""
        answer = self._link.answer
        assert answer is not None
        is_in = answer.generation == self._generation and answer.node_rank >= 0
        is_going = answer.state in (RunState.RUNNING, RunState.REBUILDING)
        return not (is_in and is_going and self._link.has_lease and not self._link.rejection)

    def _stop_ranks(self) -> None:
        """Abort the training of the ranks that live."""
        self.phase = MemberPhase.STOPPING
        self._stopping_since_s = self._failed_at_s = time.monotonic()
        self._has_lost_lease = not self._link.has_lease
        if self._has_lost_lease:
            self._log.warning(
                "No answer of the coordinator for %.0f s (%s): the ranks of this machine stop.",
                LEASE_S,
                self._link.problem,
            )
        has_left = self._has_left
        self._close_listener()
        # First of all: what they write must end with the lease, too.
        self._writers.check(may_write=self._may_write())
        self._pool.poll()
        has_failed = any(process.error for process in self._pool.ranks.values())
        if has_failed and self._link.report.phase is NodeState.JOINED:
            # The order to stop came first; the cause may be here all the same.
            self._report_failure(
                self._pool.exception(self._pool.first_exception(), self._first_rank)
            )
        self._has_left_generation = has_left and not has_failed
        for process in self._pool.ranks.values():
            process.abort_training()

    def _stop(self) -> None:
        """Wait until all ranks are on standby, kill those that do not return in time, and report
        it."""
        ranks = self._pool.ranks
        if are_idle(ranks.values()) or time.monotonic() >= self._standby_deadline_s():
            stuck = [number for number, process in ranks.items() if not is_idle(process)]
            for number in stuck:
                self._log.warning("Rank %d did not leave its training: it is replaced.", number)
            self._pool.kill(stuck)
            self._pool.end_surplus_ranks(self._mesh.num_ranks)
            if self._pool.is_ending:
                return
            self._pool.forget_exited()
            if not self._link.has_lease:
                self._writers.kill()
            self.phase, self._waits_since_s = MemberPhase.WAITING, time.monotonic()
            self._link.update(
                phase=NodeState.STANDBY,
                has_lost_lease=self._has_lost_lease,
                has_left=self._has_left_generation,
            )

    def _standby_deadline_s(self) -> float:
        """Return the time by which ranks that were ordered to stop must be on standby. Those that
        are not are killed before the place may be given away, also if the lease ends meanwhile."""
        lease_s = self._link.lease_until_s - lease_clock_s()
        return min(self._stopping_since_s + _ABORT_S, time.monotonic() + lease_s + STANDBY_S)

    def _may_write(self) -> bool:
        """Whether the checkpoint writers of this machine may write: in its place of the present
        generation, or for ranks that have finished in it."""
        waits = self._link.report.phase is NodeState.STANDBY
        has_finished = self._has_finished or self._pool.have_finished
        return self._link.has_lease or (not waits and has_finished)

    def _status_of_stop(self, answer: Answer | None) -> int:
        """Return the exit status of this machine if it leaves now: 1 if steps may be lost."""
        if not self._link.is_alone:
            return int(self._has_unsaved_steps)
        return int(not self._is_spare(answer))

    def _departs_at_once(self) -> bool:
        """Whether this machine leaves its replica without a save: its ranks are starting, in which
        a signal would kill them, and have no steps to save."""
        has_trained = any(rank.has_progress for rank in self._pool.ranks.values())
        return bool(self._requests) and not self._link.is_alone and not has_trained

    def _report_stop(self) -> None:
        if self._requests and not self._link.report.is_stopping:
            self._stop_s = time.monotonic()
            self._link.update(is_stopping=True)

    def _stop_waits(self, answer: Answer | None) -> bool:
        """Whether a request to stop waits: the ranks have left their training for a resize, and
        only ranks that train can save and exit."""
        before = self._generation - (self._link.report.phase is NodeState.JOINED)
        has_left = 0 < self._resizing.left_generation >= before
        is_soon = time.monotonic() < self._stop_s + HOLD_S
        return has_left and is_soon and self._link.has_lease and not self._is_spare(answer)

    def _may_forward(self) -> bool:
        """Whether signals reach ranks that can handle them."""
        answer = self._link.answer
        assert answer is not None
        if self._departs_at_once():
            return False
        is_between = self._resizing.is_between(answer, self._generation)
        return not is_between or time.monotonic() >= self._stop_s + HOLD_S

    def _finish(self, answer: Answer) -> None:
        """End with the run."""
        self.exit_status = answer.status
        if answer.status:
            self._log.error("Training ends: %s.", answer.reason.rstrip("."))
            if answer.is_blamed and self._excepted in self._pool.ranks:
                self._pool.end(self._excepted, answer.status, STANDBY_S)
        self._end_processes()

    def _leave(self, status: int, reason: str) -> None:
        """End this machine's part of the run."""
        self.exit_status = status
        log = self._log.error if status else self._log.info
        log("Training ends on this machine: %s", reason)
        self._end_processes()

    def _end_processes(self) -> None:
        """End all processes. Those that have finished get time to exit; those that train, or wait
        to, have nothing to save."""
        self.phase, self._inbox.is_open = MemberPhase.ENDING, False
        self._close_listener()
        self._has_finished = self._pool.have_finished
        aborts = bool(self.exit_status) or not self._has_finished
        self._pool.end_all(_ABORT_S if aborts else EXIT_S, aborts=aborts)

    def _end(self) -> None:
        """Leave the run, once all processes have ended."""
        if self._link.report.phase is not NodeState.ENDED:
            self._writers.kill()
        self._inbox.close("the run has ended")
        self._link.leave("it was asked to stop" if self._requests and self.exit_status else "")
        self.phase = MemberPhase.ENDED
