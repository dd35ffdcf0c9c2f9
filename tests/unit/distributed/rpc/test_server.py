"""Authenticated calls over real sockets: strangers change nothing, requests are bounded."""

import asyncio
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.harness.launch import wait_until
from torchtitan_lite.core.errors import RpcError, RpcStatus
from torchtitan_lite.distributed.rpc import protocol
from torchtitan_lite.distributed.rpc import server as rpc_server
from torchtitan_lite.distributed.rpc.client import RpcClient
from torchtitan_lite.distributed.rpc.protocol import Identity
from torchtitan_lite.distributed.rpc.server import CallError, RpcServer, Service

SECRET, SERVICE = "a secret of the tests", "tests.Echo"


class Echo:
    """Service that counts its calls."""

    def __init__(self) -> None:
        self.calls = self.cancelled = 0

    def echo(self, request: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        if request.get("fail"):
            raise CallError(RpcStatus.FAILED_PRECONDITION, "It was asked to fail.")
        return {"echo": request}

    async def wait(self, request: dict[str, Any]) -> dict[str, Any]:
        """Wait until the client cancels, as those do that give up."""
        try:
            await asyncio.sleep(request["seconds"])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.echo(request)

    def services(self) -> list[Service]:
        identity = Identity(SERVICE, SECRET, "echo")
        return [Service(identity, {"Echo": self.echo, "Wait": self.wait})]


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(echo: Echo) -> Iterator[RpcServer]:
    made = RpcServer("127.0.0.1:0", echo.services, name="echo").start()
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
        assert caught.value.code is RpcStatus.FAILED_PRECONDITION


def test_a_client_opens_a_new_session_with_a_restarted_server(echo: Echo) -> None:
    first = RpcServer("127.0.0.1:0", echo.services, name="echo").start()
    with _client(first) as client:
        client.call("Echo", {}, 30)
        first.stop()
        again = RpcServer(first.address, echo.services, name="echo").start()
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
    with _client(server) as client:
        client.call("Echo", {}, 30)
        mac = protocol.Frames._mac

        def altered(frames: Any, direction: bytes, number: int, content: bytes) -> bytes:
            return mac(frames, direction, number, content.replace(b"result", b"Result"))

        monkeypatch.setattr(protocol.Frames, "_mac", altered)
        # Both sides compute the same for requests, and something else than was sent for responses.
        encode = protocol.Frames.encode

        def encoded(frames: Any, message: Any) -> bytes:
            return encode(frames, message).replace(b'"result"', b'"Result"')

        monkeypatch.setattr(protocol.Frames, "encode", encoded)
        with pytest.raises(RpcError, match="another format"):
            client.call("Echo", {}, 30)
        monkeypatch.setattr(protocol.Frames, "_mac", mac)
        with pytest.raises(RpcError, match="cannot be trusted: A frame is altered"):
            client.call("Echo", {}, 30)
        monkeypatch.setattr(protocol.Frames, "encode", encode)
        assert client.call("Echo", {}, 30) == {"echo": {}}


def test_recorded_requests_change_nothing(server: RpcServer, echo: Echo) -> None:
    """Through a relay that records what a client sends."""
    recorded: list[bytes] = []
    host, _, port = server.address.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = threading.Thread(target=_relay, args=(listener, (host, int(port)), recorded))
        relay.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with RpcClient(address, SERVICE, SECRET, "echo") as client:
            client.call("Echo", {"i": 1}, 30)
        relay.join(10)
    sent = b"".join(recorded)
    assert b'"i":1' in sent and SECRET.encode() not in sent
    with socket.create_connection((host, int(port)), 10) as stranger:
        stranger.sendall(sent)
        # The answer to the opening, then the end.
        answer = b""
        with suppress(ConnectionResetError):
            while part := stranger.recv(4096):
                answer += part
        assert b"result" not in answer
    assert echo.calls == 1


def _relay(listener: socket.socket, server: tuple[str, int], recorded: list[bytes]) -> None:
    client, _ = listener.accept()
    with client, socket.create_connection(server) as upstream:
        while True:
            for ready in select.select([client, upstream], [], [])[0]:
                data = ready.recv(65536)
                if not data:
                    return
                if ready is client:
                    recorded.append(data)
                (upstream if ready is client else client).sendall(data)


def test_a_large_request_is_rejected(server: RpcServer, echo: Echo) -> None:
    with _client(server) as client, pytest.raises(RpcError, match="is too large: the maximum"):
        client.call("Echo", {"text": "x" * (2 << 20)}, 30)
    assert echo.calls == 0


def test_a_call_that_nobody_waits_for_is_cancelled(server: RpcServer, echo: Echo) -> None:
    with _client(server) as client:
        with pytest.raises(RpcError, match="did not answer in 0.2 s") as caught:
            client.call("Wait", {"seconds": 60}, 0.2)
        assert caught.value.code is RpcStatus.DEADLINE_EXCEEDED
        wait_until(lambda: echo.cancelled == 1, 10)
        assert client.call("Echo", {}, 30) == {"echo": {}}
        # And if its client has gone.
        with ThreadPoolExecutor(1) as threads:
            pending = threads.submit(client.call, "Wait", {"seconds": 60}, 60)
            wait_until(lambda: server.run_on_loop(_num_pending), 10)
            client.close()
            with pytest.raises(RpcError, match="the client is closed"):
                pending.result(10)
        wait_until(lambda: echo.cancelled == 2, 10)
    with pytest.raises(RpcError, match="the client is closed"):
        client.call("Echo", {}, 1)


def _num_pending() -> int:
    return sum("_wait" in repr(task) for task in asyncio.all_tasks())


def test_the_pending_calls_of_a_client_are_bounded(
    server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_server, "_MAX_CALLS", 2)
    with _client(server) as client, _client(server) as another, ThreadPoolExecutor(2) as threads:
        pending = [threads.submit(client.call, "Wait", {"seconds": 1}, 30) for _ in range(2)]
        wait_until(lambda: server.run_on_loop(_num_pending) == 2, 10)
        with pytest.raises(RpcError, match="2 calls are pending") as caught:
            client.call("Wait", {"seconds": 1}, 30)
        assert not caught.value.is_final
        assert another.call("Wait", {"seconds": 0}, 30) == {"echo": {"seconds": 0}}
        assert [call.result(30) for call in pending] == [{"echo": {"seconds": 1}}] * 2


@pytest.mark.parametrize("call", ["Nothing", ""])
def test_an_unknown_call_is_rejected(server: RpcServer, call: str) -> None:
    with _client(server) as client, pytest.raises(RpcError, match="There is no call") as caught:
        client.call(call, {}, 30)
    assert caught.value.code is RpcStatus.UNIMPLEMENTED and caught.value.is_final


def test_an_unknown_service_has_no_answer(server: RpcServer) -> None:
    with (
        RpcClient(server.address, "tests.Other", SECRET, "echo") as client,
        pytest.raises(RpcError, match="the connection was closed") as caught,
    ):
        client.call("Echo", {}, 30)
    assert not caught.value.is_final


def test_a_client_works_in_a_forked_process(server: RpcServer) -> None:
    with _client(server) as client:
        client.call("Echo", {}, 30)
    pid = os.fork()
    if not pid:
        with _client(server) as own:
            os._exit(0 if own.call("Echo", {"a": 1}, 30) == {"echo": {"a": 1}} else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_half_open_connections_cost_no_threads_and_block_nobody(server: RpcServer) -> None:
    with _client(server) as client:
        client.call("Echo", {}, 30)
        threads = psutil.Process().num_threads()
        host, _, port = server.address.rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(300)]
        try:
            for stranger in strangers[::2]:
                stranger.sendall(protocol._MAGIC)
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
        RpcServer(server.address, echo.services, name="echo").start()


def test_a_server_that_could_not_start_needs_no_stop() -> None:
    def fail() -> Any:
        raise RpcError("the lighthouse cannot be opened")

    server = RpcServer("127.0.0.1:0", fail, name="server")
    for _ in range(2):
        with pytest.raises(RpcError, match="the lighthouse cannot be opened"):
            server.start()
        assert server._thread is None
        server.stop()
