"""torchft's managers, as in a training process, with this lighthouse."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torchft.coordination import ManagerClient, ManagerServer

from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings
from torchtitan_lite.fault_tolerance.lighthouse.server import LighthouseService

_TIMEOUT = timedelta(seconds=30)


class Replica:
    """A replica of one rank: its manager's server and client."""

    def __init__(self, replica_id: str, lighthouse: str, threads: ThreadPoolExecutor) -> None:
        self.server = ManagerServer(
            replica_id=replica_id,
            lighthouse_addr=f"http://{lighthouse}",
            hostname="127.0.0.1",
            bind="127.0.0.1:0",
            store_addr=f"store of {replica_id}",
            world_size=1,
            heartbeat_interval=timedelta(milliseconds=50),
            connect_timeout=_TIMEOUT,
            quorum_retries=0,
        )
        self._client = ManagerClient(self.server.address(), _TIMEOUT)
        self._threads = threads

    def quorum(self, step: int, commit_failures: int = 0) -> "Future[Any]":
        """Request a quorum."""
        return self._threads.submit(
            self._client._quorum,
            group_rank=0,
            step=step,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=_TIMEOUT,
            commit_failures=commit_failures,
            init_sync=False,
        )

    def vote(self, step: int, *, commit: bool) -> bool:
        """Return the outcome of a step."""
        return self._client.should_commit(0, step, commit, _TIMEOUT)


@pytest.fixture
def service() -> Iterator[LighthouseService]:
    # Longer than any call: no quorum forms because of a timeout.
    settings = QuorumSettings(min_replicas=2, join_timeout_ms=60_000, heartbeat_timeout_ms=60_000)
    with LighthouseService("127.0.0.1:0", settings) as service:
        yield service


@pytest.fixture
def replicas(service: LighthouseService) -> Iterator[list[Replica]]:
    with ThreadPoolExecutor(4) as threads:
        replicas = [Replica(f"replica_{n}:x", service.address, threads) for n in range(3)]
        # The lighthouse does not wait for a replica whose first heartbeat is still in flight.
        while len(service.status()["replicas"]) < len(replicas):
            time.sleep(0.01)
        yield replicas
        for replica in replicas:
            replica.server.shutdown()


def _quorums(replicas: list[Replica], step: int, **options: int) -> list[Any]:
    return [answer.result() for answer in [one.quorum(step, **options) for one in replicas]]


def test_quorums_and_votes(replicas: list[Replica]) -> None:
    for step in (1, 2):
        for rank, actual in enumerate(_quorums(replicas, step)):
            assert (actual.quorum_id, actual.replica_rank, actual.replica_world_size) == (
                1,
                rank,
                3,
            )
            assert (actual.max_step, actual.heal) == (step, False)
            assert actual.store_address.startswith("store of replica_")
        assert all(replica.vote(step, commit=True) for replica in replicas)
    assert not any(replica.vote(3, commit=False) for replica in replicas)
    assert [actual.quorum_id for actual in _quorums(replicas, 3, commit_failures=1)] == [2, 2, 2]


def test_a_lagging_replica_must_heal(replicas: list[Replica]) -> None:
    behind = replicas[2].quorum(0)
    ahead = _quorums(replicas[:2], 7)
    assert [actual.heal for actual in (*ahead, behind.result())] == [False, False, True]
    assert behind.result().max_step == 7


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_replica_that_has_left_is_not_waited_for(
    service: LighthouseService, replicas: list[Replica], is_dead: bool
) -> None:
    _quorums(replicas, 1)
    if is_dead:
        replicas[2].server.shutdown()
    waiting = [replica.quorum(2) for replica in replicas[:2]]
    time.sleep(0.3)
    assert not any(answer.done() for answer in waiting)
    started_s = time.monotonic()
    service.mark_left("replica_2")
    actual = [answer.result() for answer in waiting]
    assert time.monotonic() - started_s < 10
    assert [(one.quorum_id, one.replica_world_size) for one in actual] == [(2, 2), (2, 2)]
