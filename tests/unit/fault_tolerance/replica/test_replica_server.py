"""Coordinators of replicas: quorums as torchft's managers compute them, votes, links, strangers."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchft.coordination import ManagerClient, ManagerServer

from tests.harness.launch import wait_until
from tests.unit.fault_tolerance.lighthouse.clients import AuthenticatedClient
from tests.unit.fuzzing import FEW_OR_MANY, fuzz, json_objects
from torchtitan_lite.core.errors import ReplicaError, RpcError, RpcStatus
from torchtitan_lite.distributed.rpc.authentication import AuthenticationError
from torchtitan_lite.distributed.rpc.client import RpcClient
from torchtitan_lite.fault_tolerance.lighthouse.member import Member
from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings
from torchtitan_lite.fault_tolerance.lighthouse.server import LighthouseService
from torchtitan_lite.fault_tolerance.replica import lighthouse_link
from torchtitan_lite.fault_tolerance.replica import replica_server as module
from torchtitan_lite.fault_tolerance.replica.lighthouse_link import (
    AgreedQuorum,
    AuthenticatedLighthouse,
)
from torchtitan_lite.fault_tolerance.replica.replica_server import (
    SERVICE,
    CoordinatorClient,
    ReplicaIdentity,
    ReplicaServer,
    quorum_for_rank,
)
from torchtitan_lite.fault_tolerance.replica.torchft_lighthouse import TorchftLighthouse

SECRET = "a secret of the tests"
_HOST = "127.0.0.1"
_SIGNED = (RpcStatus.INVALID_ARGUMENT, RpcStatus.INTERNAL)
"""Failures that the coordinator has signed."""
_TIMEOUT = timedelta(seconds=30)


def _settings(num_replicas: int, heartbeat_timeout_ms: int = 30_000) -> QuorumSettings:
    return QuorumSettings(
        min_replicas=num_replicas,
        join_timeout_ms=30_000,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )


class Replica:
    """A coordinator and the clients of its ranks."""

    def __init__(
        self,
        lighthouse: str,
        replica_id: str,
        *,
        num_ranks: int = 1,
        run_id: str = "a run",
        secret: str = SECRET,
        link: Any = AuthenticatedLighthouse,
        timeout_s: float = 5,
    ) -> None:
        identity = ReplicaIdentity(run_id, replica_id, f"store of {replica_id}", num_ranks)
        self.coordinator = ReplicaServer(
            identity, lambda: link(lighthouse, secret, run_id), secret=secret, host=_HOST
        )
        self.coordinator.start(timeout_s)
        self.ranks = [
            CoordinatorClient(self.coordinator.address, secret, replica_id)
            for _ in range(num_ranks)
        ]

    def quorum(self, rank: int = 0, step: int = 0, commit_failures: int = 0) -> Any:
        return self.ranks[rank]._quorum(
            group_rank=rank,
            step=step,
            checkpoint_metadata=f"{self.coordinator.address} {rank}",
            shrink_only=False,
            timeout=_TIMEOUT,
            commit_failures=commit_failures,
            init_sync=False,
        )

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.coordinator.stop()


@contextmanager
def _replicas(address: str, *ids: str, **options: Any) -> Iterator[list[Replica]]:
    made = [Replica(address, one, **options) for one in ids]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def _together(calls: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [one.result(timeout=60) for one in [threads.submit(call) for call in calls]]


@given(
    steps=st.lists(st.sampled_from([0, 1, 7, 9]), min_size=1, max_size=4),
    failures=st.integers(0, 2),
)
@example(steps=[9, 0, 9, 9], failures=0)
@settings(max_examples=8)
def test_quorums_are_those_of_torchft(steps: list[int], failures: int) -> None:
    ids = [f"replica_{i}" for i in range(len(steps))]
    num_ranks = 2
    with LighthouseService(f"{_HOST}:0", _settings(len(ids))) as service:
        servers = [
            ManagerServer(
                replica_id=one,
                lighthouse_addr=f"http://{service.address}",
                hostname=_HOST,
                bind=f"{_HOST}:0",
                store_addr=f"store of {one}",
                world_size=num_ranks,
                heartbeat_interval=timedelta(milliseconds=50),
                connect_timeout=_TIMEOUT,
                quorum_retries=0,
            )
            for one in ids
        ]

        def request(replica: int, rank: int) -> Any:
            return ManagerClient(servers[replica].address(), _TIMEOUT)._quorum(
                group_rank=rank,
                step=steps[replica],
                checkpoint_metadata="",
                shrink_only=False,
                timeout=_TIMEOUT,
                commit_failures=failures,
                init_sync=False,
            )

        pairs = [(i, rank) for i in range(len(ids)) for rank in range(num_ranks)]
        theirs = _together([lambda i=i, rank=rank: request(i, rank) for i, rank in pairs])
        for server in servers:
            server.shutdown()
    quorum = AgreedQuorum("a lighthouse", theirs[0].quorum_id, tuple(map(_member, ids, steps)))
    for (i, rank), expected in zip(pairs, theirs, strict=True):
        actual = SimpleNamespace(**quorum_for_rank(quorum, ids[i], rank))
        for name in (
            "quorum_id",
            "replica_rank",
            "replica_world_size",
            "replica_ids",
            "store_address",
            "max_step",
            "max_replica_rank",
            "max_world_size",
            "heal",
            "recover_src_replica_rank",
            "recover_dst_replica_ranks",
        ):
            assert getattr(actual, name) == getattr(expected, name), name


def _member(replica_id: str, step: Any, **changes: Any) -> Member:
    values: dict[str, Any] = {
        "run_id": "a run",
        "replica_id": replica_id,
        "address": "",
        "store_address": f"store of {replica_id}",
        "step": step,
        "world_size": 2,
        "state_urls": ("http://first", "http://second"),
    }
    return Member(**(values | changes))


def test_all_ranks_of_all_replicas_get_one_quorum_and_one_outcome() -> None:
    with (
        LighthouseService(f"{_HOST}:0", _settings(2), SECRET) as service,
        _replicas(service.address, "a:f:1", "b:f:2", num_ranks=2) as replicas,
    ):
        calls = [
            lambda r=r, i=i: r.quorum(i, 7 if r is replicas[0] else 3)
            for r in replicas
            for i in (0, 1)
        ]
        quorums = _together(calls)
        assert len({one.quorum_id for one in quorums}) == 1
        assert [one.heal for one in quorums] == [False, False, True, True]
        urls = [f"{replicas[0].coordinator.address} {rank}" for rank in (0, 1)]
        assert [one.state_url for one in quorums] == [None, None, *urls]
        for votes in ((True, True), (True, False)):
            outcomes = _together(
                [
                    lambda rank=rank, vote=vote: (
                        replicas[0].ranks[rank].should_commit(rank, 7, vote, _TIMEOUT)
                    )
                    for rank, vote in enumerate(votes)
                ]
            )
            assert outcomes == [all(votes)] * 2


def test_a_vote_whose_answer_is_lost_has_the_same_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the other ranks have gone on, which do not vote again."""
    monkeypatch.setattr(module, "_VOTE_RETRY_S", 0.05)
    with (
        LighthouseService(f"{_HOST}:0", _settings(1), SECRET) as service,
        _replicas(service.address, "a:f:1", num_ranks=2) as (replica,),
    ):
        call, num_lost = replica.ranks[1]._client.call, 0

        def lose_the_first_answer(name: str, request: dict[str, Any], timeout_s: float) -> Any:
            nonlocal num_lost
            answer = call(name, request, timeout_s)
            if num_lost == 0:
                num_lost += 1
                raise RpcError("the connection was cut", RpcStatus.UNAVAILABLE)
            return answer

        monkeypatch.setattr(replica.ranks[1]._client, "call", lose_the_first_answer)
        for commits in (True, False):
            outcomes = _together(
                [
                    lambda rank=rank, commits=commits: replica.ranks[rank].should_commit(
                        rank, 7, commits or rank == 0, _TIMEOUT
                    )
                    for rank in (0, 1)
                ]
            )
            assert outcomes == [commits] * 2
        assert num_lost == 1


def test_a_repeated_request_of_a_rank_replaces_the_earlier_one() -> None:
    """Whose call was cut, without the coordinator noticing."""
    with (
        LighthouseService(f"{_HOST}:0", _settings(1), SECRET) as service,
        _replicas(service.address, "a:f:1", num_ranks=2) as (replica,),
        RpcClient(replica.coordinator.address, SERVICE, SECRET, "replica a:f:1") as client,
        ThreadPoolExecutor(2) as threads,
    ):
        votes = replica.coordinator._votes
        earlier = threads.submit(client.call, "Vote", {"rank": 0, "vote": 1, "commit": False}, 2)
        wait_until(lambda: 0 in votes, 30)
        first = votes[0]
        repeated = threads.submit(replica.ranks[0].should_commit, 0, 7, True, _TIMEOUT)
        wait_until(lambda: votes.get(0, first) is not first, 30)
        assert replica.ranks[1].should_commit(1, 7, True, _TIMEOUT)
        assert repeated.result(30)
        with pytest.raises(RpcError):
            earlier.result(30)


def test_another_run_is_rejected() -> None:
    with LighthouseService(f"{_HOST}:0", _settings(1), SECRET) as service:
        with _replicas(service.address, "a:f:1") as (first,):
            first.quorum()
            with (
                _replicas(service.address, "b:f:2", run_id="another") as (second,),
                pytest.raises(ReplicaError, match="serves run a run, and b:f:2 is of run another"),
            ):
                second.quorum()
        service.mark_left("a")
        with _replicas(service.address, "b:f:2", run_id="another") as (second,):
            assert second.quorum().replica_ids == ["b:f:2"]


def test_an_older_process_of_a_replica_ends_when_a_newer_one_joins() -> None:
    with (
        LighthouseService(f"{_HOST}:0", _settings(1), SECRET) as service,
        _replicas(service.address, "a:f:1") as (older,),
    ):
        older.quorum()
        with _replicas(service.address, "a:f:2") as (newer,):
            assert newer.quorum().replica_ids == ["a:f:2"]
        with pytest.raises(ReplicaError, match="replaced by a newer process"):
            older.quorum()


def test_another_secret_is_reported_at_once_and_ends_in_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    why = "TORCHTITAN_LITE_TOKEN must be the same"
    with (
        LighthouseService(f"{_HOST}:0", _settings(1), SECRET) as service,
        caplog.at_level("WARNING", "torchtitan_lite"),
    ):
        with pytest.raises(ReplicaError, match=why):
            Replica(service.address, "a:f:1", secret="another secret of them", timeout_s=0.5)
        assert why in caplog.text
        assert service.status()["replicas"] == []


def test_an_unauthenticated_lighthouse_must_be_chosen() -> None:
    with LighthouseService(f"{_HOST}:0", _settings(1)) as service:
        with pytest.raises(ReplicaError, match='fault_tolerance.lighthouse = "torchft"'):
            Replica(service.address, "a:f:1", timeout_s=0.5)
        with _replicas(service.address, "a:f:1", link=TorchftLighthouse) as (replica,):
            assert replica.quorum().replica_ids == ["a:f:1"]


@pytest.mark.parametrize("data", ["", "{}", '{"member": "{}", "seal": "00"}'])
def test_no_quorum_with_a_stranger_at_an_unauthenticated_lighthouse(data: str) -> None:
    """Whoever claims the highest step would be the donor of all others."""
    with (
        LighthouseService(f"{_HOST}:0", _settings(2)) as service,
        _replicas(service.address, "a:f:1", link=TorchftLighthouse) as (replica,),
        ThreadPoolExecutor(1) as threads,
    ):
        from torchft.coordination import LighthouseClient

        request = threads.submit(replica.quorum, step=4)
        stranger = LighthouseClient(f"http://{service.address}", _TIMEOUT)
        stranger.heartbeat("stranger:f:1")
        stranger.quorum("stranger:f:1", _TIMEOUT, step=1 << 40, data={"sealed": data})
        time.sleep(1)
        assert not request.done()
        replica.close()
        with pytest.raises((ReplicaError, RpcError, ValueError)):
            request.result(timeout=60)


def test_a_stranger_is_nobody_to_a_lighthouse_with_a_secret() -> None:
    from torchft.coordination import LighthouseClient

    with (
        LighthouseService(f"{_HOST}:0", _settings(1), SECRET) as service,
        _replicas(service.address, "a:f:1") as (replica,),
    ):
        assert replica.quorum(step=5).max_step == 5
        stranger = LighthouseClient(f"http://{service.address}", _TIMEOUT)
        # It speaks another protocol.
        with pytest.raises(RuntimeError):
            stranger.heartbeat("stranger")
        with pytest.raises(RuntimeError):
            stranger.quorum("stranger", _TIMEOUT, step=1 << 40)
        with pytest.raises(RpcError, match="cannot be trusted"):
            AuthenticatedClient(service.address, "another secret of them").heartbeat("stranger")
        assert [one["replica_id"] for one in service.status()["replicas"]] == ["a:f:1"]
        assert replica.quorum(step=6).max_step == 6


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"member": 1, "seal": 2}', _member("a", 1).seal("another secret of them")],
)
def test_an_unsealed_statement_is_rejected(text: str) -> None:
    with pytest.raises(AuthenticationError):
        Member.unseal(text, SECRET)


def test_a_sealed_statement_cannot_be_altered() -> None:
    member = _member("replica_00001:f:1", 41, shrink_only=True, commit_failures=3)
    sealed = member.seal(SECRET)
    assert Member.unseal(sealed, SECRET) == member
    with pytest.raises(AuthenticationError, match="wrong seal"):
        Member.unseal(sealed.replace("41", "42"), SECRET)
    for changes in ({"step": -1}, {"step": 1 << 62}, {"step": True}, {"world_size": "2"}):
        with pytest.raises(AuthenticationError, match="invalid"):
            Member.unseal(_member("a", **{"step": 1} | changes).seal(SECRET), SECRET)


def test_a_quorum_breaks_when_the_lighthouse_reports_a_dead_member() -> None:
    with (
        LighthouseService(f"{_HOST}:0", _settings(2), SECRET) as service,
        _replicas(service.address, "a:f:1", "b:f:2") as (first, second),
    ):
        quorum, _ = _together([first.quorum, second.quorum])
        with ThreadPoolExecutor(1) as threads:
            watch = threads.submit(first.ranks[0].wait_until_broken, quorum.quorum_id)
            time.sleep(0.5)
            assert not watch.done()
            service.mark_left("b:f:2")
            assert "b sends no heartbeats" in watch.result(timeout=10)
        assert first.ranks[0].wait_until_broken(quorum.quorum_id)
        assert first.ranks[0].wait_until_broken(quorum.quorum_id - 1) == ""


def test_a_quorum_breaks_when_the_others_continue_without_the_replica() -> None:
    """As after a suspension in which the others have left its collectives."""
    hasty = replace(_settings(1), join_timeout_ms=2000)
    with (
        LighthouseService(f"{_HOST}:0", hasty, SECRET) as service,
        _replicas(service.address, "a:f:1", "b:f:2", "c:f:3") as (first, second, third),
    ):
        quorum, *_ = _together([first.quorum, second.quorum, third.quorum])
        assert len(quorum.replica_ids) == 3
        later, _ = _together([second.quorum, third.quorum])
        assert later.replica_ids == ["b:f:2", "c:f:3"]
        reason = first.ranks[0].wait_until_broken(quorum.quorum_id)
        assert reason == "the others continued without this replica"
        assert second.coordinator._broken is None


def test_a_quorum_breaks_when_a_member_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lighthouse still receives its heartbeats, so that only its peers can tell."""
    monkeypatch.setattr(module, "_LINK_TIMEOUT_S", 0.5)
    monkeypatch.setattr(module, "_PING_INTERVAL_S", 0.2)
    with (
        LighthouseService(f"{_HOST}:0", _settings(1), SECRET) as service,
        _replicas(service.address, "a:f:1") as (first,),
        _replicas(service.address, "b:f:2") as (second,),
    ):
        quorum, _ = _together([lambda: first.quorum(step=9), lambda: second.quorum(step=9)])
        second.coordinator.stop()
        peer = AuthenticatedClient(service.address, SECRET)
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(0.1):
                peer.heartbeat("b:f:2")

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            assert "b cannot be reached" in first.ranks[0].wait_until_broken(quorum.quorum_id)
            links = [["a:f:1", "b:f:2"]]
            wait_until(lambda: [*map(list, service.status()["broken_links"])] == links, 30)
        finally:
            ended.set()
            thread.join()


def test_the_coordinator_listens_at_one_address_only() -> None:
    with (
        LighthouseService(f"{_HOST}:0", _settings(1), SECRET) as service,
        _replicas(service.address, "a:f:1") as (replica,),
    ):
        port = int(replica.coordinator.address.rpartition(":")[2])
        listening = {
            one.laddr.ip
            for one in psutil.Process().net_connections()
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port
        }
        assert {one.removeprefix("::ffff:") for one in listening} == {_HOST}
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=2)
        with (
            RpcClient(
                replica.coordinator.address, SERVICE, "another secret of them", "replica"
            ) as stranger,
            pytest.raises(RpcError, match="cannot be trusted"),
        ):
            stranger.call("Vote", {"rank": 0, "commit": True}, 10)


@FEW_OR_MANY
def test_arbitrary_requests_of_ranks_are_answered(num_examples: int) -> None:
    with (
        LighthouseService(f"{_HOST}:0", _settings(1), SECRET) as service,
        _replicas(service.address, "a:f:1") as (replica,),
        RpcClient(replica.coordinator.address, SERVICE, SECRET, "replica a:f:1") as client,
    ):

        def check(name: str, request: dict[str, Any]) -> None:
            with pytest.raises(RpcError) as caught:
                client.call(name, {**request, "rank": None}, 30)
            assert caught.value.code in _SIGNED

        names = st.sampled_from(["Quorum", "Vote"])
        fuzz(num_examples, check, name=names, request=json_objects("vote", "commit", "step"))
        assert replica.quorum(step=6).max_step == 6


@pytest.mark.parametrize("secret", ["another secret of them", ""])
def test_a_status_without_a_proof_does_not_end_a_replica_at_its_start(
    secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another server answers at first: UNIMPLEMENTED, or without the secret."""
    with (
        LighthouseService(f"{_HOST}:0", _settings(1), secret) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        address = other.address
        with caplog.at_level("WARNING", "torchtitan_lite"):
            starting = threads.submit(lambda: Replica(address, "a:f:1", timeout_s=60))
            wait_until(lambda: "is asked again" in caplog.text, 30)
        other.stop()
        with LighthouseService(address, _settings(1), SECRET):
            replica = starting.result(timeout=60)
            assert replica.quorum(step=6).max_step == 6
            replica.close()
    assert len(caplog.records) <= 2


@pytest.mark.parametrize(("num_members", "interval_s"), [(2, 1.0), (40, 4.0)])
def test_a_member_sends_at_most_ten_pings_per_second(
    monkeypatch: pytest.MonkeyPatch, num_members: int, interval_s: float
) -> None:
    class Client:
        async def call(self, name: str, content: object, timeout_s: float) -> None: ...

        async def close(self) -> None: ...

    async def sleep(seconds: float) -> None:
        slept_s.append(seconds)
        raise asyncio.CancelledError

    slept_s: list[float] = []
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    member: Any = SimpleNamespace(replica_id="a:1")
    own: Any = SimpleNamespace(
        _client_of=lambda member: Client(),
        _is_current=lambda quorum_id: True,
        _unreachable=set(),
        _answered_s={},
    )
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ReplicaServer._ping_regularly(own, 1, member, num_members))
    assert slept_s == [interval_s]


def _agreed(quorum_id: int) -> AgreedQuorum:
    member = Member(
        run_id="a run",
        replica_id="a",
        address=f"{_HOST}:1",
        store_address="store",
        step=0,
        world_size=1,
        state_urls=("url",),
    )
    return AgreedQuorum("a lighthouse", quorum_id, (member,))


@contextmanager
def _alone() -> Iterator[Any]:
    """A coordinator without a server."""
    identity = ReplicaIdentity("a run", "a", "store", 1)
    unused: Any = None
    coordinator: Any = ReplicaServer(identity, unused, secret=SECRET, host=_HOST)
    yield coordinator
    coordinator.stop()


def test_a_quorum_breaks_once_until_there_is_another() -> None:
    async def run(coordinator: Any) -> None:
        coordinator._changed = asyncio.Condition()
        await coordinator._adopt(_agreed(1))
        await coordinator._break(2, "another quorum")
        assert coordinator._broken is None
        await coordinator._break(1, "first")
        await coordinator._break(1, "second")
        assert coordinator._broken == "first"
        # The rank that asks again receives the same one.
        await coordinator._adopt(_agreed(1))
        assert coordinator._broken == "first"
        await coordinator._adopt(_agreed(2))
        assert coordinator._broken is None

    with _alone() as coordinator:
        asyncio.run(run(coordinator))


def test_a_request_that_no_rank_waits_for_ends_without_a_quorum() -> None:
    class Link:
        async def quorum(self, member: Member, unreachable: set[str]) -> AgreedQuorum:
            raise RpcError("no answer")

    async def run(coordinator: Any) -> None:
        coordinator._link = Link()
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        request = {"step": 0, "state_url": "", "token": 0, "shrink_only": False}
        await coordinator._form_quorum([({**request, "commit_failures": 0}, future)])
        assert coordinator._quorum is None

    with _alone() as coordinator:
        coordinator._server = SimpleNamespace(address=f"{_HOST}:1", stop=lambda: None)
        asyncio.run(run(coordinator))


@pytest.mark.parametrize(("is_final", "timeout_s"), [(True, 60), (False, 0)])
def test_a_vote_is_not_repeated_in_vain(
    monkeypatch: pytest.MonkeyPatch, is_final: bool, timeout_s: float
) -> None:
    def call(*_: Any) -> dict[str, Any]:
        raise RpcError("no answer", is_final=is_final)

    client = CoordinatorClient(f"{_HOST}:1", SECRET, "a")
    monkeypatch.setattr(client._client, "call", call)
    monkeypatch.setattr(module.time, "sleep", lambda _: pytest.fail("it votes again"))
    with pytest.raises(RpcError, match="no answer"):
        client.should_commit(0, 1, True, timedelta(seconds=timeout_s))
    client.close()


_OWN, _OTHER = "own:f:u", "other:f:u"


class _Pinged:
    """A client of another replica, whose calls end as the test says."""

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = list(errors)

    async def call(self, name: str, content: object, timeout_s: float) -> None:
        error = self._errors.pop(0)
        if error is not None:
            raise error

    async def close(self) -> None: ...


async def _at_once(seconds: float) -> None: ...


def _own_coordinator() -> Any:
    unused: Any = None
    return ReplicaServer(
        ReplicaIdentity("a run", _OWN, "a:1", 2), unused, secret="", host="127.0.0.1"
    )


def test_a_round_begins_without_the_requests_of_the_last() -> None:
    async def run() -> None:
        coordinator, rounds = _own_coordinator(), []

        async def finish(requests: list[Any]) -> None:
            rounds.append([request["rank"] for request, _ in requests])

        round_: dict[int, Any] = {}
        calls = [
            asyncio.create_task(coordinator._collect(round_, {"rank": rank}, finish))
            for rank in (0, 1, 1)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert rounds == [[0, 1]] and list(round_) == [1]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(run())


def test_the_members_of_a_new_quorum_count_as_reachable() -> None:
    async def run() -> None:
        coordinator = _own_coordinator()
        coordinator._changed = asyncio.Condition()
        coordinator._unreachable = {_OTHER}
        coordinator._spawn = lambda work: work.close()
        await coordinator._adopt(AgreedQuorum("l", 1, (_member(_OWN, 0), _member(_OTHER, 0))))
        assert coordinator._unreachable == set()

    asyncio.run(run())


@pytest.mark.parametrize("answers", [False, True])
def test_a_former_member_is_unreachable_until_it_answers_or_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    now_s = 1000.0

    async def wait(seconds: float) -> None:
        nonlocal now_s
        now_s += 60

    monkeypatch.setattr(module, "_FORGET_S", 100.0)
    monkeypatch.setattr(asyncio, "sleep", wait)
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    error = RpcError("no answer", RpcStatus.UNAVAILABLE)
    client = _Pinged(error, None) if answers else _Pinged(error, error)

    async def run() -> None:
        coordinator = _own_coordinator()
        coordinator._unreachable = {_OTHER}
        coordinator._client_of = lambda member: client
        await coordinator._ping_regularly(1, _member(_OTHER, 0), 1)
        assert coordinator._unreachable == set()

    asyncio.run(run())


def test_the_time_of_a_connection_begins_with_its_first_answer_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RpcError("no answer", RpcStatus.UNAVAILABLE)
    monkeypatch.setattr(asyncio, "sleep", _at_once)

    async def run() -> None:
        coordinator = _own_coordinator()
        coordinator._answered = asyncio.Event()
        last = SimpleNamespace(dead=set(), is_member=True, quorum_id=1)
        results: list[Any] = [last, error, asyncio.CancelledError()]

        async def heartbeat(replica_id: str, unreachable: object) -> Any:
            seen.append(coordinator._connected_since_s is None)
            result = results.pop(0)
            if isinstance(result, BaseException):
                raise result
            return result

        seen: list[bool] = []
        coordinator._link = SimpleNamespace(heartbeat=heartbeat)
        with pytest.raises(asyncio.CancelledError):
            await coordinator._send_heartbeats()
        assert seen == [True, False, True]

    asyncio.run(run())


def test_only_an_answer_to_a_later_heartbeat_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lighthouse_link, "_SETTLE_S", 0.0)

    async def run() -> None:
        answered = asyncio.Event()
        answered.set()
        waiting = asyncio.create_task(lighthouse_link.wait_until_settled(answered))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        answered.set()
        await asyncio.wait_for(waiting, 30)

    asyncio.run(run())
