"""Ranges of bytes of a served state, and connections that end."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

import pytest

from torchtitan_lite.core.errors import RpcError
from torchtitan_lite.distributed.rpc import state_client, state_server
from torchtitan_lite.distributed.rpc.state_client import (
    PeerEndpoint,
    StateConnection,
    split_into_chunks,
)
from torchtitan_lite.distributed.rpc.state_server import (
    MAX_RANGES,
    ByteRows,
    FramedState,
    StateServer,
)

DATA = bytes(range(256)) * 40
HEADER = b"header"
FIRST = 8 + len(HEADER)
SECRET = "a secret of the run"


@pytest.fixture
def server() -> Iterator[StateServer]:
    found = StateServer("127.0.0.1", SECRET, "test")
    found.offer(3, FramedState(HEADER, DATA))
    yield found
    found.close()


@pytest.fixture
def connection(server: StateServer) -> Iterator[StateConnection]:
    found = StateConnection(PeerEndpoint(server.url, SECRET, "test", 10.0), 3)
    yield found
    found.close()


def fetched(connection: StateConnection, rows: list[ByteRows]) -> list[bytes]:
    targets = [bytearray(one.num_bytes) for one in rows]
    shifted = [one._replace(start=FIRST + one.start) for one in rows]
    connection.fetch(shifted, [memoryview(target) for target in targets])
    return [bytes(target) for target in targets]


def expected(rows: ByteRows) -> bytes:
    starts = (rows.start + row * rows.stride for row in range(rows.num_rows))
    return b"".join(DATA[start : start + rows.length] for start in starts)


def test_a_state_in_pieces_is_read_as_one() -> None:
    state = FramedState(HEADER, b"", DATA[:5], DATA[5:6], b"", DATA[6:20])
    whole = len(HEADER).to_bytes(8, "little") + HEADER + DATA[:20]
    assert state.length == len(whole)
    for start in range(len(whole)):
        for stop in range(start + 1, len(whole) + 1):
            pieces = list(state.read(start, stop))
            assert all(map(len, pieces)) and b"".join(pieces) == whole[start:stop]


@pytest.mark.parametrize(
    "rows",
    [
        [ByteRows(0, len(DATA))],
        [ByteRows(7, 3, 20, 100)],
        [ByteRows(0, 1), ByteRows(500, 10), ByteRows(5, 2, 3, 50), ByteRows(100, 1)],
        # Rows may overlap, and ranges need no order.
        [ByteRows(300, 20, 4, 10), ByteRows(0, 5)],
        [ByteRows(n, 1) for n in range(MAX_RANGES)],
        # Its last row ends with the state.
        [ByteRows(0, 10, 2, len(DATA) - 10)],
    ],
)
def test_ranges_of_one_request(rows: list[ByteRows], connection: StateConnection) -> None:
    assert connection.fetch_header() == HEADER
    assert fetched(connection, rows) == [expected(one) for one in rows]


@pytest.mark.parametrize(
    "rows",
    [
        [ByteRows(0, len(DATA) + 1)],
        [ByteRows(0, 1), ByteRows(len(DATA), 1)],
        [ByteRows(0, 10, 2, len(DATA))],
        [ByteRows(n, 1) for n in range(MAX_RANGES + 1)],
    ],
)
def test_ranges_beyond_the_state_or_a_limit_are_rejected(
    rows: list[ByteRows], connection: StateConnection
) -> None:
    with pytest.raises(RpcError, match="HTTP 416"):
        fetched(connection, rows)
    # The connection can still be used.
    assert fetched(connection, [ByteRows(1, 2)]) == [DATA[1:3]]


def test_many_rows_are_rejected(
    connection: StateConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_server, "MAX_ROWS", 5)
    rows = [ByteRows(0, 1, 3, 7), ByteRows(9, 1, 2, 7)]
    assert fetched(connection, rows) == [expected(one) for one in rows]
    with pytest.raises(RpcError, match="HTTP 416"):
        fetched(connection, [*rows, ByteRows(0, 1)])


def test_a_large_target_is_filled_piece_by_piece(
    connection: StateConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_client, "_PIECE_BYTES", 1000)
    assert fetched(connection, [ByteRows(0, len(DATA))]) == [DATA]


def test_what_is_withdrawn_is_not_in_preparation(
    server: StateServer, connection: StateConnection
) -> None:
    for version, prepared in ((None, 0), (4, 7)):
        server.prepare(3, 7)
        server.withdraw(3)
        server.withdraw(version)
        with pytest.raises(state_client._NotReady) as error:
            connection.fetch_range(0, [memoryview(bytearray(1))])
        assert error.value.prepared == prepared


def test_many_large_ranges_are_rejected(
    connection: StateConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_server, "_MAX_RESPONSE_BYTES", 1000)
    assert len(fetched(connection, [ByteRows(0, 2000)])[0]) == 2000
    for rows in ([ByteRows(0, 600), ByteRows(0, 401)], [ByteRows(0, 501, 2, 1)]):
        with pytest.raises(RpcError, match="HTTP 416"):
            fetched(connection, rows)


@pytest.mark.parametrize(
    "text", ["", "bytes=", "bytes=5", "bytes=5-4", "bytes=0-1,", "bytes=0-1;rows=2", "0-1"]
)
def test_malformed_ranges_are_rejected(text: str, connection: StateConnection) -> None:
    with pytest.raises(RpcError, match="HTTP 416"):
        connection._fetch(text, 1, [memoryview(bytearray(1))])


def test_a_client_waits_for_another_state(server: StateServer, connection: StateConnection) -> None:
    def waited_s(timeout_s: float) -> float:
        began_s = time.monotonic()
        connection.wait_for_change(timeout_s)
        return time.monotonic() - began_s

    # It has seen none yet.
    assert waited_s(5.0) < 1.0
    assert 0.2 <= waited_s(0.2) < 2.0
    for state, version, is_same in ((b"beside it", 4, True), (b"other", 3, False)):
        offer = partial(server.offer, version, FramedState(state), keep=[3])
        timer = threading.Timer(0.2, offer)
        timer.start()
        assert (waited_s(1.0) >= 1.0) is is_same
        timer.join()
    server.offer(3, FramedState(b"before the wait"))
    assert waited_s(5.0) < 1.0
    threading.Timer(0.2, server.withdraw).start()
    with pytest.raises(RpcError, match="HTTP 503"):
        waited_s(5.0)


@pytest.mark.parametrize("text", ["", "1", "1 x", "-1 5", "1 999999", "1 5 5"])
def test_a_malformed_wait_is_none(text: str, connection: StateConnection) -> None:
    connection.fetch_header()
    began_s = time.monotonic()
    connection.fetch([ByteRows(0, 1)], [memoryview(bytearray(1))], text)
    assert time.monotonic() - began_s < 1.0


def test_a_connection_that_the_server_closed_is_replaced(connection: StateConnection) -> None:
    assert fetched(connection, [ByteRows(0, 1)]) == [DATA[:1]]
    # As a server does after 30 s without a request.
    assert connection._http.sock is not None
    connection._http.sock.shutdown(socket.SHUT_RDWR)
    assert fetched(connection, [ByteRows(5, 2)]) == [DATA[5:7]]


def test_a_session_of_an_earlier_server_is_replaced(server: StateServer) -> None:
    connection = StateConnection(PeerEndpoint(server.url, SECRET, "test", 10.0), 3)
    assert fetched(connection, [ByteRows(0, 1)]) == [DATA[:1]]
    address = server._server.server_address
    server.close()
    again = StateServer("127.0.0.1", SECRET, "test", listener=socket.create_server(address[:2]))
    again.offer(3, FramedState(HEADER, DATA))
    # The connections of a process end with it.
    assert connection._http.sock is not None
    connection._http.sock.shutdown(socket.SHUT_RDWR)
    assert fetched(connection, [ByteRows(9, 1)]) == [DATA[9:10]]
    again.close()
    connection.close()
    with pytest.raises(RpcError, match="cannot be read"):
        fetched(connection, [ByteRows(0, 1)])


def test_headers_of_other_lengths_follow_each_other(
    server: StateServer, connection: StateConnection
) -> None:
    # The same, a longer, a shorter one, and one of a state that is shorter than the last header.
    for header, data in (
        (HEADER, DATA),
        (HEADER, DATA),
        (HEADER * 3, DATA),
        (HEADER, DATA),
        (HEADER * 9, b""),
        (b"h", b""),
        (HEADER, DATA),
    ):
        server.offer(3, FramedState(header, data))
        assert connection.fetch_header() == header


def test_a_state_is_awaited_at_the_server(
    server: StateServer, connection: StateConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.select(5)
    # As a publisher does its status; what is older than the newest state is gone.
    server.offer(1 << 59, FramedState(HEADER), keep=[3])
    with pytest.raises(RpcError, match="HTTP 404"):
        connection.fetch_header()
    monkeypatch.setattr(state_client, "_TICK_MS", 5000)
    offer = partial(server.offer, 5, FramedState(HEADER, DATA), keep=[1 << 59])
    timer = threading.Timer(0.2, offer)
    timer.start()
    began_s = time.monotonic()
    assert connection.fetch_header() == HEADER
    assert time.monotonic() - began_s < 4.0
    timer.join()


def test_offers_of_two_servers_differ(server: StateServer, connection: StateConnection) -> None:
    connection.fetch_header()
    first = connection.serial
    server.offer(3, FramedState(HEADER, DATA))
    connection.fetch_header()
    assert connection.serial == first + 1
    other = StateServer("127.0.0.1", SECRET, "test")
    other.offer(3, FramedState(HEADER, DATA))
    elsewhere = StateConnection(PeerEndpoint(other.url, SECRET, "test", 10.0), 3)
    elsewhere.fetch_header()
    assert abs(elsewhere.serial - first) > 1
    elsewhere.close()
    other.close()


def test_the_content_of_an_error_is_not_read(
    connection: StateConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fill the memory."""

    def send_endlessly(
        handler: BaseHTTPRequestHandler, session: object, status: HTTPStatus, *_: object
    ) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(1 << 50))
        handler.end_headers()
        with suppress(OSError):
            while True:
                handler.wfile.write(bytes(1 << 16))

    monkeypatch.setattr(state_server._Handler, "_reject", send_endlessly)
    monkeypatch.setattr(state_client, "_UNPROVEN_S", 0.0)
    connection.select(9)
    with pytest.raises(RpcError, match="HTTP 503"):
        connection.fetch_range(0, [memoryview(bytearray(1))])


@pytest.mark.parametrize("status", ["200 OK", "206 Partial Content", "503 Service Unavailable"])
def test_the_content_of_a_stranger_is_not_read(
    status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_client, "_UNPROVEN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                stream, _ = listener.accept()
                stream.recv(4096)
                head = f"HTTP/1.1 {status}\r\nContent-Length: {1 << 50}\r\n\r\n"
                with stream, suppress(OSError):
                    stream.sendall(head.encode())
                    while True:
                        stream.sendall(bytes(1 << 16))

        thread = threading.Thread(target=answer)
        thread.start()
        host, port = listener.getsockname()
        endpoint = PeerEndpoint(f"http://{host}:{port}", SECRET, "test", 10.0)
        connection = StateConnection(endpoint, 3)
        with pytest.raises(RpcError, match=f"HTTP {status[:3]}"):
            connection.fetch_range(0, [memoryview(bytearray(1))])
        connection.close()
        thread.join(10)
        assert not thread.is_alive()


def test_chunks_cover_each_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_client, "_CHUNK_BYTES", 10)
    targets = [(0, memoryview(bytearray(25))), (25, memoryview(bytearray(3)))]
    chunks = split_into_chunks(targets)
    assert [(one.start, list(map(len, one.targets))) for one in chunks] == [
        (0, [10]),
        (10, [10]),
        (20, [5, 3]),
    ]
