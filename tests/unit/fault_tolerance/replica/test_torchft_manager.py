"""Differences from torchft 0.2.0, and additions to it."""

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.launch import wait_until
from tests.unit.fault_tolerance.replica.managers import (
    Replica,
    form_quorum,
    lighthouse,
    wait_for_heartbeats,
    wait_for_requests,
)
from tests.unit.fault_tolerance.replica.test_healing import Run
from torchtitan_lite.core.errors import ReplicaError
from torchtitan_lite.distributed.network import seconds_since_data
from torchtitan_lite.fault_tolerance.replica import torchft_manager
from torchtitan_lite.fault_tolerance.replica.quorum_checks import IncompatiblePeers, ProgressFloor
from torchtitan_lite.fault_tolerance.replica.torchft_manager import QuorumManager, _GlooAtAddress

# torchft calls a deprecated method of its logger.
pytestmark = pytest.mark.filterwarnings("ignore:The .warn. method:DeprecationWarning")


@contextmanager
def _replicas(*numbers: int, **settings: Any) -> Iterator[list[Replica]]:
    """Replicas without a committed step."""
    with lighthouse(len(numbers)) as address:
        made = [Replica(address, number, Run(elements=8), **settings) for number in numbers]
        try:
            yield made
        finally:
            for one in made:
                one.close()


@contextmanager
def _kept_address() -> Iterator[str]:
    """Reserve an address on which only a lighthouse of the test can listen: the port is bound with
    SO_REUSEPORT, and nothing listens there."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_replica_may_start_before_the_lighthouse() -> None:
    with _kept_address() as address, ThreadPoolExecutor(1) as threads:
        making = threads.submit(Replica, address, 0, Run(elements=8), process_group_timeout_ms=900)
        # Longer than torchft's own connection attempt.
        time.sleep(1.1)
        assert not making.done()
        with lighthouse(1, address):
            replica = making.result(timeout=100)
            form_quorum([replica])
            assert replica.manager.num_participants() == 1
            replica.close()


def test_an_abort_wakes_a_collective_at_once() -> None:
    """Also if the abort drops the last reference of the group, whose end waits for its threads."""
    address, timeout = "127.0.0.1", timedelta(seconds=60)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, 0, is_master=True, wait_for_workers=False
    )
    groups = [_GlooAtAddress(address, timeout) for _ in range(2)]
    with ThreadPoolExecutor(3) as threads:
        made = [
            threads.submit(
                one.configure, f"{address}:{store.port}/group", str(rank), rank, 2, 1, 0, 1, [0, 1]
            )
            for rank, one in enumerate(groups)
        ]
        for one in made:
            one.result(timeout=30)
        # The other does not take part, as if it were suspended.
        work = groups[0].allreduce([torch.ones(1 << 20)], dist.AllreduceOptions())
        time.sleep(0.2)
        started_s = time.monotonic()
        aborted = threads.submit(groups[0].abort)
        with pytest.raises(RuntimeError, match="Connection closed"):
            work.wait()
        aborted.result(timeout=30)
        assert time.monotonic() - started_s < 5
        groups[1].abort()


def test_the_time_since_data_of_a_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
    ):
        other, _ = listener.accept()
        with other:
            inode = os.fstat(one.fileno()).st_ino
            time.sleep(0.5)
            assert 0.4 < seconds_since_data({inode}) < 30
            other.sendall(b"data")
            wait_until(lambda: seconds_since_data({inode}) < 0.2, 10)
    assert seconds_since_data({inode}) == math.inf


def test_a_lighthouse_that_never_starts_is_named() -> None:
    with (
        _kept_address() as address,
        pytest.raises(ReplicaError, match=rf"No lighthouse answers at .*{address}"),
    ):
        Replica(address, 0, Run(elements=8), quorum_timeout_s=0.1, process_group_timeout_ms=200)


@pytest.mark.parametrize("last", [0, 1])
def test_a_restarted_lighthouse_answers_waiting_replicas(last: int) -> None:
    """The ranks of a replica request a quorum together: the last call is forwarded to the
    lighthouse, and torchft reports to no rank when it fails."""
    with _kept_address() as address, ThreadPoolExecutor(4) as threads:
        with lighthouse(2, address):
            ranks, others = (_two_ranks(address, number) for number in range(2))
            requests = [threads.submit(ranks[1 - last].manager.start_quorum)]
            time.sleep(0.2)
            requests.append(threads.submit(ranks[last].manager.start_quorum))
            wait_for_requests(address, 1)
        with lighthouse(2, address):
            requests += [threads.submit(one.manager.start_quorum) for one in others]
            for one in requests:
                one.result(timeout=50)
            assert all(one.manager.num_participants() == 2 for one in (*ranks, *others))
            for one in (*ranks[::-1], *others[::-1]):
                one.close()


def _two_ranks(address: str, number: int) -> list[Replica]:
    leader = Replica(address, number, Run(elements=8), num_ranks=2)
    return [leader, Replica(address, number, Run(elements=8), num_ranks=2, leader=leader)]


def test_the_tenth_replica_follows_the_second() -> None:
    """Participants are ordered by name as text."""
    with _replicas(10, 2) as (tenth, second):
        form_quorum([tenth, second])
        assert [one.manager.participating_rank() for one in (second, tenth)] == [0, 1]


def test_spares_are_members_of_the_quorum_that_do_not_participate() -> None:
    spares = {"world_size_mode": "fixed_with_spares", "min_replica_size": 1}
    with _replicas(0, 1, **spares) as (first, spare):
        form_quorum([first, spare])
        for one in (first, spare):
            assert one.manager.quorum.replica_world_size == 2
            assert one.manager.num_participants() == 1
        assert first.manager.participating_rank() == 0
        assert spare.manager.participating_rank() is None


def test_a_step_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """torchft logs about eight lines per step."""
    with caplog.at_level(logging.INFO), _replicas(0) as (replica,):
        form_quorum([replica])
        assert replica.manager.should_commit()
        form_quorum([replica])
    assert not [one for one in caplog.records if one.name.startswith("torchft")]


class _SlowRun(Run):
    """A run that is slow to return its tensors, and records when they were returned."""

    num_read = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        time.sleep(0.1)
        result = super().tensors()
        self.num_read += 1
        return result


def test_the_state_is_not_accessed_after_the_quorum() -> None:
    """torchft's asynchronous quorum reads the state in its own thread, while FSDP's forward has
    full weights in place of shards; and it writes the state that it receives."""
    ahead, behind = _SlowRun(elements=8), Run(seed=1, elements=8)
    ahead.take_step()
    before = {name: tensor.clone() for name, tensor in behind.tensors().items()}
    with lighthouse(2) as address:
        giving, taking = (Replica(address, n, run) for n, run in enumerate((ahead, behind)))
        ahead.num_read = 0
        form_quorum([giving, taking])
        assert ahead.num_read == 1
        time.sleep(0.3)
        assert ahead.num_read == 1
        # Only recorded: the main thread receives the state when nothing uses it.
        assert taking.transport.source is not None
        assert taking.transport.source.progress == ahead.cursor
        assert behind.cursor == 0
        assert all(torch.equal(before[name], one) for name, one in behind.tensors().items())
        for one in (giving, taking):
            one.close()


def test_a_lone_replica_with_an_old_state_rejects_the_quorum() -> None:
    """For example on a starved machine, where it does not see the up-to-date replicas."""
    run = Run(elements=8)
    run.take_step()
    with lighthouse(1) as address:
        replica = Replica(address, 0, run)
        replica.manager.set_progress(0)
        with pytest.raises(ReplicaError, match="at most at sample 0, .* at sample 8"):
            replica.manager.start_quorum()
        assert replica.manager.quorum is None
        replica.close()


def test_an_incompatible_replica_leaves_before_any_connection() -> None:
    """With another number of ranks or another learning rate: no replica waits for a timeout."""
    with lighthouse(1) as address, ThreadPoolExecutor(2) as threads:
        first, second = (
            Replica(address, n, Run(elements=8), config_fingerprint=one)
            for n, one in enumerate("ab")
        )
        wait_for_heartbeats(address, 2)
        requests = [threads.submit(one.manager.start_quorum) for one in (first, second)]
        with pytest.raises(IncompatiblePeers, match="replica_00001 has another config"):
            requests[0].result(timeout=100)
        with pytest.raises(ReplicaError, match="same config and the same number of ranks"):
            requests[1].result(timeout=100)
        assert first.manager.quorum is second.manager.quorum is None
        second.close()
        first.manager.forget_failed_quorum()
        form_quorum([first])
        assert first.manager.quorum.replica_world_size == 1
        assert first.manager.should_commit()
        first.close()


class _Rank:
    """The part of a manager that `QuorumManager._async_quorum` and `_watch` use, whose quorums have
    `ids`."""

    _group_rank, _step, _commit_failures, _quorum_id = 0, 1, 0, -1
    _config_fingerprint, _last_quorum, _broken_id = "1-a", None, None
    _replica_world_size_mode, _timeout = None, timedelta()
    _is_shut_down = False

    def __init__(self, *ids: int, breaks: bool = False) -> None:
        self._ids, self._breaks = list(ids), breaks
        self.connected: list[int] = []
        self.errors: list[str] = []
        self.num_aborts = 0
        self._fencing_token, self._floor = lambda: 0, ProgressFloor(0)
        self._checkpoint_transport = SimpleNamespace(metadata=lambda: "")
        self._watcher = SimpleNamespace(is_alive=lambda: True)
        self._group_lock = threading.Lock()
        self._ranks_client = self.group = self

    def _quorum(self, **unused: Any) -> Any:
        return SimpleNamespace(
            quorum_id=self._ids.pop(0),
            replica_ids=["replica_00000:1-a:u"],
            recover_src_replica_rank=None,
            recover_dst_replica_ranks=[],
            max_world_size=1,
            max_step=1,
            replica_rank=0,
            replica_world_size=1,
            heal=False,
        )

    def _connect(self, quorum: Any) -> None:
        self.connected.append(quorum.quorum_id)
        if self._breaks:
            self._broken_id = quorum.quorum_id

    def abort(self) -> None:
        self.num_aborts += 1

    def report_error(self, error: Exception) -> None:
        self.errors.append(str(error))

    def request(self) -> None:
        """Request the next quorum."""
        untyped: Any = self
        QuorumManager._async_quorum(untyped, True, False, timedelta(), -1)

    def watch(self) -> None:
        untyped: Any = self
        QuorumManager._watch(untyped)


def test_a_rank_connects_once_per_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    """And checks first that it can."""
    num_checks: list[int] = []
    monkeypatch.setattr(torchft_manager, "check_descriptors", lambda: num_checks.append(1))
    rank = _Rank(1, 1, 2)
    for _ in range(3):
        rank.request()
    assert rank.connected == [1, 2] and len(num_checks) == 2 and not rank.errors


def test_a_quorum_that_breaks_while_it_connects_is_aborted() -> None:
    rank = _Rank(1, breaks=True)
    rank.request()
    assert rank.num_aborts == 1
    assert rank.errors == ["The quorum broke while its replicas connected."]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_broken_quorum_is_aborted_once_unless_there_is_another(
    monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    rank, num_waits = _Rank(), 0
    rank._quorum_id = 1

    def wait_until_broken(quorum_id: int) -> str:
        nonlocal num_waits
        num_waits += 1
        if is_replaced:
            # While this one is waited for.
            rank._quorum_id = 2
        rank._is_shut_down = is_replaced or num_waits > 1
        return "a member does not answer"

    def sleep(_: float) -> None:
        assert rank._broken_id == 1 and not is_replaced, "it waits for data of another quorum"
        rank._is_shut_down = True

    untyped: Any = rank
    untyped.wait_until_broken = wait_until_broken
    untyped._receives_data = lambda: is_replaced
    monkeypatch.setattr(torchft_manager.time, "sleep", sleep)
    rank.watch()
    assert (num_waits, rank.num_aborts) == (1, 0 if is_replaced else 1)


def test_sums_and_maxima_are_what_the_group_is_asked_for() -> None:
    asked: list[Any] = []

    def allreduce(flat: torch.Tensor, reduce_op: Any) -> None:
        asked.append(reduce_op)

    manager: Any = SimpleNamespace(allreduce=allreduce, group=None)
    manager._started = partial(QuorumManager._started, manager)
    QuorumManager.all_reduce_sum(manager, torch.ones(1))
    QuorumManager.all_reduce_max(manager, torch.ones(1))
    assert asked == [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
