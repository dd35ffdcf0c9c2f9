"""The agent of a run on one machine alone: it decides about restarts, and resizes on request.

A resize restarts the training as after the loss of a rank: the processes that stay return to
standby, and build the new mesh with the state that the snapshots in shared memory hold. That of a
replica needs the launcher's permission to leave the former mesh and to start on the new one.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from torchtitan_lite.core.errors import FAILED
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.rank.supervised import RANK_LOGS, rank_log
from torchtitan_lite.distributed.stores import listening_store
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.agent import (
    UNLIMITED,
    AgentRendezvous,
    ProcessAgent,
)
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.process_pool import EXIT_S
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.rank_process import (
    RankProcess,
    RankState,
)
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.resize_inbox import refusal_of
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    LEAVE_S,
    Permission,
    RequestInbox,
    ResizeRequest,
    ResizeState,
    RunMesh,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import (
    Failure,
    GiveUp,
    RestartPolicy,
)

_ADDRESS = "127.0.0.1"
_START_S, _START_JOINTLY_S = 60.0, 10.0
"""Time after the start on another mesh in which a request to stop waits for the first step. Later,
replicas may wait for others, which will not come."""
_PREPARE_S = 600.0
"""Time for new processes to become warm."""


@dataclass
class _Resize:
    """A resize that has not been completed."""

    request: ResizeRequest
    former: RunMesh
    """The mesh before."""
    prepare_until_s: float
    """When its processes must be warm."""
    is_ready: bool = False
    """Whether READY was answered."""
    leave_until_s: float | None = None
    """When the ranks must have left the training; None before they are ordered to."""
    waits_to_start: bool = False
    """Whether the ranks have left, and the launcher has not permitted them to start."""
    has_started: bool = False
    started_s: float = 0.0
    is_cancelled: bool = False
    """Whether the former mesh is started again."""


def _join_alone() -> RendezvousInfo:
    """Return a new store for each generation, on a port that the kernel chooses; the earlier one
    closes with its last reference.

    torch's static rendezvous keeps one store, in which a second generation finds the addresses of
    the first (2.13)."""
    store = listening_store(_ADDRESS)
    return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_ADDRESS, store.port))


class RankAgent(ProcessAgent):
    """Runs the ranks of a run on this machine alone."""

    def __init__(
        self,
        start_process: Callable[[], RankProcess],
        mesh: RunMesh,
        num_spares: int,
        *,
        policy: RestartPolicy,
        requests: Sequence[int],
        inbox: RequestInbox,
        check_resize: Callable[[ResizeRequest], None],
    ) -> None:
        """See `ProcessAgent`. `inbox` receives requests to resize; `check_resize` raises
        ConfigError for one that the run cannot follow."""
        rendezvous = AgentRendezvous(_join_alone)
        super().__init__(start_process, mesh, num_spares, rendezvous=rendezvous, requests=requests)
        self._policy, self._inbox, self._check_resize = policy, inbox, check_resize
        self._resize: _Resize | None = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._inbox.repeat(time.monotonic())
        if self._resize is not None and self._resize.waits_to_start:
            return self._wait_to_start(self._resize)
        result = super()._monitor_workers(worker_group)
        if result.state is not WorkerState.HEALTHY:
            return result
        if self._resize is not None and self._resize.has_started:
            return result
        if self._resize is None or self._resize.leave_until_s is None:
            if self._requests:
                return result
            self._read_request()
        resize = self._resize
        if resize is not None and (resize.leave_until_s is not None or self._may_leave(resize)):
            return self._leave(resize)
        return result

    def _may_leave(self, resize: _Resize) -> bool:
        """Start the missing processes, which import everything while the others train; return
        whether the ranks may leave the training."""
        if not self._prepare(resize.request.mesh):
            if time.monotonic() >= resize.prepare_until_s:
                reason = f"its new processes have not started in {_PREPARE_S:.0f} s"
                logger.error("Resize to %s failed: %s.", resize.request.mesh, reason)
                self._end_resize(ResizeState.FAILED, reason)
                self._end_surplus_spares()
            return False
        # Ranks that start do not receive orders yet.
        if not all(rank.has_progress for rank in self._ranks.values()):
            return False
        if not resize.request.is_joint:
            return True
        if not resize.is_ready:
            resize.is_ready = True
            self._inbox.answer(resize.request, ResizeState.READY)
        permission = self._inbox.permission(resize.request)
        if permission is Permission.CANCEL:
            self._resize = None
            self._end_surplus_spares()
        return permission is Permission.LEAVE

    def _leave(self, resize: _Resize) -> RunResult:
        """Let the ranks leave the training, and start the next one once they have."""
        if resize.leave_until_s is None:
            resize.leave_until_s = time.monotonic() + LEAVE_S
            for process in self._ranks.values():
                process.leave_training()
        has_left = all(rank.state is RankState.STANDBY for rank in self._ranks.values())
        if has_left and resize.request.is_joint:
            resize.waits_to_start = True
            self._inbox.answer(resize.request, ResizeState.LEFT)
        elif has_left or (not resize.request.is_joint and time.monotonic() >= resize.leave_until_s):
            # Ranks that have not left are aborted.
            return self._start_on(resize.request.mesh, resize)
        return RunResult(state=WorkerState.HEALTHY)

    def _wait_to_start(self, resize: _Resize) -> RunResult:
        """Wait until the ranks of all replicas have left the training."""
        self._pause()
        for process in (*self._ranks.values(), *self._spares):
            process.poll()
        # One that has died is replaced when the training starts.
        self._lost = {n for n, process in self._ranks.items() if process.state is RankState.EXITED}
        if self._inbox.permission(resize.request) is Permission.START:
            return self._start_on(resize.request.mesh, resize)
        if self._requests:
            # To save and exit, they must train.
            resize.is_cancelled = True
            self._inbox.answer(resize.request, ResizeState.FAILED, "it was asked to stop")
            return self._start_on(resize.former, resize)
        return RunResult(state=WorkerState.HEALTHY)

    def _start_on(self, mesh: RunMesh, resize: _Resize) -> RunResult:
        """Restart the training on another mesh, or on the former one."""
        resize.waits_to_start, resize.has_started = False, True
        resize.started_s = time.monotonic()
        self._change_mesh(mesh)
        if resize.is_cancelled:
            logger.warning("Resizing to %s is cancelled.", resize.request.mesh)
        else:
            logger.warning("Resizing from %s to %s.", resize.former, mesh)
        return RunResult(state=WorkerState.UNHEALTHY)

    def _may_forward(self) -> bool:
        # Ranks that leave or start cannot stop as they should: they would disagree, or die.
        resize = self._resize
        if resize is None or not (resize.has_started or resize.leave_until_s is not None):
            return True
        limit_s = _START_JOINTLY_S if resize.request.is_joint else _START_S
        return resize.has_started and time.monotonic() >= resize.started_s + limit_s

    def _read_request(self) -> None:
        request = self._inbox.poll(time.monotonic())
        if request is None:
            return
        if self._resize is not None and self._resize.request.is_joint and not request.is_joint:
            # Its answer would replace that to the launcher.
            logger.warning("Resize to %s ignored: all replicas are being resized.", request.mesh)
            return
        if refusal := refusal_of(lambda: self._check_resize(request)):
            logger.warning("Resize to %s rejected: %s", request.mesh, refusal)
            self._inbox.answer(request, ResizeState.REJECTED, refusal)
            return
        if self._resize is not None:
            self._end_resize(ResizeState.REJECTED, f"{request.mesh} was requested since")
            self._end_surplus_spares()
        if request.mesh == self._mesh and not request.is_joint:
            self._inbox.answer(request, ResizeState.DONE)
            return
        until_s = time.monotonic() + _PREPARE_S
        self._resize = _Resize(request, former=self._mesh, prepare_until_s=until_s)
        self._inbox.answer(request, ResizeState.ACCEPTED)

    def _change_mesh(self, mesh: RunMesh) -> None:
        super()._change_mesh(mesh)
        self._failed_at_s = self._restart_at_s = time.monotonic()

    def _end_resize(self, state: ResizeState, reason: str = "") -> None:
        """Answer a request that is not followed any more."""
        assert self._resize is not None
        self._inbox.answer(self._resize.request, state, reason)
        self._resize = None

    def _decide(self, failure: Failure) -> RunResult:
        """Restart the training, or give up. A generation that fails before the first step of a new
        mesh returns to the former one, whose snapshots are the newest; that of a replica ends,
        because all replicas must return together."""
        assert failure.rank is not None
        resize, ends = self._resize, False
        if resize is not None and resize.has_started and not self._requests:
            self._end_resize(ResizeState.FAILED, failure.description)
            ends = resize.request.is_joint
            if not ends:
                text = "The resize has failed, %s: the run returns to %s."
                logger.error(text, failure.description, resize.former)
                self._change_mesh(resize.former)
                return RunResult(state=WorkerState.FAILED)
        elif resize is not None:
            # Its ranks are ordered to leave again, once they train again.
            resize.leave_until_s = None
        process, now_s = self._ranks[failure.rank], time.monotonic()
        has_ended = process.state is RankState.ENDED
        decision = None if has_ended else self._policy.failed(failure, now_s)
        if ends:
            decision = GiveUp("the launcher decides about the mesh of all replicas", failure)
        if decision is None or isinstance(decision, GiveUp) or self._requests:
            self.exit_status = failure.status or FAILED
            if isinstance(decision, GiveUp) and not ends:
                # The launcher does not repeat what this agent has tried.
                self.exit_status = decision.exit_status
            self._remaining_restarts = 0
            if process.error:
                process.exit(self.exit_status)
                self._end([process], now_s + EXIT_S, status=None)
            if decision is None:
                where = os.environ.get(RANK_LOGS)
                log = "" if where is None else f", see {rank_log(Path(where), failure.rank)}"
                logger.error(
                    "Training ends, %s: exit status %d%s.",
                    failure.description,
                    self.exit_status,
                    log,
                )
            else:
                is_final = isinstance(decision, GiveUp)
                why = decision.reason if is_final else "it was asked to stop"
                logger.error("Training ends, %s: %s.", failure.description, why)
        else:
            self._failed_at_s, self._restart_at_s = now_s, now_s + decision.delay_s
            logger.warning("Lost %s. The other ranks return to the last step.", failure.description)
        return RunResult(state=WorkerState.FAILED)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._resize is not None:
            self._end_resize(ResizeState.FAILED, "the run has ended")
        super()._shutdown(death_sig, timeout)

    def _generation_started(self) -> None:
        self._policy.started()

    def _made_progress(self) -> None:
        self._policy.made_progress(time.monotonic())
        if self._resize is not None and self._resize.has_started:
            if not self._resize.is_cancelled:
                self._inbox.answer(self._resize.request, ResizeState.DONE)
            self._resize = None

    def _generation(self) -> int:
        return UNLIMITED - self._remaining_restarts
