"""Fault-tolerant replicas: the quorum of each step, healing, and the vote to commit.

One step of a replica: while the previous step is logged and its snapshot taken, the quorum of the
next one is formed; a lagging replica heals from an up-to-date one; the samples are divided over the
participants; gradients are reduced; all ranks vote on whether the reduction succeeded.

Progress is the position in the global order of samples, which advances with every committed or
skipped step. It takes the place of torchft's step, so that a step skipped for its numbers counts as
progress of all replicas.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchtitan_lite.checkpoint.background import SINGLE_REPLICA, WriterGroup
from torchtitan_lite.config.tables.fault_tolerance import FaultToleranceConfig
from torchtitan_lite.core.errors import ReplicaError
from torchtitan_lite.core.events import StepEvent
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.outputs import PARTICIPATES, RECEIVES_STATE
from torchtitan_lite.core.phases import Phase, Phases
from torchtitan_lite.distributed.host_collectives import broadcast_bytes
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.rpc.state_client import PeerEndpoint
from torchtitan_lite.fault_tolerance.replica.fencing import Fence
from torchtitan_lite.fault_tolerance.replica.gradient_reducer import GradientReducer
from torchtitan_lite.fault_tolerance.replica.healing import HealingTransport, HealSource
from torchtitan_lite.fault_tolerance.replica.healing.client import IncompatibleState, receive_state
from torchtitan_lite.fault_tolerance.replica.healing.live_state import HealableState
from torchtitan_lite.fault_tolerance.replica.participation import LeaveRequested, Share
from torchtitan_lite.fault_tolerance.replica.quorum_checks import ProgressFloor
from torchtitan_lite.fault_tolerance.replica.torchft_manager import (
    QuorumManager,
    same_device_in_thread,
)

_MAX_ABORTED_STEPS = 20
"""Consecutive aborted steps, except those in which replicas joined or left."""
_MAX_HEALS = 5
"""Consecutive attempts to heal."""
_POLL_S = 0.5
_CHECK_INTERVAL_S = 5.0
"""Interval at which a waiting replica checks for a stop request and for newer checkpoints."""
_BEHIND_AFTER_S = 30.0
"""Time for which the lighthouse must have answered without interruption before a newer checkpoint
ends a waiting replica. After a cut of the network, the replicas that wrote it are about to return,
and it heals from them."""


class FaultTolerantReplicas:
    """This replica among the others. See `participation.Replicas`."""

    def __init__(
        self,
        config: FaultToleranceConfig,
        state: HealableState,
        mesh: Mesh,
        *,
        manager: QuorumManager,
        transport: HealingTransport,
        floor: ProgressFloor,
        fence: Fence | None,
        endpoint: Callable[[str], PeerEndpoint],
        newest_stored_step: Callable[[], int],
        wait_until_modifiable: Callable[[], None],
        leave: Callable[[str], None],
        stop_requested: Callable[[], bool],
        initial_stored_step: int,
        phases: Phases,
    ) -> None:
        """Use `join`. `fence` decides on the leader whether a quorum may continue the run;
        `endpoint` maps a peer's URL to its endpoint; `newest_stored_step` returns the newest step
        of the run in storage, as the leader sees it; `wait_until_modifiable` blocks until the state
        may be modified; `leave` notifies the lighthouse that the replica with this id leaves;
        `stop_requested` returns whether this process must stop; `initial_stored_step` is the newest
        step in storage when this replica restored its state."""
        self._config, self._state, self._mesh = config, state, mesh
        self._manager, self._transport, self._floor = manager, transport, floor
        self._fence, self._alone = fence, SINGLE_REPLICA
        self._endpoint, self._newest_stored_step = endpoint, newest_stored_step
        self._wait_until_modifiable, self._leave = wait_until_modifiable, leave
        self._has_left = False
        self._stop_requested, self._initial_stored_step = stop_requested, initial_stored_step
        self._phases = phases
        self._reducer = GradientReducer(manager, config.bucket_mib << 20)
        self._quorum_executor = ThreadPoolExecutor(1, "quorum", initializer=same_device_in_thread())
        self._pending_quorum: Future[None] | None = None
        self._has_valid_state = True
        self._was_rolled_back = False
        """Whether the run was rolled back since the last quorum."""
        self._quorum_id: int | None = None
        self._reported = "", 0.0
        """The last reason for which there was no quorum, and when it was logged."""
        self._num_aborted = 0
        self._num_heals = 0
        self._is_first_step = False
        """Whether the current step is the first of this quorum."""
        self._is_complete = True
        """Whether the reduction of the last step succeeded on all ranks."""
        self._has_decided_to_keep = False
        """Whether it was decided whether gradients are kept."""
        self._has_healed = False
        """Whether this replica healed for the current step."""
        self._events: list[StepEvent] = []
        self._writer_group = SINGLE_REPLICA

    def _request_quorum(self) -> None:
        """Start to form a quorum."""
        self._manager.set_progress(self._progress)
        self._pending_quorum = self._quorum_executor.submit(self._manager.start_quorum)

    def agree(self) -> Share:
        started_s, has_warned, waits_for = time.monotonic(), False, ""
        while True:
            if self._pending_quorum is None:
                self._request_quorum()
            assert self._pending_quorum is not None
            request, self._pending_quorum = self._pending_quorum, None
            if not self._wait_for_quorum(request, started_s):
                continue
            count, fewest = self._manager.num_participants(), self._config.min_replica_size
            if count < fewest:
                if not has_warned:
                    logger.warning("Quorum of %d replicas, %d are required.", count, fewest)
                has_warned = True
                self._check_timeout(started_s, "too few replicas joined")
                time.sleep(_POLL_S)
                continue
            if reason := self._reason_to_wait():
                self._check_timeout(started_s, reason)
                if reason != waits_for:
                    logger.warning("This quorum does not train yet: %s.", reason)
                waits_for = reason
                continue
            if self._join_quorum():
                self._writer_group = self._quorum_writers()
                return self._share()

    def _wait_for_quorum(self, request: Future[None], since_s: float) -> bool:
        """Wait until the quorum is formed, and return whether it succeeded. The request blocks
        while there are too few replicas or the lighthouse is down; if it fails, it fails on all
        ranks, and all repeat it."""
        check_at_s = time.monotonic() + _CHECK_INTERVAL_S
        while not wait([request], _POLL_S).done:
            self._check_timeout(since_s, "the lighthouse does not answer")
            if time.monotonic() >= check_at_s:
                check_at_s += _CHECK_INTERVAL_S
                self._report_waiting(f"requested {time.monotonic() - since_s:.0f} s ago")
        try:
            request.result()
            return True
        except ReplicaError:
            raise
        except Exception as caught:
            error = str(caught)
        self._manager.forget_failed_quorum()
        self._check_timeout(since_s, error)
        self._report_waiting(f"requesting again: {error}")
        return False

    def _report_waiting(self, why: str) -> None:
        """Log why there is no quorum yet. Raises ReplicaError on the leader if storage holds a
        newer step, and the replicas that wrote it do not return."""
        if self._manager.connected_s() >= _BEHIND_AFTER_S:
            self._check_not_behind_storage(self._newest_stored_step())
        # A call that fails at once fails ten times per second.
        now_s, (before, reported_s) = time.monotonic(), self._reported
        if why != before or now_s - reported_s >= _CHECK_INTERVAL_S:
            self._reported = why, now_s
            logger.warning("No quorum yet, %s.", why)

    def _check_timeout(self, since_s: float, reason: str) -> None:
        """Check for a stop request and for the time limit. Raises LeaveRequested or
        ReplicaError."""
        waited_s = time.monotonic() - since_s
        if waited_s >= _CHECK_INTERVAL_S and self._stop_requested():
            raise LeaveRequested
        if waited_s >= self._config.quorum_timeout_s:
            raise ReplicaError(
                f"No quorum of at least {self._config.min_replica_size} replicas formed within "
                f"fault_tolerance.quorum_timeout_s = {self._config.quorum_timeout_s:g} seconds: "
                f"{reason}"
            )

    def _reason_to_wait(self) -> str:
        """Return why a new quorum may not continue the run yet; empty if it may. Raises
        ReplicaError on all ranks if this replica may never."""
        quorum = self._manager.quorum
        if quorum.quorum_id == self._quorum_id:
            return ""
        outcome: dict[str, Any] = {}
        if self._fence is not None:
            try:
                reason = self._fence.admit(
                    quorum_id=quorum.quorum_id,
                    lighthouse=quorum.lighthouse,
                    members=quorum.replica_ids,
                    own_id=self._manager.full_id,
                    tokens=quorum.tokens,
                )
                outcome = {
                    "wait": reason,
                    "token": self._fence.token,
                    "is_claimed": self._fence.is_claimed,
                }
            except ReplicaError as error:
                outcome = {"end": str(error)}
        outcome = json.loads(broadcast_bytes(json.dumps(outcome).encode()))
        if "end" in outcome:
            raise ReplicaError(outcome["end"])
        self._alone = WriterGroup(fencing_token=outcome["token"], is_claimed=outcome["is_claimed"])
        return outcome["wait"]

    def _abort_if_superseded(self) -> None:
        """Abort this step if another quorum has taken the run over."""
        if self._fence is not None and self._fence.is_superseded():
            self._manager.abort_step("other replicas have taken the run over")

    def _join_quorum(self) -> bool:
        """Prepare for the first step of a new quorum, and return whether all ranks of this replica
        succeeded."""
        manager, source = self._manager, self._transport.source
        self._transport.source = None
        self._is_first_step = manager.quorum.quorum_id != self._quorum_id
        self._has_healed = source is not None
        if not self._is_first_step and not manager.quorum.heal:
            return True
        self._quorum_id = manager.quorum.quorum_id
        problem = manager.errored()
        error: Exception | None = None if problem is None else problem.original_exception
        if error is None and source is not None:
            error = self._heal(source)
        failed = self._mesh.any(error is not None)
        if manager.quorum.heal:
            # If one rank failed to heal, the state of the others is of no use.
            self._has_valid_state = not failed
        if failed:
            self._decline_quorum(error)
            return False
        stored = self._mesh.broadcast_int(self._newest_stored_step())
        if self._was_rolled_back:
            # Steps stored before the rollback belong to the abandoned history, so they do not count
            # as newer.
            self._initial_stored_step, self._was_rolled_back = (
                max(self._initial_stored_step, stored),
                False,
            )
        self._check_not_behind_storage(stored)
        self._num_heals = 0
        count = manager.num_participants()
        logger.info("%s %d on: %d.", PARTICIPATES, self._state.cursor, count)
        self._events.append(StepEvent("quorum", {"sample": self._state.cursor, "replicas": count}))
        return True

    def _heal(self, source: HealSource) -> ReplicaError | None:
        """Heal from a peer. Return the error if it failed."""
        logger.info("%s, at sample %d.", RECEIVES_STATE, source.progress)
        with self._phases.enter(Phase.HEALING):
            self._wait_until_modifiable()
            started_s = time.perf_counter()
            try:
                receive_state(self._endpoint(source.url), source.progress, self._state)
            except ReplicaError as error:
                return error
        values = {"sample": source.progress, "seconds": time.perf_counter() - started_s}
        self._events.append(StepEvent("healed", values))
        return None

    def _decline_quorum(self, error: Exception | None) -> None:
        """Abort the steps of this quorum. Raises ReplicaError if another attempt would fail in the
        same way."""
        reason = "another rank of this replica could not join" if error is None else str(error)
        self._manager.abort_step(reason)
        self._manager.should_commit()
        self._report_aborted(reason)
        self._num_heals += 1
        if self._mesh.any(isinstance(error, IncompatibleState)) or self._num_heals == _MAX_HEALS:
            raise ReplicaError(f"This replica cannot join the quorum: {reason}")

    def _share(self) -> Share:
        index = self._manager.participating_rank()
        count = self._manager.num_participants()
        return Share(
            index=-1 if index is None else index,
            count=count,
            one_batch_per_replica=self._config.world_size_mode == "dynamic",
        )

    @property
    def keeps_gradients(self) -> bool:
        return self._reducer.keeps_gradients

    def exchange_kept_work(self, share: Share, computed: Callable[[], Sequence[bool]]) -> Share:
        if self._config.keep_gradients == "off" or not self._config.can_keep_gradients:
            return share
        if not self._has_decided_to_keep:
            self._reducer.keeps_gradients = self._decide_to_keep()
        # An aborted step always leads to a new quorum. Others need not wait for one that heals.
        if not (self._is_first_step and self._manager.quorum.follows_aborted_step):
            return share
        is_computed = [False] * len(computed()) if self._has_healed else computed()
        own = torch.tensor([*map(float, is_computed)], dtype=torch.float64)
        counts = torch.cat([own, own * share.index]).to(self._mesh.device.torch_device)
        self._manager.all_reduce_sum(counts).wait()
        # The copy waits for the device, and only then an error is known.
        summed = counts.round().int().tolist()
        if self._mesh.any(self._manager.errored() is not None):
            # This step will be aborted, too.
            return share
        # If the sum has failed on some ranks without an error, they agree all the same.
        num_owners, indices = json.loads(
            broadcast_bytes(json.dumps([summed[: len(own)], summed[len(own) :]]).encode())
        )
        if max(num_owners) != 1:
            return share
        owners = (index if num else -1 for num, index in zip(num_owners, indices, strict=True))
        return replace(share, owners=tuple(owners))

    def _decide_to_keep(self) -> bool:
        """Return whether all ranks of this replica have memory for a second copy of their
        gradients, whose size is not known before the first step."""
        needed, free = self._reducer.num_bytes, self._mesh.device.free_memory_bytes()
        self._has_decided_to_keep = self._mesh.any(needed > 0)
        is_full = self._mesh.any(2 * needed > free)
        return self._has_decided_to_keep and (not is_full or self._config.keep_gradients == "on")

    @property
    def always_commits(self) -> bool:
        return False

    @property
    def writer_group(self) -> WriterGroup:
        return self._writer_group

    def _quorum_writers(self) -> WriterGroup:
        quorum = self._manager.quorum
        named = " ".join([*sorted(quorum.replica_ids), str(quorum.quorum_id)])
        token = hashlib.blake2b(named.encode(), digest_size=6).hexdigest()
        return replace(
            self._alone, index=quorum.replica_rank, count=quorum.replica_world_size, token=token
        )

    def _check_not_behind_storage(self, stored: int) -> None:
        """Raise ReplicaError if storage holds a newer step than this replica."""
        if stored > max(self._state.step, self._initial_stored_step):
            raise ReplicaError(
                f"Step {stored} of this run is in storage, but the replicas of this quorum are at "
                f"step {self._state.step}. This replica leaves without training: restart it to "
                "resume from the newest checkpoint."
            )

    def reduce_during_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        self._reducer.reduce_during_backward(parameters)

    def reduce(self, parameters: Sequence[nn.Parameter], counts: torch.Tensor) -> None:
        self._reducer.reduce(parameters, counts)

    def should_commit(self, num_ranks: float, cursor_sum: float, step_sum: float) -> bool:
        manager, state = self._manager, self._state
        wanted = manager.quorum.replica_world_size * self._mesh.world_size
        if manager.errored() is not None:
            manager.abort_step("the reduction over replicas failed")
        elif (num_ranks, cursor_sum) != (wanted, wanted * float(state.cursor)):
            manager.abort_step("a rank was at another position in the data")
        elif step_sum != wanted * float(state.step):
            # One replica decided differently about a step, although the positions in the data are
            # equal.
            manager.abort_step("a rank was at another step at the same position in the data")
            self._has_valid_state = manager.participating_rank() == 0
        self._abort_if_superseded()
        committed = self._is_complete = manager.should_commit()
        # A replica that joins and cannot take part leaves by itself, and must not end the others.
        self._record_outcome("steps", committed=committed, is_excused=self._is_first_step)
        return committed

    def _record_outcome(self, kind: str, *, committed: bool, is_excused: bool = False) -> None:
        """Record whether a step or an average was committed. Raises ReplicaError after too many
        consecutive failures, not counting excused ones."""
        if committed:
            self._num_aborted = 0
            return
        problem = self._manager.errored()
        reason = str(problem.original_exception) if problem else "another rank aborted it"
        self._report_aborted(reason)
        self._num_aborted += not is_excused
        if self._num_aborted == _MAX_ABORTED_STEPS:
            raise ReplicaError(
                f"{_MAX_ABORTED_STEPS} consecutive {kind} with the other replicas failed, the last "
                f"because {reason}"
            )

    def finish_step(self, *, committed: bool, is_last: bool) -> None:
        # The gradients of a skipped step are of no use.
        self._reducer.end_step(restores=not self._is_complete)
        if not is_last:
            self._request_quorum()

    def all_reduce(self, counts: torch.Tensor) -> bool:
        self._manager.all_reduce_sum(counts).wait()
        return not self._mesh.any(self._manager.errored() is not None)

    def after_rollback(self, *, is_source: bool) -> None:
        self._has_valid_state, self._was_rolled_back = is_source, True

    def events(self) -> list[StepEvent]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        self._quorum_executor.shutdown(wait=False, cancel_futures=True)
        self._manager.shutdown(wait=False)
        if self._mesh.is_leader:
            self._leave(self._manager.full_id)

    @property
    def _progress(self) -> int:
        """Position of the state that this replica can train from or donate; 0 if it has none."""
        if not self._has_valid_state:
            return 0
        self._floor.raise_to(self._state.cursor)
        return self._state.cursor

    def _report_aborted(self, reason: str) -> None:
        reason = reason.partition("This is typically")[0].strip()
        logger.warning("Step aborted: %s", reason)
        self._events.append(StepEvent("step_failed", {"reason": reason}))
