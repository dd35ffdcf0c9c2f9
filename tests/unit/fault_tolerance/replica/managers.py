"""Replica managers in one process: real stores, servers and sockets."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tests.harness.launch import wait_until
from tests.unit.fault_tolerance.replica.test_healing import Run
from torchtitan_lite.config.tables.fault_tolerance import FaultToleranceConfig
from torchtitan_lite.fault_tolerance.lighthouse.client import notify_left
from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings
from torchtitan_lite.fault_tolerance.replica.healing import HealingTransport
from torchtitan_lite.fault_tolerance.replica.quorum_checks import ProgressFloor
from torchtitan_lite.fault_tolerance.replica.torchft_manager import QuorumManager
from torchtitan_lite.fault_tolerance.supervision.coordinator.client import coordinator_status
from torchtitan_lite.fault_tolerance.supervision.coordinator.server import coordinator_server

_HOST = "127.0.0.1"
_TOKEN = "a secret of all replicas"


class Replica:
    """A replica whose state is `run`, or a rank of a replica of two ranks."""

    def __init__(
        self,
        lighthouse: str,
        number: int,
        run: Run,
        *,
        config_fingerprint: str = "1-a",
        num_ranks: int = 1,
        leader: "Replica | None" = None,
        **changes: Any,
    ) -> None:
        """`lighthouse` is "HOST:PORT"; `leader` is rank 0, if this is rank 1; `changes` are
        settings. Raises ReplicaError."""
        settings: dict[str, Any] = {
            "process_group_timeout_ms": 30_000,
            "quorum_timeout_s": 60,
        } | changes
        self.run, self._lighthouse = run, lighthouse
        self.transport = HealingTransport(run, _HOST, _TOKEN)
        self._store = leader._store if leader else _store()
        try:
            self.manager = QuorumManager(
                FaultToleranceConfig(replica_id=number, **settings),
                self.transport,
                ProgressFloor(run.cursor),
                run_id="a run",
                config_fingerprint=config_fingerprint,
                lighthouse=f"http://{lighthouse}",
                secret=_TOKEN,
                store=(_HOST, self._store.port),
                rank=0 if leader is None else 1,
                world_size=num_ranks,
                address=_HOST,
            )
        except BaseException:
            self.transport.shutdown()
            raise
        self.manager.set_progress(run.cursor)

    def close(self) -> None:
        """Leave the quorum, so that others do not wait for this replica."""
        self.manager.shutdown(wait=False)
        notify_left(self._lighthouse, self.manager.full_id, _TOKEN, timeout_s=30)


def _store() -> Any:
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        _HOST, 0, is_master=True, wait_for_workers=False
    )


@contextmanager
def lighthouse(num_replicas: int, bind: str = f"{_HOST}:0") -> Iterator[str]:
    """Return a lighthouse that needs this many replicas, and its address."""
    settings = QuorumSettings(
        min_replicas=num_replicas, join_timeout_ms=30_000, heartbeat_timeout_ms=30_000
    )
    with coordinator_server(bind, _TOKEN, settings) as server:
        yield server.address


def wait_for_heartbeats(address: str, num_replicas: int) -> None:
    """Block until this many replicas send heartbeats: the lighthouse does not wait for a replica
    whose first heartbeat is in flight."""
    wait_until(lambda: len(_status(address)["replicas"]) >= num_replicas, 100)


def wait_for_requests(address: str, num_replicas: int) -> None:
    """Block until this many replicas wait for a quorum."""
    wait_until(lambda: len(_status(address)["waiting"]) >= num_replicas, 100)


def _status(address: str) -> dict[str, Any]:
    return coordinator_status(address, _TOKEN, timeout_s=30)["quorum"]


def form_quorum(replicas: list[Replica]) -> None:
    """Request a quorum for all replicas, and block until they receive it."""
    with ThreadPoolExecutor(len(replicas)) as threads:
        for request in [threads.submit(one.manager.start_quorum) for one in replicas]:
            request.result(timeout=100)
