"""Strangers at HTTP servers: few connections, for a short time, however their bytes arrive."""

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import psutil
import pytest

from tests.harness.launch import wait_until
from tests.unit.fuzzing import forged_server
from torchtitan_lite.core.errors import RpcError
from torchtitan_lite.distributed.rpc import descriptors, http_server
from torchtitan_lite.distributed.rpc.deadline_reader import DeadlineReader
from torchtitan_lite.distributed.rpc.http_server import BoundedHandler, BoundedHTTPServer
from torchtitan_lite.distributed.rpc.state_client import PeerEndpoint, StateConnection
from torchtitan_lite.distributed.rpc.state_server import FramedState, StateServer

SECRET = "a secret of the run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StateServer]:
    monkeypatch.setattr(http_server, "STRANGER_S", 1.0)
    monkeypatch.setattr(BoundedHandler, "timeout", 1.0)
    made = StateServer("127.0.0.1", SECRET, "test")
    made.offer(3, FramedState(b"header", b"data"))
    yield made
    made.close()


def _port(server: StateServer) -> int:
    return int(server._server.server_address[1])


def _connection(server: StateServer, timeout_s: float = 5.0) -> StateConnection:
    return StateConnection(PeerEndpoint(server.url, SECRET, "test", timeout_s), 3)


def _drip(stream: socket.socket, content: bytes, interval_s: float) -> float:
    """Send one byte per interval until the server closes the connection, and return when it did, in
    seconds."""
    began_s = time.monotonic()
    stream.settimeout(interval_s)
    with suppress(ConnectionError, BrokenPipeError):
        for index in range(len(content)):
            stream.sendall(content[index : index + 1])
            with suppress(TimeoutError):
                if not stream.recv(1 << 16):
                    break
    return time.monotonic() - began_s


def test_a_header_byte_by_byte_is_cut_in_time(server: StateServer) -> None:
    with socket.create_connection(("127.0.0.1", _port(server))) as stream:
        assert 0.9 < _drip(stream, b"GET /session HTTP/1.1\r\n" * 100, 0.05) < 10.0


def test_complete_requests_without_a_proof_do_not_extend_it(server: StateServer) -> None:
    with socket.create_connection(("127.0.0.1", _port(server))) as stream:
        began_s = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() < began_s + 10:
                stream.sendall(b"GET /session HTTP/1.1\r\nX-Nonce: " + b"0" * 32 + b"\r\n\r\n")
                if not stream.recv(1 << 16):
                    break
                time.sleep(0.05)
        assert time.monotonic() < began_s + 9


def test_a_later_request_byte_by_byte_is_cut_in_time(server: StateServer) -> None:
    with closing(_connection(server)) as connection:
        assert connection.fetch_header() == b"header"
        time.sleep(1.2)
        # It has proved itself: it may be idle for longer.
        assert connection.fetch_header() == b"header"
        stream = connection._http.sock
        assert stream is not None
        assert _drip(stream, b"GET /state/3 HTTP/1.1\r\n" * 100, 0.05) < 10.0


def test_strangers_displace_each_other_only(server: StateServer) -> None:
    with closing(_connection(server)) as connection:
        assert connection.fetch_header() == b"header"
        own = connection._http.sock
        strangers = [socket.create_connection(("127.0.0.1", _port(server))) for _ in range(60)]
        try:
            assert connection.fetch_header() == b"header" and connection._http.sock is own
            assert len(server._server._strangers) <= http_server._LIMITS.per_address
            with closing(_connection(server)) as another:
                assert another.fetch_header() == b"header"
        finally:
            for stranger in strangers:
                stranger.close()


def test_without_descriptors_a_server_waits_and_recovers(
    server: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_none = True
    num_calls = 0
    accept = socket.socket.accept

    def failing(listener: socket.socket) -> object:
        nonlocal num_calls
        num_calls += 1
        if has_none:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with closing(_connection(server)) as connection:
        fetching = threading.Thread(target=connection.fetch_header)
        fetching.start()
        time.sleep(0.4)
        # It does not spin.
        assert 1 <= num_calls < 20
        has_none = False
        fetching.join(5)
        assert not fetching.is_alive()


def test_a_reserve_is_left_to_training(
    server: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(_connection(server)) as connection:
        assert connection.fetch_header() == b"header"
        limit = psutil.Process().num_fds() + 8
        monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (limit, limit))
        monkeypatch.setattr(descriptors, "_RESERVE", 0)
        # The descriptors of this test are those of the server: two per connection.
        strangers = [socket.create_connection(("127.0.0.1", _port(server))) for _ in range(12)]
        wait_until(lambda: len(server._server._strangers) <= 4, 5)
        assert connection.fetch_header() == b"header"
        for stranger in strangers:
            stranger.close()


def test_an_answer_byte_by_byte_is_given_up_in_time() -> None:
    with forged_server(interval_s=0.05) as stranger:
        stranger.answer = b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 90
        url = f"http://127.0.0.1:{stranger.port}"
        with closing(StateConnection(PeerEndpoint(url, SECRET, "test", 1.0), 3)) as connection:
            began_s = time.monotonic()
            with pytest.raises(RpcError, match="cannot be read"):
                connection.fetch_header()
            assert time.monotonic() < began_s + 10


def test_an_address_that_is_no_address_is_an_error() -> None:
    with pytest.raises(OSError):
        BoundedHTTPServer(("192.0.2.1", 0), BoundedHandler)


def test_a_silent_peer_is_noticed_before_the_deadline() -> None:
    near, far = socket.socketpair()
    with near, far, closing(DeadlineReader(near, 60.0)) as reader:
        far.sendall(b"a")
        assert reader.read(1) == b"a"
        reader.allow(60.0, idle_s=0.1)
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            reader.read(1)
        assert time.monotonic() < began_s + 5
