"""Connections of strangers are few and short, and disturb nobody who has proved itself."""

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.harness.launch import wait_until
from torchtitan_lite.distributed import network
from torchtitan_lite.distributed.rpc import server as rpc_server
from torchtitan_lite.distributed.rpc.client import RpcClient
from torchtitan_lite.distributed.rpc.protocol import ClientStream, Identity, ServerStream
from torchtitan_lite.distributed.rpc.server import Connections, RpcServer, Service
from torchtitan_lite.distributed.rpc.strangers import StrangerLimits, Strangers

SECRET = "a secret of the run"
_IDENTITY = Identity("Echo", SECRET, "e")
_OPENING = ClientStream(_IDENTITY).opening


def _services() -> list[Service]:
    return [Service(_IDENTITY, {"Echo": lambda request: request})]


@pytest.fixture
def server() -> Iterator[RpcServer]:
    with RpcServer("127.0.0.1:0", _services, name="echo") as made:
        yield made


def _client(server: RpcServer) -> RpcClient:
    return RpcClient(server.address, "Echo", SECRET, "e")


@contextmanager
def _strangers(server: RpcServer, number: int, content: bytes) -> Iterator[list[socket.socket]]:
    host, _, port = server.address.rpartition(":")
    held = []
    try:
        for _ in range(number):
            held.append(socket.create_connection((host, int(port)), 5.0))
            with suppress(OSError):
                held[-1].sendall(content)
        yield held
    finally:
        for stranger in held:
            stranger.close()


def _connections(server: RpcServer) -> list[Any]:
    """Return the connections that the server has accepted."""
    port = int(server.address.rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    return [one for one in found if one.laddr.port == port and one.raddr]


@pytest.mark.parametrize("content", [b"", _OPENING[:20], _OPENING], ids=["none", "part", "opening"])
def test_strangers_are_bounded_and_disturb_nobody(server: RpcServer, content: bytes) -> None:
    with _client(server) as client:
        client.call("Echo", {}, 30)
        (own,) = _connections(server)
        with _strangers(server, 300, content):
            assert client.call("Echo", {"a": 1}, 30) == {"a": 1}
            wait_until(lambda: len(_connections(server)) <= rpc_server._LIMITS.per_address + 1, 10)
            # The client has kept its connection, and another one is let in.
            assert own.raddr in {one.raddr for one in _connections(server)}
            with _client(server) as another:
                assert another.call("Echo", {"a": 2}, 30) == {"a": 2}


@pytest.mark.parametrize("content", [b"", _OPENING], ids=["none", "opening"])
def test_a_stranger_is_cut_in_time(
    content: bytes, server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _client(server) as client:
        client.call("Echo", {}, 30)
        (own,) = _connections(server)
        monkeypatch.setattr(rpc_server, "PROVE_S", 0.5)
        with _strangers(server, 1, content) as (stranger,):
            began_s = time.monotonic()
            stranger.settimeout(10)
            with suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
            assert time.monotonic() < began_s + 10
        wait_until(lambda: [c.raddr for c in _connections(server)] == [own.raddr], 10)
        assert client.call("Echo", {"a": 1}, 30) == {"a": 1}


def test_a_large_message_passes(server: RpcServer) -> None:
    content = {"text": "x" * 900_000}
    with _client(server) as client:
        assert client.call("Echo", content, 30) == content


def test_without_descriptors_the_server_waits_and_recovers(
    server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_calls = 0
    accept = socket.socket.accept

    def failing(listener: socket.socket) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    began_s = time.monotonic()
    with _client(server) as client:
        assert client.call("Echo", {}, 30) == {}
    assert time.monotonic() >= began_s + 2 * rpc_server._EXHAUSTED_S


def test_strangers_leave_a_reserve(server: RpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with _client(server) as client:
        client.call("Echo", {}, 30)
        monkeypatch.setattr(rpc_server, "leaves_reserve", lambda descriptor: False)
        with _strangers(server, 5, b""):
            wait_until(lambda: len(_connections(server)) == 1, 10)
            assert client.call("Echo", {"a": 1}, 30) == {"a": 1}


def test_nothing_is_left_behind() -> None:
    num_open: list[int] = []
    for _ in range(12):
        with (
            RpcServer("127.0.0.1:0", _services, name="echo") as server,
            _strangers(server, 5, _OPENING),
            _client(server) as client,
        ):
            client.call("Echo", {}, 30)
        num_open.append(psutil.Process().num_fds())
    assert num_open[-1] <= num_open[1] + 2


def test_a_name_listens_at_all_its_addresses_and_one_port() -> None:
    with RpcServer("localhost:0", _services, name="echo") as server:
        with _client(server) as client:
            assert client.call("Echo", {}, 30) == {}
        port = int(server.address.rpartition(":")[2])
        listening = [
            one.laddr.port
            for one in psutil.Process().net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port
        ]
        assert listening
    with RpcServer("[::]:0", _services, name="echo") as server:
        port = int(server.address.rpartition(":")[2])
        with RpcClient(f"127.0.0.1:{port}", "Echo", SECRET, "e") as client:
            assert client.call("Echo", {}, 30) == {}


def test_the_connections_of_a_process_with_a_server_are_listed(server: RpcServer) -> None:
    with _client(server) as client:
        client.call("Echo", {}, 30)
        before = psutil.Process().num_fds()
        for _ in range(20):
            assert network.connections()
        assert psutil.Process().num_fds() < before + 10


class _Connection(rpc_server._Connection):
    is_cut = False

    def abort(self) -> None:
        self.is_cut = True


def _connected() -> tuple[Any, _Connection]:
    connections: Any = object.__new__(Connections)
    connection = _Connection(connections, ServerStream([]))
    connections._open = {connection}
    connections._strangers = Strangers(StrangerLimits(in_all=9, per_address=9))
    connections._strangers.add(connection, "an address")
    return connections, connection


def test_a_closed_connection_is_no_stranger_any_more() -> None:
    connections, connection = _connected()
    connections.forget(connection)
    assert not connections._drop_idlest() and not connections._open


def test_a_stranger_gives_way_when_no_descriptor_is_left() -> None:
    connections, connection = _connected()
    connections._loop = SimpleNamespace(
        remove_reader=lambda listener: None, call_later=lambda *arguments: None
    )

    def accept() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    connections._accept(SimpleNamespace(accept=accept))
    assert connection.is_cut
