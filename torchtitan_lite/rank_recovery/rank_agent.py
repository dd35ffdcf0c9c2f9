"""The agent of a run on one machine alone: it decides about restarts, and resizes on request.

A resize restarts the training as after the loss of a rank: the processes that stay park, and build
the new mesh with the state that the snapshots in shared memory hold. Layer: above agent and
resize_request.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.launcher.restart_policy import Failure, GiveUp, RestartPolicy
from torchtitan_lite.launcher.supervised import RANK_LOGS, rank_log
from torchtitan_lite.log import logger
from torchtitan_lite.rank_recovery.agent import EXIT_S, UNLIMITED, AgentRendezvous, ProcessAgent
from torchtitan_lite.rank_recovery.rank_process import RankProcess, RankState
from torchtitan_lite.rank_recovery.resize_request import Outcome, RequestInbox, ResizeRequest
from torchtitan_lite.stores import listening_store

_ADDRESS = "127.0.0.1"
_LEAVE_S = 120.0
"""Time for the step after which the ranks leave the training."""


@dataclass
class _Resize:
    """A resize that has not been completed."""

    request: ResizeRequest
    former: ResizeRequest
    """The mesh before."""
    leave_until_s: float | None = None
    """When the ranks must have left the training; None before they are ordered to."""
    has_started: bool = False


def _join_alone() -> RendezvousInfo:
    """Return a new store for each attempt, on a port that the kernel chooses; the earlier one
    closes with its last reference.

    torch's static rendezvous keeps one store, in which a second attempt finds the addresses of the
    first (2.13)."""
    store = listening_store(_ADDRESS)
    return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_ADDRESS, store.port))


class RankAgent(ProcessAgent):
    """Runs the ranks of a run on this machine alone."""

    def __init__(
        self,
        start_process: Callable[[], RankProcess],
        num_ranks: int,
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
        super().__init__(
            start_process, num_ranks, num_spares, rendezvous=rendezvous, requests=requests
        )
        self._policy, self._inbox, self._check_resize = policy, inbox, check_resize
        self._mesh = ResizeRequest(num_ranks=num_ranks)
        """The mesh of the present attempt."""
        self._resize: _Resize | None = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state is not WorkerState.HEALTHY:
            return result
        if self._resize is None and not self._requests:
            self._read_request()
        if self._resize is None or self._resize.has_started:
            return result
        # Processes that start import everything while the others train.
        missing = self._resize.request.num_ranks - len(self._ranks)
        while len(self._spares) < missing:
            self._spares.append(self._start_process())
        if sum(one.state is RankState.PARKED for one in self._spares) < missing:
            return result
        if self._resize.leave_until_s is None:
            self._resize.leave_until_s = time.monotonic() + _LEAVE_S
            for process in self._ranks.values():
                process.leave_training()
        has_left = all(one.state is RankState.PARKED for one in self._ranks.values())
        if not has_left and time.monotonic() < self._resize.leave_until_s:
            return result
        # Ranks that have not left are aborted.
        self._resize.has_started = True
        self._change_mesh(self._resize.request)
        logger.warning("Resizing from %s to %s.", self._resize.former, self._resize.request)
        return RunResult(state=WorkerState.UNHEALTHY)

    def _may_forward(self) -> bool:
        # Ranks that leave or start cannot stop as they should: they would disagree, or die.
        return self._resize is None or (
            self._resize.leave_until_s is None and not self._resize.has_started
        )

    def _read_request(self) -> None:
        request = self._inbox.poll(time.monotonic())
        if request is None:
            return
        try:
            self._check_resize(request)
        except ConfigError as error:
            logger.warning("Resize to %s rejected: %s", request, error)
            self._inbox.answer(request, Outcome.REJECTED, str(error))
        else:
            self._inbox.answer(request, Outcome.ACCEPTED)
            self._resize = _Resize(request, former=self._mesh)

    def _change_mesh(self, mesh: ResizeRequest) -> None:
        """Let the next attempt have another mesh."""
        self._mesh = mesh
        self._worker_group.spec.local_world_size = mesh.num_ranks
        self._changed_arguments = mesh.arguments
        self._failed_at_s = self._restart_at_s = time.monotonic()

    def _end_resize(self, outcome: Outcome, reason: str = "") -> None:
        assert self._resize is not None
        self._inbox.answer(self._resize.request, outcome, reason)
        self._resize = None

    def _decide(self, failure: Failure) -> RunResult:
        """Restart the training, or give up. An attempt that fails before the first step of a new
        mesh returns to the former one, whose snapshots are the newest."""
        assert failure.rank is not None
        if self._resize is not None and self._resize.has_started and not self._requests:
            logger.error(
                "The resize has failed, %s: the run returns to %s.",
                failure.description,
                self._resize.former,
            )
            self._change_mesh(self._resize.former)
            self._end_resize(Outcome.FAILED, failure.description)
            return RunResult(state=WorkerState.FAILED)
        if self._resize is not None:
            # Its ranks are ordered to leave again, once they train again.
            self._resize.leave_until_s = None
        process, now_s = self._ranks[failure.rank], time.monotonic()
        has_ended = process.state is RankState.ENDED
        decision = None if has_ended else self._policy.attempt_failed(failure, now_s)
        if decision is None or isinstance(decision, GiveUp) or self._requests:
            self.exit_status = failure.status or 1
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

    def _attempt_started(self) -> None:
        self._policy.attempt_started()

    def _made_progress(self) -> None:
        self._policy.made_progress(time.monotonic())
        if self._resize is not None and self._resize.has_started:
            self._end_resize(Outcome.DONE)

    def _attempt(self) -> int:
        return UNLIMITED - self._remaining_restarts
