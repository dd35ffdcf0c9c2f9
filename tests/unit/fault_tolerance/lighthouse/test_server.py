"""The lighthouse's server: immediate quorums, rejected calls, and shutdown."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.harness.launch import wait_until
from tests.unit.fault_tolerance.lighthouse.clients import (
    LighthouseClients,
    ReceivedQuorum,
    connect_clients,
)
from tests.unit.fuzzing import FEW_OR_MANY, fuzz, json_objects, json_values
from torchtitan_lite.core.errors import LighthouseError, RpcError
from torchtitan_lite.distributed.rpc import server as rpc_server
from torchtitan_lite.distributed.rpc.authentication import AuthenticationError
from torchtitan_lite.distributed.rpc.client import RpcClient
from torchtitan_lite.fault_tolerance.lighthouse import client, member
from torchtitan_lite.fault_tolerance.lighthouse.member import Member, _seal
from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings
from torchtitan_lite.fault_tolerance.lighthouse.server import LighthouseService

TOKEN = "a secret of the tests"
# Such a long wait that no immediate response can be mistaken for its end, even on a slow machine.
PATIENT = QuorumSettings(min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=60_000)
_AT_ONCE_S = 10
_ANSWER_S = 30


@pytest.fixture
def service() -> Iterator[LighthouseService]:
    with LighthouseService("127.0.0.1:0", PATIENT, TOKEN) as service:
        yield service


@pytest.fixture
def clients(service: LighthouseService) -> Iterator[LighthouseClients]:
    with connect_clients(service.address, TOKEN) as clients:
        yield clients


def _wait_for_requests(service: LighthouseService, *steps: tuple[str, int]) -> None:
    """Block until exactly these replicas wait for a quorum, from these steps."""
    wait_until(lambda: _requests(service) == [*steps], _ANSWER_S)


def _wait_until_requested(
    service: LighthouseService, call: "Future[ReceivedQuorum | None]", step: tuple[str, int]
) -> None:
    """Block until a call has arrived; on a slow machine it may have returned since."""
    wait_until(lambda: _requests(service) == [step] or call.done(), _ANSWER_S)


def _requests(service: LighthouseService) -> list[tuple[str, int]]:
    return [(one["replica_id"], one["step"]) for one in service.status()["waiting"]]


def test_a_quorum_forms_at_once_after_a_departure(
    service: LighthouseService, clients: LighthouseClients
) -> None:
    clients.start_heartbeats("a:1", "b:1")
    assert all(clients.request_all("a:1", "b:1"))
    # The replica still sends heartbeats: those in flight must not add it again.
    waiting = clients.request("a:1")
    _wait_for_requests(service, ("a:1", 0))
    time.sleep(0.2)
    assert not waiting.done()
    started_s = time.monotonic()
    assert client.notify_left(service.address, "b", TOKEN, _ANSWER_S) == ["b:1"]
    quorum = waiting.result()
    assert time.monotonic() - started_s < _AT_ONCE_S
    assert quorum is not None
    assert (quorum.quorum_id, quorum.ids) == (2, ("a:1",))
    time.sleep(0.2)
    assert [one["replica_id"] for one in service.status()["replicas"]] == ["a:1"]


def test_a_quorum_forms_at_once_when_the_last_replica_requests_it(
    clients: LighthouseClients,
) -> None:
    clients.start_heartbeats("a", "b")
    assert all(clients.request_all("a", "b"))
    durations_s = []
    for _ in range(20):
        started_s = time.monotonic()
        assert all(clients.request_all("a", "b"))
        durations_s.append(time.monotonic() - started_s)
    assert min(durations_s) < 0.05


def test_a_replica_that_has_left_is_notified(
    service: LighthouseService, clients: LighthouseClients
) -> None:
    clients.start_heartbeats("a:1", "b:1")
    waiting = clients.request("a:1")
    _wait_for_requests(service, ("a:1", 0))
    assert service.mark_left("a:1") == ["a:1"]
    with pytest.raises(RpcError, match="a:1 was reported to have left"):
        waiting.result()
    with pytest.raises(RpcError, match="under a new id"):
        clients.request("a:1").result()
    (quorum,) = clients.request_all("b:1")
    assert quorum is not None
    assert quorum.ids == ("b:1",)


def test_the_older_process_of_a_replica_is_notified(
    service: LighthouseService, clients: LighthouseClients
) -> None:
    clients.start_heartbeats("a:f:1", "b:f:1")
    older = clients.request("a:f:1")
    _wait_for_requests(service, ("a:f:1", 0))
    newer = clients.request("a:f:2", step=3)
    with pytest.raises(RpcError, match="a:f:1 was replaced by a newer process of the same"):
        older.result()
    with pytest.raises(RpcError, match="replaced by a newer process of the same replica id"):
        clients.request("a:f:1").result()
    (quorum,) = clients.request_all("b:f:1")
    assert quorum is not None
    assert quorum.ids == ("a:f:2", "b:f:1")
    assert newer.result() == quorum


def test_a_replica_that_withdrew_is_in_no_quorum(
    service: LighthouseService, clients: LighthouseClients
) -> None:
    clients.start_heartbeats("a", "b", "c")
    assert clients.request("a", timeout_s=0.2).result() is None
    _wait_for_requests(service)
    others = [clients.request("b"), clients.request("c")]
    _wait_for_requests(service, ("b", 0), ("c", 0))
    time.sleep(0.1)
    assert not any(other.done() for other in others)
    (quorum,) = clients.request_all("a")
    assert quorum is not None
    assert quorum.ids == ("a", "b", "c")
    assert [other.result() for other in others] == [quorum, quorum]


def test_an_earlier_call_of_the_same_replica_has_no_effect(
    service: LighthouseService, clients: LighthouseClients
) -> None:
    clients.start_heartbeats("a", "b")
    earlier = clients.request("a", step=1, timeout_s=1)
    _wait_until_requested(service, earlier, ("a", 1))
    later = clients.request("a", step=2)
    assert earlier.result() is None
    _wait_for_requests(service, ("a", 2))
    (quorum,) = clients.request_all("b")
    assert quorum is not None
    assert quorum.ids == ("a", "b")
    assert later.result() == quorum


def test_expired_heartbeats_release_waiting_replicas() -> None:
    settings = QuorumSettings(min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=1500)
    with (
        LighthouseService("127.0.0.1:0", settings) as service,
        connect_clients(service.address) as clients,
    ):
        clients.start_heartbeats("a", "b")
        # A request is a heartbeat too: the last one of b is not before this.
        alive_s = time.monotonic()
        assert all(clients.request_all("a", "b"))
        clients.stop_heartbeats("b")
        (quorum,) = clients.request_all("a")
        assert quorum is not None
        assert quorum.ids == ("a",)
        assert 1.5 <= time.monotonic() - alive_s < 1.5 + _AT_ONCE_S


def test_status(service: LighthouseService, clients: LighthouseClients) -> None:
    empty = service.status()
    assert (empty["quorum_id"], empty["quorum_age_s"], empty["members"]) == (0, None, [])
    clients.start_heartbeats("a", "b")
    assert all(clients.request_all("a", "b", step=4))
    waiting = clients.request("a", step=5)
    _wait_for_requests(service, ("a", 5))
    status = service.status()
    assert status["quorum_id"] == 1
    assert 0 < status["quorum_age_s"] < 60
    assert [(one["replica_id"], one["step"]) for one in status["members"]] == [("a", 4), ("b", 4)]
    assert [(one["replica_id"], one["step"]) for one in status["waiting"]] == [("a", 5)]
    assert [(one["replica_id"], one["is_healthy"]) for one in status["replicas"]] == [
        ("a", True),
        ("b", True),
    ]
    assert status["verdict"] == "1 of 2 live replicas wait, more than half are required"
    assert status["heartbeat_timeout_ms"] == 60_000
    assert clients.request_all("b", step=5) == [waiting.result()]


@pytest.mark.parametrize("wrong", ["", "another", TOKEN + " ", "ä"])
def test_another_token_is_rejected(
    service: LighthouseService, clients: LighthouseClients, wrong: str
) -> None:
    clients.start_heartbeats("a:1")
    with pytest.raises(LighthouseError, match="cannot be trusted|rejects the call"):
        client.notify_left(service.address, "a", wrong, _ANSWER_S)
    assert service.status()["replicas"]


def test_without_a_token_all_such_calls_are_rejected() -> None:
    with LighthouseService("127.0.0.1:0", PATIENT) as service:
        with pytest.raises(LighthouseError, match="started with --serve-torchft"):
            client.notify_left(service.address, "a", "", _ANSWER_S)
        assert service.mark_left("a") == []


def test_an_address_without_a_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(LighthouseError, match=f"Nothing answers at {address}"):
            client.notify_left(address, "a", TOKEN, _ANSWER_S)
        free.listen()
        with pytest.raises(LighthouseError, match="did not answer in 0.2 s"):
            client.notify_left(address, "a", TOKEN, 0.2)


def test_shutdown_fails_waiting_calls(
    service: LighthouseService, clients: LighthouseClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The shutdown does not wait for them.
    monkeypatch.setattr(rpc_server, "_GRACE_S", 60.0)
    clients.start_heartbeats("a", "b")
    waiting = clients.request("a")
    _wait_for_requests(service, ("a", 0))
    clients.stop_heartbeats("a", "b")
    started_s = time.monotonic()
    service.stop()
    service.stop()
    with pytest.raises(RpcError, match="The lighthouse stops"):
        waiting.result()
    assert time.monotonic() - started_s < _AT_ONCE_S
    with pytest.raises(LighthouseError, match="not running"):
        service.status()


@pytest.mark.parametrize("bind", ["29510", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", ":1"])
def test_an_invalid_address(bind: str) -> None:
    with pytest.raises(LighthouseError, match="is not HOST:PORT"):
        LighthouseService(bind, PATIENT).start()


def test_an_address_of_another_machine() -> None:
    service = LighthouseService("192.0.2.1:0", PATIENT)
    with pytest.raises(LighthouseError, match="192.0.2.1:0: Cannot assign"):
        service.start()
    service.stop()


def test_a_port_in_use(service: LighthouseService) -> None:
    with pytest.raises(LighthouseError, match="another process listens there"):
        LighthouseService(service.address, PATIENT).start()


@FEW_OR_MANY
def test_arbitrary_requests_get_an_answer_and_change_nothing(
    num_examples: int, service: LighthouseService
) -> None:
    names = st.sampled_from(["Quorum", "Heartbeat", "Left"])
    requests = json_objects("member", "unreachable", "replica_id", "run_id")
    with RpcClient(service.address, member.SERVICE, TOKEN, member.PURPOSE) as caller:

        def check(name: str, request: dict[str, Any]) -> None:
            try:
                caller.call(name, request, _ANSWER_S)
            except RpcError as error:
                assert error.is_final

        fuzz(num_examples, check, name=names, request=requests)
    assert service.status()["waiting"] == []


@FEW_OR_MANY
def test_a_statement_is_valid_or_rejected(num_examples: int) -> None:
    def check(text: str, content: Any) -> None:
        sealed = json.dumps(
            {"member": json.dumps(content), "seal": _seal(json.dumps(content), TOKEN)}
        )
        for one in (text, json.dumps(content), sealed):
            with pytest.raises(AuthenticationError):
                Member.unseal(one, TOKEN)

    contents = json_values | json_objects(*(field.name for field in fields(Member)))
    fuzz(num_examples, check, text=st.text(), content=contents)
