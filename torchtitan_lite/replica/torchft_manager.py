"""torchft's manager with this project's quorum checks and error handling, and the filter of
torchft's logs. The only module that uses private parts of torchft's manager (0.2.0). Layer: above
quorum_checks.

Healing is only noted here; the main thread fetches the state once nothing reads the old one.
torchft would load it in the thread that requests the quorum.
"""

import logging
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft.checkpointing import CheckpointTransport
from torchft.manager import REPLICA_ID_KEY, Manager, WorldSizeMode
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL
from torchft.work import _DummyWork

from torchtitan_lite.errors import ReplicaError
from torchtitan_lite.launcher.logs import TORCHFT_INFO
from torchtitan_lite.replica.quorum_checks import (
    ProgressFloor,
    check_compatibility,
    check_descriptors,
    replica_id_for,
)
from torchtitan_lite.schema.fault_tolerance import FaultToleranceConfig

_RETRY_CALL_S = 2.0
"""Delay before a failed call to the lighthouse is repeated. By then a restarted lighthouse has
received the heartbeats of all replicas, and forms a quorum of all."""
_RETRY_S = 0.5
_PROCESS_GROUPS = {"gloo": ProcessGroupGloo, "nccl": ProcessGroupNCCL}
_FILTER_EXIT_S = 1.0
"""Time for the filter to forward the rest. It survives as long as a process that inherited its
input."""


class QuorumManager(Manager):
    """Manager that checks its quorums before they are used, and exposes them.

    Its `step` is the run's progress, set by `set_progress` before each quorum.
    """

    def __init__(
        self,
        config: FaultToleranceConfig,
        transport: CheckpointTransport[Any],
        floor: ProgressFloor,
        *,
        config_fingerprint: str,
        lighthouse: str,
        store: tuple[str, int],
        rank: int,
        world_size: int,
        hostname: str,
    ) -> None:
        """`config_fingerprint` identifies the settings that all replicas must share, and contains
        no colon; `store` is the address of this replica's TCPStore. Raises ReplicaError if
        `lighthouse` does not answer within `quorum_timeout_s`."""
        _silence_torchft_loggers()
        timeout = timedelta(milliseconds=config.process_group_timeout_ms)
        group: ProcessGroup = _PROCESS_GROUPS[config.process_group](timeout=timeout)
        deadline = time.monotonic() + config.quorum_timeout_s
        while True:
            try:
                super().__init__(
                    pg=group,
                    load_state_dict=None,
                    state_dict=None,
                    min_replica_size=config.min_replica_size,
                    use_async_quorum=False,
                    timeout=timeout,
                    quorum_timeout=timedelta(seconds=config.quorum_timeout_s),
                    # All ranks request the quorum, and torchft makes one call to the lighthouse for
                    # them. If it gives that call up, it reports so to no rank, and makes another
                    # only after all ranks have requested again. Therefore its retries must outlast
                    # the requests; their delays add up to the time limit.
                    quorum_retries=math.ceil(config.quorum_timeout_s / _RETRY_CALL_S),
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
                    replica_id=replica_id_for(
                        f"replica_{config.replica_id:05d}", config_fingerprint
                    ),
                    hostname=hostname,
                    checkpoint_transport=transport,
                    init_sync=False,
                )
                break
            except Exception as error:
                # The lighthouse may start after its replicas.
                self._executor.shutdown()
                if time.monotonic() >= deadline:
                    raise ReplicaError(
                        f"No lighthouse answers at TORCHFT_LIGHTHOUSE = {lighthouse}: {error} "
                        "Start one (`torchtitan-lite launch` does) or correct the address."
                    ) from None
                time.sleep(_RETRY_S)
        self.register_state_dict_fn("state", lambda given: None, lambda: None)
        self.group = group
        self._client = _CheckedClient(self._client, floor, config_fingerprint)

    @property
    def full_id(self) -> str:
        """Id of this process of the replica at the lighthouse: its name, its fingerprint and a
        UUID."""
        return self._store.get(REPLICA_ID_KEY).decode()

    @property
    def quorum(self) -> Any:
        """Last QuorumResult."""
        return self._client.last

    def set_progress(self, progress: int) -> None:
        """Set the progress of this replica's state; 0 if it has no valid state."""
        self.load_state_dict({"step": progress, "batches_committed": 0})

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
        # torchft's works do not know this, but wrap the work that does; after an error none.
        inner: Any = self._work
        while inner is not None and hasattr(inner, "_work"):
            inner = inner._work
        return inner is None or isinstance(inner, _DummyWork) or inner.is_completed()

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


def same_device_in_thread() -> Callable[[], None]:
    """Return an initializer that makes a new thread use the device of this one."""
    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)


class _CheckedClient:
    """The manager's client, which checks its quorums."""

    def __init__(self, client: Any, floor: ProgressFloor, config_fingerprint: str) -> None:
        self._client, self._floor, self._config_fingerprint = client, floor, config_fingerprint
        self.last: Any = None

    def _quorum(self, **asked: Any) -> Any:
        found = self._client._quorum(**asked)
        check_compatibility(self._config_fingerprint, found)
        self._floor.check(found.max_step)
        if self.last is None or found.quorum_id != self.last.quorum_id:
            check_descriptors()
        self.last = found
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@contextmanager
def filter_torchft_logs() -> Iterator[None]:
    """Drop the INFO lines of torchft's Rust code from standard error until the end of the block.
    Without `grep` they remain.

    torchft writes eight of them per step, directly to standard error and at a level that cannot be
    configured (0.2.0). Therefore standard error of this process goes through a filter process,
    which still forwards the last output of a process that dies.
    """
    grep = shutil.which("grep")
    if grep is None:
        yield
        return
    sys.stderr.flush()
    before = os.dup(2)
    # grep exits with status 2 if its output is on a full disk; without a reader, torchft would
    # panic. A session of its own, so that a Ctrl-C does not kill the filter before the trainer
    # exits.
    command = shlex.join([grep, "--line-buffered", "-v", "-a", "-F", TORCHFT_INFO])
    filter_ = subprocess.Popen(
        ["/bin/sh", "-c", f"until {command} 2>/dev/null; do [ $? -gt 1 ] || exit 0; sleep 1; done"],
        stdin=subprocess.PIPE,
        stdout=before,
        start_new_session=True,
    )
    assert filter_.stdin is not None
    os.dup2(filter_.stdin.fileno(), 2)
    filter_.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        with suppress(subprocess.TimeoutExpired):
            filter_.wait(_FILTER_EXIT_S)


def _silence_torchft_loggers() -> None:
    """Silence torchft's Python loggers, whose eight lines per step duplicate the metrics."""
    for name in ("torchft", "torchft.manager", "torchft_quorums", "torchft_commits"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("torchft.manager", "torchft_errors"):
        # Errors are logged where they are handled.
        logging.getLogger(name).setLevel(logging.CRITICAL)
