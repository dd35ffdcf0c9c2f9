"""torchft's manager with this project's quorum checks and error handling. The only module that uses
private parts of torchft's manager (0.2.0).

Healing is only noted here; the main thread fetches the state once nothing reads the old one.
torchft would load it in the thread that requests the quorum.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft.manager
from torchft.checkpointing import CheckpointTransport
from torchft.manager import REPLICA_ID_KEY, Manager, WorldSizeMode, extract_trailing_digits
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL
from torchft.work import _DummyWork

from torchtitan_lite.config.tables.fault_tolerance import FaultToleranceConfig
from torchtitan_lite.core.outputs import quorum_name
from torchtitan_lite.distributed.network import connections, cut_connections, seconds_since_data
from torchtitan_lite.distributed.torch_compat import gloo_group
from torchtitan_lite.fault_tolerance.replica.lighthouse_link import (
    AuthenticatedLighthouse,
)
from torchtitan_lite.fault_tolerance.replica.quorum_checks import (
    ProgressFloor,
    check_compatibility,
    check_descriptors,
    replica_id_for,
)
from torchtitan_lite.fault_tolerance.replica.replica_server import (
    CoordinatorClient,
    ReplicaIdentity,
    ReplicaServer,
)

_WATCH_INTERVAL_S = 0.1
_SLOW_LINK_S = 2.0
"""Time without data after which a member that sends no heartbeats is not merely slow."""
_CONNECT_S = 5.0
"""Time limit of a connection between the process groups of a quorum. gloo waits up to five times as
long for a member that does not connect (2.13)."""
_construction = threading.Lock()
_ABORT_POLL_S = 0.5
_ABORTED_S = 1.0
"""Time in which a reduction fails by itself after its group was aborted."""
_KEPT_S = 5.0


class QuorumManager(Manager):
    """Manager that checks its quorums before they are used, and exposes them.

    Its `step` is the run's progress, set by `set_progress` before each quorum.
    """

    full_id: str
    """Id of this process of the replica at the lighthouse: its name, its fingerprint and a UUID."""

    def __init__(
        self,
        config: FaultToleranceConfig,
        transport: CheckpointTransport[Any],
        floor: ProgressFloor,
        *,
        run_id: str,
        config_fingerprint: str,
        lighthouse: str,
        secret: str,
        store: tuple[str, int],
        rank: int,
        world_size: int,
        address: str,
        fencing_token: Callable[[], int] = lambda: 0,
    ) -> None:
        """`run_id` is needed on rank 0; `config_fingerprint` identifies the settings that all
        replicas must share, and contains no colon; `secret` is that of all replicas; `store` is the
        address of this replica's TCPStore; `address` is that of the interface to the other
        replicas; `fencing_token` returns the last token under which this replica took part, on the
        leader. Raises ReplicaError if `lighthouse` does not answer within `quorum_timeout_s`."""
        _silence_torchft_loggers()
        timeout = timedelta(milliseconds=config.process_group_timeout_ms)
        group: ProcessGroup = (
            ProcessGroupNCCL(timeout=timeout)
            if config.process_group == "nccl"
            else _GlooAtAddress(address, timeout)
        )

        def serve(*, replica_id: str, store_addr: str, **unused: Any) -> _ManagerServer:
            identity = ReplicaIdentity(run_id, replica_id, store_addr, world_size)
            link = AuthenticatedLighthouse
            if config.lighthouse == "torchft":
                # It needs gRPC, whose import the others save.
                from torchtitan_lite.fault_tolerance.replica.torchft_lighthouse import (
                    TorchftLighthouse as link,
                )
            coordinator = ReplicaServer(
                identity, lambda: link(lighthouse, secret, run_id), secret=secret, host=address
            )
            coordinator.start(config.quorum_timeout_s)
            return _ManagerServer(coordinator)

        def call(server_address: str, **unused: Any) -> CoordinatorClient:
            # Rank 0 has stored it. Read once: after an abort, the store is out of reach.
            self.full_id = self._store.get(REPLICA_ID_KEY).decode()
            return CoordinatorClient(server_address, secret, self.full_id)

        self._group_lock = threading.Lock()
        """Held while a broken quorum is compared with the current one."""
        self._broken_id: int | None = None
        """Id of the last quorum that broke."""
        with _replaced_server_and_client(serve, call):
            super().__init__(
                pg=group,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=config.min_replica_size,
                use_async_quorum=False,
                timeout=timeout,
                quorum_timeout=timedelta(seconds=config.quorum_timeout_s),
                connect_timeout=timeout,
                rank=rank,
                world_size=world_size,
                world_size_mode=(
                    WorldSizeMode.FIXED_WITH_SPARES
                    if config.world_size_mode == "fixed_with_spares"
                    else WorldSizeMode.DYNAMIC
                ),
                store_addr=store[0],
                store_port=store[1],
                lighthouse_addr=lighthouse,
                # torchft orders the participants by these ids.
                replica_id=replica_id_for(quorum_name(config.replica_id), config_fingerprint),
                hostname=address,
                checkpoint_transport=transport,
                init_sync=False,
            )
        self.group = group
        self._floor, self._config_fingerprint = floor, config_fingerprint
        self._fencing_token = fencing_token
        self._ranks_client: Any = self._client
        """The same `CoordinatorClient`, with its own methods."""
        self._last_quorum: Any = None
        self._is_shut_down = False
        self._watcher = threading.Thread(target=self._watch, name="quorum watcher", daemon=True)

    @property
    def quorum(self) -> Any:
        """Last quorum, with the fields of `quorum_for_rank`."""
        return self._last_quorum

    def connected_s(self) -> float:
        """Return for how long the lighthouse has answered without interruption, on rank 0; 0 on
        the other ranks."""
        server: Any = self._manager
        return 0.0 if server is None else server.coordinator.connected_s()

    def set_progress(self, progress: int) -> None:
        """Set the progress of this replica's state; 0 if it has no valid state."""
        self.load_state_dict({"step": progress, "batches_committed": 0})

    def _async_quorum(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, allow_heal: bool, shrink_only: bool, quorum_timeout: timedelta, curr_device: int
    ) -> None:
        """Request a quorum and connect to its replicas. In place of torchft's, which fetches the
        state of the donor here, and asks the donor's manager for its address."""
        if curr_device >= 0:
            torch.accelerator.set_device_index(curr_device)
        quorum = self._ranks_client._quorum(
            group_rank=self._group_rank,
            step=self._step,
            checkpoint_metadata=self._checkpoint_transport.metadata(),
            shrink_only=shrink_only,
            timeout=quorum_timeout,
            # The process group of a broken quorum is gone, even if its last step was committed.
            commit_failures=max(self._commit_failures, int(self._broken_id == self._quorum_id)),
            init_sync=False,
            token=self._fencing_token(),
        )
        check_compatibility(self._config_fingerprint, quorum)
        self._floor.check(quorum.max_step)
        is_new = self._last_quorum is None or quorum.quorum_id != self._last_quorum.quorum_id
        if is_new:
            check_descriptors()
        self._last_quorum = quorum
        self._participating_replica_rank = quorum.replica_rank
        self._participating_replica_world_size = quorum.replica_world_size
        if self._replica_world_size_mode == WorldSizeMode.FIXED_WITH_SPARES:
            self._participating_replica_world_size = min(
                quorum.replica_world_size, self._min_replica_size
            )
            if quorum.replica_rank >= self._min_replica_size:
                self._participating_replica_rank = None
        if is_new:
            with self._group_lock:
                self._quorum_id = quorum.quorum_id
            if not self._watcher.is_alive():
                self._watcher.start()
            try:
                self._connect(quorum)
                with self._group_lock:
                    if self._broken_id == quorum.quorum_id:
                        self.group.abort()
                        raise RuntimeError("The quorum broke while its replicas connected.")
            except Exception as error:
                self.report_error(error)
                return
        if quorum.recover_dst_replica_ranks:
            self._checkpoint_transport.send_checkpoint(
                dst_ranks=quorum.recover_dst_replica_ranks,
                step=quorum.max_step,
                state_dict={},
                timeout=self._timeout,
            )
        if quorum.heal:
            self._checkpoint_transport.recv_checkpoint(
                src_rank=quorum.recover_src_replica_rank,
                metadata=quorum.state_url,
                step=quorum.max_step,
                timeout=self._timeout,
            )
            self._step = quorum.max_step

    def _connect(self, quorum: Any) -> None:
        """Connect the process group of a new quorum."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        numbers = [
            extract_trailing_digits(replica_id.partition(":")[0])
            for replica_id in quorum.replica_ids
        ]
        self._pg.configure(
            f"{quorum.store_address}/torchft/{quorum.quorum_id}/{self._group_rank}",
            self._replica_id or "0",
            quorum.replica_rank,
            quorum.replica_world_size,
            quorum.quorum_id,
            self._group_rank,
            self._group_world_size,
            [number * self._group_world_size + self._group_rank for number in numbers],
        )

    def _watch(self) -> None:
        """Abort the process group of each quorum that the coordinator reports as broken."""
        while not self._is_shut_down:
            quorum_id = self._quorum_id
            if quorum_id == self._broken_id:
                time.sleep(_WATCH_INTERVAL_S)
                continue
            is_broken = bool(self._ranks_client.wait_until_broken(quorum_id))
            # On a slow link the gradients may delay the heartbeats; then the step still succeeds.
            while is_broken and quorum_id == self._quorum_id and self._receives_data():
                time.sleep(_WATCH_INTERVAL_S)
            with self._group_lock:
                if is_broken and quorum_id == self._quorum_id:
                    # What waits for the other replicas fails now. A group that is still connecting
                    # is aborted afterwards.
                    self._broken_id = quorum_id
                    self.group.abort()

    def _receives_data(self) -> bool:
        """Return whether another member of the process group sends data."""
        group = self.group
        return isinstance(group, _GlooAtAddress) and group.seconds_since_data() < _SLOW_LINK_S

    def shutdown(self, wait: bool = True) -> None:
        self._is_shut_down = True
        super().shutdown(wait=wait)
        self._ranks_client.close()

    def forget_failed_quorum(self) -> None:
        """Discard the exception of a failed quorum, which torchft would raise again at the next
        request."""
        self._quorum_future = None

    def is_participating(self) -> bool:
        """Return true also for a spare: it has no samples and contributes zeros by itself, but its
        counts and its vote matter."""
        return True

    def all_reduce_sum(self, flat: torch.Tensor) -> "PendingReduction":
        """Start to sum `flat` over the participants, in place."""
        return self._started(flat, dist.ReduceOp.SUM)

    def all_reduce_max(self, flat: torch.Tensor) -> "PendingReduction":
        """Start to compute the maximum of `flat` over the participants, in place."""
        return self._started(flat, dist.ReduceOp.MAX)

    def _started(self, flat: torch.Tensor, reduce_op: Any) -> "PendingReduction":
        work = self.allreduce(flat, reduce_op=reduce_op)
        if isinstance(self.group, _GlooAtAddress):
            return PendingHostReduction(self, work, self.group)
        return PendingReduction(work, blocks_host=not isinstance(self.group, ProcessGroupNCCL))

    def abort_step(self, reason: str) -> None:
        """Abort this step, here and at once in all other replicas."""
        if self.errored() is None:
            self.report_error(RuntimeError(reason))
        self.group.abort()


class PendingReduction:
    """Reduction in progress. Failures are reported by the manager."""

    def __init__(self, work: dist.Work, *, blocks_host: bool = True) -> None:
        """`blocks_host`: whether `wait` blocks this thread, not only a stream of the device."""
        self._work, self._blocks_host = work, blocks_host
        on_device = torch.accelerator.is_available()
        self._stream = torch.accelerator.current_stream() if on_device else None

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        if not self._blocks_host:
            # Independent of time, so that all ranks issue the collectives of all their NCCL groups
            # in one order: different orders can deadlock.
            return True
        inner = self._inner()
        return inner is None or inner.is_completed()

    def _inner(self) -> Any:
        """Return the work of the process group; None after an error. torchft's works wrap it, and
        do not know whether it is completed."""
        inner: Any = self._work
        while inner is not None and hasattr(inner, "_work"):
            inner = inner._work
        return None if isinstance(inner, _DummyWork) else inner

    def wait(self) -> None:
        """Wait; on a device, make its current stream wait. Never raises."""
        if self._stream is None:
            self._work.wait()
            return
        # torchft expects the wait on the stream of the call, which in backward is FSDP's.
        here = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self._stream)
        try:
            self._work.wait()
        finally:
            torch.accelerator.set_stream(here)
        here.wait_stream(self._stream)


class PendingHostReduction(PendingReduction):
    """Reduction by gloo, whose wait ends soon after its group was aborted, also if a thread of gloo
    does not notice it."""

    def __init__(self, manager: QuorumManager, work: dist.Work, group: "_GlooAtAddress") -> None:
        super().__init__(work)
        self._manager, self._group, self._num_aborts = manager, group, group.num_aborts

    def wait(self) -> None:
        """Wait. Never raises."""
        inner = self._inner()
        while inner is not None and not inner.is_completed():
            is_aborted = self._group.num_aborts != self._num_aborts
            with suppress(RuntimeError):
                # Its error is reported below; it raises at the time limit, too.
                inner.wait(timedelta(seconds=_ABORTED_S if is_aborted else _ABORT_POLL_S))
            if is_aborted and not inner.is_completed():
                self._manager.report_error(RuntimeError("the process group was aborted"))
                return
        super().wait()


def same_device_in_thread() -> Callable[[], None]:
    """Return an initializer that makes a new thread use the device of this one."""
    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)


class _ManagerServer:
    """Coordinator with the methods of torchft's ManagerServer that its manager calls."""

    def __init__(self, coordinator: ReplicaServer) -> None:
        self.coordinator = coordinator

    def address(self) -> str:
        return self.coordinator.address

    def shutdown(self) -> None:
        self.coordinator.stop()


@contextmanager
def _replaced_server_and_client(server: Any, client: Any) -> Iterator[None]:
    """Replace the names by which torchft's manager creates its server and its client, as torchft's
    own tests do: 0.2.0 has no other way."""
    with _construction:
        before = torchft.manager.ManagerServer, torchft.manager.ManagerClient
        torchft.manager.ManagerServer, torchft.manager.ManagerClient = server, client
        try:
            yield
        finally:
            torchft.manager.ManagerServer, torchft.manager.ManagerClient = before


class _GlooAtAddress(ProcessGroupGloo):
    """torchft's gloo group, listening at one address. torchft's listens at that of the host name,
    which may be a loopback address."""

    def __init__(self, address: str, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        self._address = address
        self._connections: set[int] = set()
        self.num_aborts = 0

    def abort(self, errored: bool = True) -> None:
        self.num_aborts += 1
        # gloo's own abort does not wake a collective that waits (torch 2.13).
        cut, self._connections = self._connections, set()
        cut_connections(cut)
        # The end of a group waits for its threads, and sometimes one of them does not notice that
        # its connection is closed, and waits for the time limit of a collective. So the last
        # reference is not that of a thread that trains.
        threading.Thread(target=_keep, args=(self._pg,), name="ended group", daemon=True).start()
        super().abort(errored)

    def seconds_since_data(self) -> float:
        """Return the seconds since this rank received data from another member."""
        return seconds_since_data(self._connections)

    def _create_pg(self, store: Any, rank: int, world_size: int) -> dist.ProcessGroup:
        before = connections()
        group = gloo_group(
            store,
            rank,
            world_size,
            address=self._address,
            # Members that are gone must not block the others for the time limit of a collective.
            connect_timeout=min(self._timeout, timedelta(seconds=_CONNECT_S)),
            timeout=self._timeout,
        )
        # Another thread may have opened one meanwhile, for a call that it repeats if it is cut.
        self._connections = connections() - before
        return group


def _keep(group: object) -> None:
    """Keep a group until no other thread is in one of its methods."""
    del group  # Only in this frame; the thread has the reference.
    time.sleep(_KEPT_S)


def _silence_torchft_loggers() -> None:
    """Silence torchft's Python loggers, whose eight lines per step duplicate the metrics."""
    for name in ("torchft", "torchft.manager", "torchft_quorums", "torchft_commits"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("torchft.manager", "torchft_errors"):
        # Errors are logged where they are handled.
        logging.getLogger(name).setLevel(logging.CRITICAL)
