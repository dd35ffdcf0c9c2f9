"""The agent of one machine: a torchelastic agent that replaces a dead rank by a spare and restarts
the training in the processes of the others.

torchelastic's base class runs the rendezvous, assigns the ranks and loops; `ProcessAgent` says what
it means to start, stop and watch the ranks. `RankAgent` decides when.
"""

import os
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
)

from torchtitan_lite.core.errors import FAILED, TRANSIENT
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.rank.supervised import GENERATION, GENERATION_STARTED, rank_environment
from torchtitan_lite.fault_tolerance.supervision.local_ranks import forwarded_signal
from torchtitan_lite.fault_tolerance.supervision.logs import mask_numbers
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.process_pool import EXIT_S, is_idle
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.rank_process import (
    RankProcess,
    RankState,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import RunMesh
from torchtitan_lite.fault_tolerance.supervision.restart_policy import Failure

_POLL_S = 0.02
_CAUSE_S = 0.5
"""After a rank reported an exception, time in which the death of another is found to be its
cause."""
_STANDBY_S = 5.0
"""Time in which a surviving process must leave its training; then it is killed and replaced."""
_KILL_S = 5.0
"""Time in which a killed process must end, which a driver may delay without limit."""
_START_S = 600.0
"""Time in which a process must have imported what it needs; then it is killed."""
UNLIMITED = 1 << 30
"""Restarts according to torchelastic, which counts them only; the restart policy decides."""


class AgentRendezvous(RendezvousHandler):
    """Rendezvous of torchelastic by the agent itself, which decides when a generation starts."""

    def __init__(self, join: Callable[[], RendezvousInfo]) -> None:
        """`join` blocks until the next generation starts."""
        self._join = join

    def get_backend(self) -> str:
        return "agent"

    def next_rendezvous(self) -> RendezvousInfo:
        return self._join()

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no other agent waits for this one."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "agent"

    def shutdown(self) -> bool:
        return True


class ProcessAgent(SimpleElasticAgent):
    """Runs the ranks of one machine, of a run on this machine or on several."""

    def __init__(
        self,
        start_process: Callable[[], RankProcess],
        mesh: RunMesh,
        num_spares: int,
        *,
        rendezvous: RendezvousHandler,
        requests: Sequence[int],
    ) -> None:
        """`start_process` starts a process on standby; `mesh` is that of the first generation, with
        the ranks of this machine. `requests` receives the numbers of signals to forward to the
        ranks."""
        spec = WorkerSpec(
            role="trainer",
            local_world_size=mesh.num_ranks,
            rdzv_handler=rendezvous,
            entrypoint="train",
            max_restarts=UNLIMITED,
            monitor_interval=_POLL_S,
        )
        super().__init__(spec)
        self._start_process, self._num_spares = start_process, num_spares
        self._requests, self._num_forwarded = requests, 0
        self._ranks: dict[int, RankProcess] = {}
        """Processes by local rank."""
        self._spares: list[RankProcess] = []
        self._lost: set[int] = set()
        """Ranks whose process is to be replaced."""
        self._mesh = mesh
        """The mesh of the present or next generation."""
        self._failed_at_s = self._restart_at_s = self._ended_at_s = 0.0
        self.exit_status = 0
        """Exit status of the run."""

    @abstractmethod
    def _decide(self, failure: Failure) -> RunResult:
        """Decide what follows from the failure of a rank."""

    @abstractmethod
    def _generation_started(self) -> None:
        """Record the start of a generation."""

    @abstractmethod
    def _made_progress(self) -> None:
        """Record that all ranks have committed a step."""

    @abstractmethod
    def _generation(self) -> int:
        """Return the number of generations before the present one."""

    def _may_forward(self) -> bool:
        """Whether signals reach ranks that can handle them."""
        return True

    def _pause(self) -> None:
        """Let some time pass in a loop that waits."""
        time.sleep(_POLL_S)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Give each rank a process: its own if that lives, else a spare, else a new one."""
        while time.monotonic() < self._restart_at_s and len(self._requests) == self._num_forwarded:
            self._pause()
        ranks = {worker.local_rank: worker for worker in worker_group.workers}
        for number in ranks.keys() - self._ranks.keys():
            self._ranks[number] = self._take_spare() or self._start_process()
        self._generation_started()
        self._ended_at_s = 0.0
        waiting, deadline_s = set(ranks), time.monotonic() + _START_S
        while waiting:
            for number in sorted(waiting):
                process = self._ranks[number]
                process.poll()
                if process.state in (RankState.STANDBY, RankState.ENDED):
                    environment = self._environment(ranks[number], worker_group)
                    process.start_training(environment, self._mesh.arguments)
                elif process.state is RankState.STARTING and time.monotonic() >= deadline_s:
                    logger.error("Rank %d did not start in %.0f s: it is killed.", number, _START_S)
                    self._kill([process])
                if process.state is not RankState.STARTING:
                    # One that died is found by `_monitor_workers`.
                    waiting.discard(number)
            if waiting:
                self._pause()
        return {number: process.pid for number, process in self._ranks.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Poll the processes. Returns FAILED as soon as the cause of a failure is known."""
        for number in self._requests[self._num_forwarded :] if self._may_forward() else ():
            self._num_forwarded += 1
            for process in self._ranks.values():
                # One that has finished would die of it, and with it the whole training.
                if process.state is not RankState.ENDED:
                    process.signal(forwarded_signal(number))
        for process in (*self._ranks.values(), *self._spares):
            process.poll()
        self._spares = [spare for spare in self._spares if spare.state is not RankState.EXITED]
        failure = self._failure()
        if failure is not None:
            return self._decide(failure)
        if all(process.state is RankState.ENDED for process in self._ranks.values()):
            return succeeded(worker_group)
        if all(process.has_progress for process in self._ranks.values()):
            self._made_progress()
            # Only now, because their imports would compete with the start of the ranks.
            while len(self._spares) < self._num_spares:
                self._spares.append(self._start_process())
        return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Abort the training of the ranks that live, and end the processes of lost ranks and of
        ranks that the next generation does not have."""
        if self.exit_status:
            self._shutdown()
            return
        deadline_s = time.monotonic() + _STANDBY_S
        surviving = {n: process for n, process in self._ranks.items() if n not in self._lost}
        for process in surviving.values():
            process.abort_training()
        lost = [self._ranks.pop(number) for number in self._lost]
        self._end(lost, deadline_s)
        self._lost.clear()
        while any(not is_idle(process) for process in surviving.values()):
            if time.monotonic() >= deadline_s:
                break
            self._pause()
            for process in surviving.values():
                process.poll()
        replaced = [
            number
            for number, process in surviving.items()
            if not is_idle(process) or process.state is RankState.EXITED
        ]
        for number in replaced:
            logger.warning("Rank %d did not leave its training: it is replaced.", number)
        self._kill([self._ranks.pop(number) for number in replaced])
        self._end_surplus_ranks()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End all processes."""
        processes = (*self._ranks.values(), *self._spares)
        for process in processes:
            if self.exit_status:
                process.abort_training()
            process.exit(0)
        deadline = time.monotonic() + (_STANDBY_S if self.exit_status else EXIT_S)
        self._end(processes, deadline, status=None)

    def _failure(self) -> Failure | None:
        """Return the first failure whose cause is known, and mark its rank as lost."""
        gone = {n: p for n, p in self._ranks.items() if p.state is RankState.EXITED}
        if gone:
            self._lost = set(gone)
            rank, process = min(gone.items())
            assert process.status is not None
            if process.error and not process.status.is_signal:
                return self._exception(rank)
            text, status = f"{self._name_of(rank)}: {process.status}", process.status
            signature = "" if status.is_signal or status.code == TRANSIENT else str(status)
            return Failure(text, signature, Path(os.devnull), rank, max(0, status.code))
        failed = {n: p for n, p in self._ranks.items() if p.error}
        ended = {n: p for n, p in self._ranks.items() if p.status and not p.status.is_clean}
        if ended:
            # An error that a user must correct, which has been logged. All ranks end with it.
            self._ended_at_s = self._ended_at_s or time.monotonic()
            is_late = time.monotonic() >= self._ended_at_s + EXIT_S
            if not is_late and not all(p.error or is_idle(p) for p in self._ranks.values()):
                return None
            rank, process = min(ended.items())
            assert process.status is not None
            text = f"{self._name_of(rank)}: {process.end_reason or process.status}"
            return Failure(text, "", Path(os.devnull), rank, process.status.code)
        first = min((p.failed_at_s for p in failed.values()), default=0.0)
        if failed and time.monotonic() >= first + _CAUSE_S:
            rank = min(failed, key=lambda number: failed[number].failed_at_s)
            self._lost = {rank}
            return self._exception(rank)
        return None

    def _exception(self, rank: int) -> Failure:
        """Return the failure of a rank that has reported an exception."""
        process = self._ranks[rank]
        text = f"{self._name_of(rank)}: {process.error}"
        signature = "" if process.may_pass else mask_numbers(process.error)
        status = TRANSIENT if process.may_pass else FAILED
        return Failure(text, signature, Path(os.devnull), rank, status)

    def _name_of(self, rank: int) -> str:
        """Return the name of a local rank for display."""
        return f"rank {self._worker_group.workers[rank].global_rank}"

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        """Return an event without the name of the host, whose look-up may block for seconds."""
        return Event(state, source)

    def _change_mesh(self, mesh: RunMesh) -> None:
        """Let the next generation have another mesh."""
        self._mesh = mesh
        self._worker_group.spec.local_world_size = mesh.num_ranks

    def _prepare(self, mesh: RunMesh) -> bool:
        """Start the processes that another mesh needs; return whether all are warm."""
        missing = mesh.num_ranks - len(self._ranks)
        while len(self._spares) < missing:
            self._spares.append(self._start_process())
        return sum(spare.state is RankState.STANDBY for spare in self._spares) >= missing

    def _end_surplus_ranks(self) -> None:
        """End the processes that the next generation does not have. They are on standby: their
        snapshots are in shared memory."""
        surplus = self._ranks.keys() - range(self._worker_group.spec.local_world_size)
        self._kill([self._ranks.pop(number) for number in surplus])

    def _end_surplus_spares(self) -> None:
        """End the spares beyond the configured number, which a resize that is not followed has
        started."""
        self._spares.sort(key=lambda spare: spare.state is not RankState.STANDBY)
        surplus, self._spares = self._spares[self._num_spares :], self._spares[: self._num_spares]
        self._kill(surplus)

    def _take_spare(self) -> RankProcess | None:
        """Return a spare, one on standby if possible."""
        for spare in self._spares:
            spare.poll()
        self._spares.sort(key=lambda spare: spare.state is not RankState.STANDBY)
        living = [spare for spare in self._spares if spare.state is not RankState.EXITED]
        if not living:
            return None
        self._spares.remove(living[0])
        return living[0]

    def _end(
        self, processes: Sequence[RankProcess], deadline: float, status: int | None = 1
    ) -> None:
        """Order processes to exit unless `status` is None, and kill those that still run after the
        deadline."""
        if status is not None:
            for process in processes:
                process.exit(status)
        self._wait_for_exit(processes, deadline)
        self._kill(processes)

    def _kill(self, processes: Sequence[RankProcess]) -> None:
        """Kill processes, all before it waits for the end of the first."""
        for process in processes:
            process.signal(signal.SIGKILL)
        self._wait_for_exit(processes, time.monotonic() + _KILL_S)
        for process in processes:
            if process.state is not RankState.EXITED:
                pid = process.pid
                logger.error("Process %d does not end after SIGKILL: a driver blocks it.", pid)

    def _wait_for_exit(self, processes: Sequence[RankProcess], deadline: float) -> None:
        while any(process.state is not RankState.EXITED for process in processes):
            if time.monotonic() >= deadline:
                return
            self._pause()
            for process in processes:
                process.poll()

    def _environment(self, worker: Worker, worker_group: WorkerGroup) -> Mapping[str, str]:
        """Return the environment variables of a rank in this generation."""
        generation = self._generation()
        earlier = int(os.environ.get(GENERATION, "0"))
        assert worker_group.group_rank is not None
        assert worker_group.master_addr is not None and worker_group.master_port is not None
        return {
            **rank_environment(
                rank=worker.global_rank,
                local_rank=worker.local_rank,
                machine=worker_group.group_rank,
                num_ranks=worker.world_size,
                num_local_ranks=worker_group.spec.local_world_size,
                store=(worker_group.master_addr, worker_group.master_port),
                generation=generation,
            ),
            # The launcher may have started another agent before.
            GENERATION: str(earlier + generation),
            **({GENERATION_STARTED: str(self._failed_at_s)} if self._failed_at_s else {}),
        }


def succeeded(worker_group: WorkerGroup) -> RunResult:
    """Return the result of ranks that have all finished."""
    ranks = [worker.global_rank for worker in worker_group.workers]
    return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
