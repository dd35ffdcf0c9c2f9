"""The gate of a gRPC server: strangers are few and short, and disturb nobody who has proved
itself."""

import errno
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest

from tests.harness.launch import wait_until
from torchtitan_lite.distributed import network
from torchtitan_lite.distributed.rpc import gate
from torchtitan_lite.distributed.rpc.authentication import ServerSessions
from torchtitan_lite.distributed.rpc.client import RpcClient
from torchtitan_lite.distributed.rpc.messages import HELLO, method_of
from torchtitan_lite.distributed.rpc.server import RpcServer, Trust, authenticated_service
from torchtitan_lite.distributed.rpc.strangers import StrangerLimits, Strangers

_Gate = gate.Gate
SECRET = "a secret of the run"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""Preface of HTTP/2 with empty settings (RFC 9113, 3.4)."""


async def _peer(request: dict[str, Any]) -> dict[str, Any]:
    return request


def _handlers(trust: Trust) -> list[grpc.GenericRpcHandler]:
    return [authenticated_service("Echo", ServerSessions(SECRET, "e"), {"Echo": _peer}, trust)]


@pytest.fixture
def server() -> Iterator[RpcServer]:
    with RpcServer("127.0.0.1:0", _handlers, name="echo") as made:
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
        for one in held:
            one.close()


def _connections(server: RpcServer) -> list[Any]:
    """Return the connections that the server has accepted."""
    port = int(server.address.rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    return [one for one in found if one.laddr.port == port and one.raddr]


@pytest.mark.parametrize("content", [b"", _PREFACE[:20], _PREFACE])
def test_strangers_are_bounded_and_disturb_nobody(server: RpcServer, content: bytes) -> None:
    with _client(server) as client:
        client.call("Echo", {}, 30)
        (own,) = _connections(server)
        with _strangers(server, 300, content):
            assert client.call("Echo", {"a": 1}, 30) == {"a": 1}
            wait_until(lambda: len(_connections(server)) <= gate._LIMITS.per_address + 1, 10)
            # The client has kept its connection, and another one is let in.
            assert own.raddr in {one.raddr for one in _connections(server)}
            with _client(server) as another:
                assert another.call("Echo", {"a": 2}, 30) == {"a": 2}


@pytest.mark.parametrize("says_hello", [False, True])
def test_a_stranger_is_cut_in_time(
    says_hello: bool, server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _client(server) as client:
        client.call("Echo", {}, 30)
        (own,) = _connections(server)
        monkeypatch.setattr(gate, "PROVE_S", 0.5)
        if says_hello:
            with grpc.insecure_channel(server.address) as channel:
                hello = channel.unary_unary(method_of("Echo", HELLO))
                assert hello(bytes(16), timeout=30)
                wait_until(lambda: len(_connections(server)) == 1, 10)
        else:
            with _strangers(server, 1, _PREFACE) as (stranger,):
                began_s = time.monotonic()
                stranger.settimeout(10)
                while stranger.recv(4096):
                    pass
                assert time.monotonic() < began_s + 10
        wait_until(lambda: [one.raddr for one in _connections(server)] == [own.raddr], 10)
        assert client.call("Echo", {"a": 1}, 30) == {"a": 1}


def test_without_proofs_the_idlest_is_displaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "PROVE_S", 0.1)
    monkeypatch.setattr(gate, "_UNPROVEN_LIMITS", StrangerLimits(in_all=3, per_address=3))
    with (
        RpcServer("127.0.0.1:0", _handlers, name="echo", must_prove=False) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        hello = channel.unary_unary(method_of("Echo", HELLO))
        assert hello(bytes(16), timeout=30)
        (own,) = _connections(server)
        time.sleep(0.3)
        for _ in range(4):
            with _strangers(server, 2, b""):
                assert hello(bytes(16), timeout=30)
                assert own.raddr in {one.raddr for one in _connections(server)}


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
    assert time.monotonic() >= began_s + 2 * gate._EXHAUSTED_S


def test_strangers_leave_a_reserve(server: RpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with _client(server) as client:
        client.call("Echo", {}, 30)
        monkeypatch.setattr(gate, "leaves_reserve", lambda descriptor: False)
        with _strangers(server, 5, b""):
            wait_until(lambda: len(_connections(server)) == 1, 10)
            assert client.call("Echo", {"a": 1}, 30) == {"a": 1}


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    num_open: list[int] = []
    for _ in range(12):
        with RpcServer("127.0.0.1:0", _handlers, name="echo") as server:
            assert not list(folder.iterdir())
            with _strangers(server, 5, _PREFACE), _client(server) as client:
                client.call("Echo", {}, 30)
        num_open.append(psutil.Process().num_fds())
    # gRPC keeps some for a while.
    assert num_open[-1] < num_open[1] + 10


def test_a_name_listens_at_all_its_addresses_and_one_port() -> None:
    with RpcServer("localhost:0", _handlers, name="echo") as server:
        with _client(server) as client:
            assert client.call("Echo", {}, 30) == {}
        port = int(server.address.rpartition(":")[2])
        listening = [
            one.laddr.port
            for one in psutil.Process().net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port
        ]
        assert listening
    with RpcServer("[::]:0", _handlers, name="echo") as server:
        port = int(server.address.rpartition(":")[2])
        with RpcClient(f"127.0.0.1:{port}", "Echo", SECRET, "e") as client:
            assert client.call("Echo", {}, 30) == {}


def test_the_connections_of_a_process_with_a_server_are_listed(server: RpcServer) -> None:
    """Among its descriptors is that of the gate's socket, which is no socket itself."""
    with _client(server) as client:
        client.call("Echo", {}, 30)
        before = psutil.Process().num_fds()
        for _ in range(20):
            assert network.connections()
        assert psutil.Process().num_fds() < before + 10


class _Link:
    """A connection."""

    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def _gate(*links: _Link) -> Any:
    gate: Any = object.__new__(_Gate)
    gate._links = {str(number): link for number, link in enumerate(links)}
    gate._strangers = Strangers(StrangerLimits(in_all=9, per_address=9))
    for link in links:
        gate._strangers.add(link, "an address")
    return gate


def test_a_closed_connection_is_no_stranger_any_more() -> None:
    gate = _gate(_Link())
    gate._forget("0", SimpleNamespace(close=lambda: None))
    assert not gate._drop_idlest()


def test_a_stranger_gives_way_when_no_descriptor_is_left() -> None:
    link = _Link()
    gate = _gate(link)
    gate._loop = SimpleNamespace(remove_reader=lambda one: None, call_later=lambda *given: None)

    def accept() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    gate._accept(SimpleNamespace(accept=accept))
    assert link.is_cancelled
