"""The agent of one of several machines. The rendezvous decides when an attempt starts and ends, and
who takes part in it; this agent reports to it, and stops its ranks without being asked to when the
rendezvous does not answer in time. Layer: above agent and rendezvous.
"""

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

from torchtitan_lite.launcher.processes import Subreaper, become_subreaper
from torchtitan_lite.launcher.restart_policy import Failure
from torchtitan_lite.log import logger
from torchtitan_lite.rank_recovery.agent import AgentRendezvous, ProcessAgent, succeeded
from torchtitan_lite.rank_recovery.lease import kill_writers
from torchtitan_lite.rank_recovery.rank_process import RankProcess, RankState
from torchtitan_lite.rendezvous.link import RendezvousLink
from torchtitan_lite.rendezvous.messages import Answer, FailureKind, Phase, RunState
from torchtitan_lite.rendezvous.timing import LEASE_S, PARK_S, STOP_S, lease_clock_s
from torchtitan_lite.stores import listening_store

_REAP_S = 0.5


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
    ) -> None:
        """See `ProcessAgent`. `join_timeout_s` limits how long to wait for enough machines."""
        rendezvous = AgentRendezvous(self.join)

        def start() -> RankProcess:
            process = start_process()
            self._started.add(process.pid)
            process.renew_lease(self._leased_s + STOP_S)
            return process

        super().__init__(start, num_ranks, num_spares, rendezvous=rendezvous, requests=requests)
        # All machines have equally many ranks, so that torchelastic need not compare them in a
        # store, where it would block.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        # A checkpoint writer outlives its rank, and must end with the lease, too.
        become_subreaper()
        self._subreaper, self._reaped_s = Subreaper(), 0.0
        self._started: set[int] = set()
        self._link, self._join_timeout_s = link, join_timeout_s
        self._store: Store | None = None
        self._attempt_number = 0
        """Number of the present or last attempt of this machine."""
        self._leased_s = 0.0
        self._writers_killed_s = -math.inf
        """When writers were last killed for want of a lease."""
        self._spare_attempt = 0
        """Last attempt in which this machine was found to be a spare one."""
        self._excepted: int | None = None
        """Rank that raised the first exception of the attempt on this machine."""

    def join(self) -> RendezvousInfo:
        """Block until this machine has a node rank in a new attempt. Raises
        RendezvousGracefulExitError if the run has ended, also for this machine alone."""
        since_s = time.monotonic()
        while True:
            for number in range(self._worker_group.spec.local_world_size):
                if number not in self._ranks:
                    # Warm before it is needed, also on a spare machine.
                    self._ranks[number] = self._take_spare() or self._start_process()
            self._pause()
            for process in (*self._ranks.values(), *self._spares):
                process.poll()
            answer = self._link.answer
            if answer is not None and self._is_spare(answer):
                if answer.attempt != self._spare_attempt:
                    # Another machine may have taken the place that they write for.
                    kill_writers(os.getpid())
                self._spare_attempt = answer.attempt
            if self._link.rejection:
                self._leave(self._link.report.failure_status or 1, self._link.rejection)
            if self._requests:
                silent = f", and {self._link.problem}" if self._link.problem else ""
                self._leave(0 if self._is_spare(answer) else 1, f"it was asked to stop{silent}")
            if answer is not None and answer.state is RunState.ENDED:
                self._finish(answer)
                raise RendezvousGracefulExitError
            if self._is_spare(answer) and self._link.has_lease:
                since_s = time.monotonic()
            elif time.monotonic() - since_s > self._join_timeout_s:
                self._leave(1, self._too_few(answer))
            if answer is None or not self._has_seat(answer):
                if self._link.report.phase is Phase.JOINED:
                    self._link.update(phase=Phase.PARKED)
                continue
            if not self._link.has_lease:
                continue
            if info := self._take_seat(answer):
                return info

    def _has_seat(self, answer: Answer) -> bool:
        """Return whether this machine is a member of a running attempt that it has not left."""
        is_joined = self._link.report.phase is Phase.JOINED
        is_new = answer.attempt >= self._attempt_number + (not is_joined)
        return answer.state is RunState.RUNNING and answer.node_rank >= 0 and is_new

    def _is_spare(self, answer: Answer | None) -> bool:
        return answer is not None and answer.state is RunState.RUNNING and answer.node_rank < 0

    def _take_seat(self, answer: Answer) -> RendezvousInfo | None:
        """Join the attempt of `answer`. Returns None while its store is not known."""
        if answer.attempt > self._attempt_number:
            if self._attempt_number and answer.is_blamed and self._excepted in self._ranks:
                # Its state may be part of the cause. This prints its traceback, too.
                self._end([self._ranks.pop(self._excepted)], time.monotonic() + PARK_S)
            self._excepted = None
            for number, process in list(self._ranks.items()):
                if process.state is RankState.EXITED:
                    del self._ranks[number]
            self._attempt_number = answer.attempt
            port, self._store = 0, HashStore()
            if answer.node_rank == 0:
                self._store = listening_store(self._link.report.address)
                port = self._store.port
            self._link.update(
                phase=Phase.JOINED,
                attempt=answer.attempt,
                seen_attempt=answer.attempt,
                node_rank=answer.node_rank,
                store_port=port,
                has_progress=False,
                has_lost_lease=False,
                failure=FailureKind.NONE,
                failure_status=0,
            )
            if answer.reason:
                logger.warning("Attempt %d starts. Before it: %s.", answer.attempt, answer.reason)
        if not answer.store_port or self._store is None:
            return None
        return RendezvousInfo(
            self._store,
            answer.node_rank,
            self._link.report.num_machines,
            RendezvousStoreInfo(answer.store_address, answer.store_port),
        )

    def _too_few(self, answer: Answer | None) -> str:
        needed = self._link.report.num_machines
        if answer is None or self._link.problem:
            return f"the rendezvous cannot be reached: {self._link.problem}"
        return (
            f"{answer.num_joined} of {needed} machines have joined in "
            f"{self._join_timeout_s:g} s ({answer.joined}): start the others, or raise "
            "--rdzv-timeout-s"
        )

    def _leave(self, status: int, reason: str) -> None:
        """End this machine's part of the run. Raises RendezvousGracefulExitError."""
        self.exit_status = status
        log = logger.error if status else logger.info
        log("Training ends on this machine: %s", reason)
        raise RendezvousGracefulExitError(reason)

    def _park_deadline_s(self, began_s: float) -> float:
        # Ranks that do not park are killed before the place may be given away, also if the lease
        # ends while they do.
        lease_s = self._link.lease_until_s - lease_clock_s()
        return min(super()._park_deadline_s(began_s), time.monotonic() + lease_s + PARK_S)

    def _kill_writers_without_lease(self) -> None:
        """Kill the checkpoint writers if there is no lease, unless all ranks have finished."""
        if self._link.has_lease:
            self._writers_killed_s = -math.inf
        elif time.monotonic() - self._writers_killed_s > _REAP_S and not self._has_finished():
            kill_writers(os.getpid())
            # Again later, because ranks that have not parked yet may start others.
            self._writers_killed_s = time.monotonic()

    def _has_finished(self) -> bool:
        """Whether all ranks have finished their training."""
        ended = [one for one in self._ranks.values() if one.state is RankState.ENDED]
        is_clean = all(one.status is not None and one.status.is_clean for one in ended)
        return 0 < len(self._ranks) == len(ended) and is_clean

    def _pause(self) -> None:
        self._link.beat()
        self._kill_writers_without_lease()
        answer = self._link.answer
        if answer is not None and answer.attempt > self._link.report.seen_attempt:
            self._link.update(seen_attempt=answer.attempt)
        if self._link.lease_until_s != self._leased_s:
            self._renew_leases()
        if time.monotonic() - self._reaped_s > _REAP_S:
            self._reaped_s = time.monotonic()
            self._subreaper.reap(self._started, self._reaped_s)
        super()._pause()

    def _renew_leases(self) -> None:
        self._leased_s = self._link.lease_until_s
        for process in (*self._ranks.values(), *self._spares):
            process.renew_lease(self._leased_s + STOP_S)

    def _has_ended(self) -> bool:
        """Whether the attempt has ended, or this machine may not train in it any more."""
        answer = self._link.answer
        assert answer is not None
        is_in = answer.attempt == self._attempt_number and answer.node_rank >= 0
        is_going = answer.state in (RunState.RUNNING, RunState.REBUILDING)
        return not (is_in and is_going and self._link.has_lease and not self._link.rejection)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._pause()
        if self._link.report.is_stopping is not bool(self._requests):
            self._link.update(is_stopping=True)
        answer = self._link.answer
        assert answer is not None
        if answer.state is RunState.ENDED:
            return self._finish(answer)
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.SUCCEEDED:
            if self._link.report.phase is not Phase.ENDED:
                self._link.update(phase=Phase.ENDED)
            if not self._link.has_lease:
                logger.warning(
                    "All ranks of this machine have finished, but the rendezvous does not answer "
                    "whether those of the others have: see their logs."
                )
                return result
            result = RunResult(state=WorkerState.HEALTHY)
        if not self._has_ended():
            return result
        if not self._link.has_lease:
            logger.warning(
                "No answer of the rendezvous for %.0f s (%s): the ranks of this machine stop.",
                LEASE_S,
                self._link.problem,
            )
        self._failed_at_s = time.monotonic()
        return RunResult(state=WorkerState.FAILED)

    def _decide(self, failure: Failure) -> RunResult:
        """Report the failure, and wait for the end of the attempt."""
        self._lost = {n for n, one in self._ranks.items() if one.state is RankState.EXITED}
        if self._link.report.phase is not Phase.FAILED:
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
        first = self._link.report.node_rank * self._link.report.num_ranks
        self._link.update(
            phase=Phase.FAILED,
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
        # First of all: what they write must end with the lease, too.
        self._kill_writers_without_lease()
        for process in self._ranks.values():
            process.poll()
        self._lost = {n for n, one in self._ranks.items() if one.state is RankState.EXITED}
        failed = {n: one for n, one in self._ranks.items() if one.error}
        if failed and self._link.report.phase is Phase.JOINED:
            # The order to stop came first; the cause may be here all the same.
            rank = min(failed, key=lambda number: failed[number].failed_at_s)
            self._report_failure(self._exception(rank))
        super()._stop_workers(worker_group)
        if not self._link.has_lease:
            kill_writers(os.getpid())
        self._link.update(phase=Phase.PARKED, has_lost_lease=has_lost_lease)

    def _finish(self, answer: Answer) -> RunResult:
        """End with the run."""
        has_finished = self._link.report.phase is Phase.ENDED
        self.exit_status, self._remaining_restarts = answer.status, 0
        if answer.status:
            logger.error("Training ends: %s.", answer.reason)
            if answer.is_blamed and self._excepted in self._ranks:
                process = self._ranks[self._excepted]
                process.exit(answer.status)
                self._end([process], time.monotonic() + PARK_S, status=None)
        elif has_finished:
            return succeeded(self._worker_group)
        return RunResult(state=WorkerState.FAILED)

    def _exit_barrier(self) -> None:
        """Do nothing: the rendezvous has seen all machines finish."""

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        super()._shutdown(death_sig, timeout)
        if self._link.report.phase is not Phase.ENDED:
            # Another machine may take the place that they write for.
            kill_writers(os.getpid())
        self._link.leave("it was asked to stop" if self._requests and self.exit_status else "")

    def _attempt_started(self) -> None:
        """Nothing to record: the rendezvous counts the attempts."""

    def _made_progress(self) -> None:
        if not self._link.report.has_progress:
            self._link.update(has_progress=True)

    def _attempt(self) -> int:
        return self._attempt_number - 1
