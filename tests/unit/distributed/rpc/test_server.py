"""Authenticated calls over real sockets: strangers change nothing, requests are bounded."""

import socket
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest

from torchtitan_lite.core.errors import RpcError
from torchtitan_lite.distributed.rpc import authentication
from torchtitan_lite.distributed.rpc import client as rpc_client
from torchtitan_lite.distributed.rpc.authentication import ServerSessions
from torchtitan_lite.distributed.rpc.client import RpcClient
from torchtitan_lite.distributed.rpc.messages import AUTHORIZATION, method_of
from torchtitan_lite.distributed.rpc.server import (
    CallError,
    RpcServer,
    Trust,
    authenticated_service,
)

SECRET, SERVICE = "a secret of the tests", "tests.Echo"


class Echo:
    """Service that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def echo(self, request: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        if request.get("fail"):
            raise CallError(grpc.StatusCode.FAILED_PRECONDITION, "It was asked to fail.")
        return {"echo": request}

    def handlers(self, trust: Trust) -> list[grpc.GenericRpcHandler]:
        sessions = ServerSessions(SECRET, "echo")
        return [authenticated_service(SERVICE, sessions, {"Echo": self.echo}, trust)]


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(echo: Echo) -> Iterator[RpcServer]:
    made = RpcServer("127.0.0.1:0", echo.handlers, name="echo").start()
    yield made
    made.stop()


def _client(server: RpcServer, secret: str = SECRET, purpose: str = "echo") -> RpcClient:
    return RpcClient(server.address, SERVICE, secret, purpose)


def test_a_call_returns_what_the_handler_returns(server: RpcServer) -> None:
    with _client(server) as client, ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda i: client.call("Echo", {"i": i}, 30), range(50))
        assert list(answers) == [{"echo": {"i": i}} for i in range(50)]
        with pytest.raises(RpcError, match="asked to fail") as caught:
            client.call("Echo", {"fail": True}, 30)
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_a_client_opens_a_new_session_with_a_restarted_server(echo: Echo) -> None:
    first = RpcServer("127.0.0.1:0", echo.handlers, name="echo").start()
    with _client(first) as client:
        client.call("Echo", {}, 30)
        first.stop()
        again = RpcServer(first.address, echo.handlers, name="echo").start()
        deadline_s = time.monotonic() + 30
        while True:
            try:
                client.call("Echo", {}, 5)
                break
            except RpcError:
                assert time.monotonic() < deadline_s
        again.stop()


@pytest.mark.parametrize(("secret", "purpose"), [("another secret of them", "echo"), (SECRET, "x")])
def test_a_client_with_another_secret_trusts_no_answer(
    server: RpcServer, echo: Echo, secret: str, purpose: str
) -> None:
    with _client(server, secret, purpose) as client, pytest.raises(RpcError, match="trusted"):
        client.call("Echo", {}, 30)
    assert echo.calls == 0


def test_an_altered_response_is_not_trusted(
    server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign = authentication.ServerSession.sign
    monkeypatch.setattr(
        authentication.ServerSession, "sign", lambda session, response: sign(session, b"another")
    )
    with _client(server) as client, pytest.raises(RpcError, match="cannot be trusted"):
        client.call("Echo", {}, 30)


def test_recorded_and_forged_requests_change_nothing(
    server: RpcServer, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[tuple[bytes, str]] = []
    signed = rpc_client._Protocol.request

    def record(self: Any, *arguments: Any) -> Any:
        request, proof = signed(self, *arguments)
        recorded.append((request, str(proof)))
        return request, proof

    monkeypatch.setattr(rpc_client._Protocol, "request", record)
    with _client(server) as client:
        client.call("Echo", {"i": 1}, 30)
    ((request, proof),) = recorded
    assert SECRET.encode() not in request and SECRET not in proof
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(method_of(SERVICE, "Echo"))
        for content, header in [
            (request, proof),
            (b'{"i":2}', proof),
            (request, ""),
            (request, "Bearer " + SECRET),
        ]:
            with pytest.raises(grpc.RpcError) as caught:
                call(content, metadata=((AUTHORIZATION, header),), timeout=30)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # pyright: ignore[reportAttributeAccessIssue]
    assert echo.calls == 1


def test_a_large_request_is_rejected(server: RpcServer, echo: Echo) -> None:
    with _client(server) as client, pytest.raises(RpcError, match="larger than max"):
        client.call("Echo", {"text": "x" * (2 << 20)}, 30)
    assert echo.calls == 0


def test_half_open_connections_cost_no_threads_and_block_nobody(server: RpcServer) -> None:
    with _client(server) as client:
        client.call("Echo", {}, 30)
        threads = psutil.Process().num_threads()
        host, _, port = server.address.rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(300)]
        try:
            for stranger in strangers[::2]:
                stranger.sendall(b"PRI * HTTP/2.0\r\n")
            assert client.call("Echo", {}, 30) == {"echo": {}}
            assert psutil.Process().num_threads() < threads + 50
        finally:
            for stranger in strangers:
                stranger.close()


def test_a_stopped_server_rejects_calls(server: RpcServer) -> None:
    assert server.run_on_loop(threading.get_ident) != threading.get_ident()
    server.stop()
    server.stop()
    with pytest.raises(RpcError, match="is not running"):
        server.run_on_loop(threading.get_ident)
    with _client(server) as client, pytest.raises(RpcError, match="Nothing answers"):
        client.call("Echo", {}, 2)


def test_an_address_in_use_is_rejected(server: RpcServer, echo: Echo) -> None:
    with pytest.raises(RpcError, match="another process listens there"):
        RpcServer(server.address, echo.handlers, name="echo").start()


def test_calls_of_several_threads_survive_an_expired_session(
    server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _client(server) as client, ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            client.call("Echo", {}, 30)
            later_s = time.monotonic() + authentication.SESSION_S
            clock = types.SimpleNamespace(monotonic=lambda at_s=later_s: at_s)
            monkeypatch.setattr(authentication, "time", clock)
            answers = threads.map(lambda i: client.call("Echo", {"i": i}, 30), range(8))
            assert list(answers) == [{"echo": {"i": i}} for i in range(8)]
            monkeypatch.undo()
            client._protocol.session = None


def test_a_server_that_could_not_start_needs_no_stop() -> None:
    def fail(trust: Trust) -> Any:
        raise RpcError("the lighthouse cannot be opened")

    server = RpcServer("127.0.0.1:0", fail, name="server")
    for _ in range(2):
        with pytest.raises(RpcError, match="the lighthouse cannot be opened"):
            server.start()
        assert server._thread is None
        server.stop()
