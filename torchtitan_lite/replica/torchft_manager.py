"""torchft's manager, made as this project needs it. The one file that touches its private parts
(torchft 0.2.0). Layer: above guard, alike and descriptors.

What a replica that is behind receives is only noted here, and fetched by the main thread once
nothing reads the state: torchft would load it in whatever thread has asked for the quorum.
"""

import logging
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft.checkpointing import CheckpointTransport
from torchft.manager import REPLICA_ID_KEY, Manager, WorldSizeMode
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

from torchtitan_lite.errors import ReplicaError
from torchtitan_lite.replica.alike import check_alike, id_of
from torchtitan_lite.replica.descriptors import check_descriptors
from torchtitan_lite.replica.guard import Floor
from torchtitan_lite.schema.fault_tolerance import FaultToleranceConfig

_CALL_AGAIN_S = 2.0
"""After which a call to the lighthouse that has failed is made again. A lighthouse that was started
again has by then heard of the other replicas too, and finds a quorum of all."""
_RETRY_S = 0.5
_GROUPS = {"gloo": ProcessGroupGloo, "nccl": ProcessGroupNCCL}


class QuorumManager(Manager):
    """A manager whose quorums pass the floor before they are used, and which says what they were.

    Its `step` is the run's progress, which `set_progress` tells it before each quorum.
    """

    def __init__(
        self,
        config: FaultToleranceConfig,
        transport: CheckpointTransport[Any],
        floor: Floor,
        *,
        likeness: str,
        lighthouse: str,
        store: tuple[str, int],
        rank: int,
        world_size: int,
        hostname: str,
    ) -> None:
        """`likeness` is what this replica has in common with the others, without a colon in it;
        `store` is where a TCPStore of this replica listens. Raises ReplicaError when nobody
        answers at `lighthouse` in `quorum_timeout_s`."""
        _quiet()
        timeout = timedelta(milliseconds=config.process_group_timeout_ms)
        group: ProcessGroup = _GROUPS[config.process_group](timeout=timeout)
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
                    # All ranks ask, and torchft makes one call of theirs to the lighthouse. It
                    # tells none of them when it gives that up, and makes no other until all ask
                    # again: so it must not before they do. Its pauses add up to their time limit.
                    quorum_retries=math.ceil(config.quorum_timeout_s / _CALL_AGAIN_S),
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
                    # Its place among the participants follows the order of these texts.
                    replica_id=id_of(f"replica_{config.replica_id:05d}", likeness),
                    hostname=hostname,
                    checkpoint_transport=transport,
                    init_sync=False,
                )
                break
            except Exception as error:
                # The lighthouse may come up after its replicas.
                self._executor.shutdown()
                if time.monotonic() >= deadline:
                    raise ReplicaError(
                        f"Nobody answers at TORCHFT_LIGHTHOUSE = {lighthouse}: {error} Start the "
                        "lighthouse (`torchtitan-lite launch` does), or mend the address."
                    ) from None
                time.sleep(_RETRY_S)
        self.register_state_dict_fn("state", lambda given: None, lambda: None)
        self.group = group
        self._client = _GuardedClient(self._client, floor, likeness)

    @property
    def full_id(self) -> str:
        """By which the lighthouse knows this process of the replica: its name and a uuid."""
        return self._store.get(REPLICA_ID_KEY).decode()

    @property
    def quorum(self) -> Any:
        """The last QuorumResult."""
        return self._client.last

    def set_progress(self, progress: int) -> None:
        """Where this replica's state is; 0 when it has none to speak of."""
        self.load_state_dict({"step": progress, "batches_committed": 0})

    def forget_failed_quorum(self) -> None:
        """Let the next quorum be asked for: the exception of one that failed would be raised
        again."""
        self._quorum_future = None

    def is_participating(self) -> bool:
        """Also one that stands by: it has no samples, and adds zeros by itself, but what it counts
        and says counts."""
        return True

    def sum_(self, flat: torch.Tensor) -> "Exchange":
        """Begin to add `flat` over all that take part, in place."""
        return Exchange(self.allreduce(flat, reduce_op=dist.ReduceOp.SUM))  # pyright: ignore[reportArgumentType]

    def max_(self, flat: torch.Tensor) -> "Exchange":
        """Begin to find the largest of all that take part, in place."""
        return Exchange(self.allreduce(flat, reduce_op=dist.ReduceOp.MAX))  # pyright: ignore[reportArgumentType]

    def fail(self, reason: str) -> None:
        """Give this step up, here and at once in all other replicas."""
        if self.errored() is None:
            self.report_error(RuntimeError(reason))
        self.group.abort()


class Exchange:
    """A sum or a maximum that is under way. Its failure is the manager's to tell."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work
        on_device = torch.accelerator.is_available()
        self._stream = torch.accelerator.current_stream() if on_device else None

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        # What torchft hands out does not know it, but holds who does; one that it has given up
        # holds nobody.
        inner = getattr(self._work, "_work", None)
        return inner is None or inner.is_completed()

    def wait(self) -> None:
        """Or, on a device, have its current stream wait. Raises nothing."""
        if self._stream is None:
            self._work.wait()
            return
        # torchft wants to be waited for on the stream of the call, which in backward is FSDP's.
        here = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self._stream)
        try:
            self._work.wait()
        finally:
            torch.accelerator.set_stream(here)
        here.wait_stream(self._stream)


def same_device_in_thread() -> Callable[[], None]:
    """What a new thread has to do so that its work runs on the device of this one."""
    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)


class _GuardedClient:
    """The manager's client, with an eye on its quorums."""

    def __init__(self, client: Any, floor: Floor, likeness: str) -> None:
        self._client, self._floor, self._likeness = client, floor, likeness
        self.last: Any = None

    def _quorum(self, **asked: Any) -> Any:
        found = self._client._quorum(**asked)
        check_alike(self._likeness, found)
        self._floor.admit(found.max_step)
        if self.last is None or found.quorum_id != self.last.quorum_id:
            check_descriptors()
        self.last = found
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def _quiet() -> None:
    """Its eight lines a step say nothing that the metrics do not."""
    for name in ("torchft", "torchft.manager", "torchft_quorums", "torchft_commits"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("torchft.manager", "torchft_errors"):
        # What fails is told by who handles it.
        logging.getLogger(name).setLevel(logging.CRITICAL)
