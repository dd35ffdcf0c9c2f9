"""Forged bytes raise RpcError at clients, are rejected by servers, and change nothing."""

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.unit.fuzzing import (
    FEW_OR_MANY,
    ForgedServer,
    forged_server,
    fuzz,
    header_values,
    raw_messages,
    send_raw,
)
from torchtitan_lite.core.errors import RpcError, RpcStatus
from torchtitan_lite.distributed.rpc import fields, protocol, state_client, state_server
from torchtitan_lite.distributed.rpc.authentication import (
    ClientSession,
    RequestProof,
    ServerSessions,
)
from torchtitan_lite.distributed.rpc.client import RpcClient
from torchtitan_lite.distributed.rpc.fields import parse_field, printable
from torchtitan_lite.distributed.rpc.protocol import ClientStream, Identity
from torchtitan_lite.distributed.rpc.server import RpcServer, Service
from torchtitan_lite.distributed.rpc.state_client import PeerEndpoint, StateConnection
from torchtitan_lite.distributed.rpc.state_server import FramedState, StateServer

SECRET = "a secret of the run"
_HEADERS = (
    state_server.MAC,
    state_server.SERIAL,
    state_server.PREPARED,
    state_server.TICKET,
    state_server.PROOF,
)
_PROOFS = st.builds(
    RequestProof,
    nonce=st.binary(min_size=16, max_size=16),
    ticket=st.binary(min_size=40, max_size=40),
    counter=st.integers(0, 10**18 - 1),
    mac=st.binary(min_size=32, max_size=32),
).map(str)


@pytest.fixture
def server() -> Iterator[StateServer]:
    made = StateServer("127.0.0.1", SECRET, "test")
    made.offer(3, FramedState(b"header", b"data"))
    yield made
    made.close()


def _connection(port: int) -> StateConnection:
    return StateConnection(PeerEndpoint(f"http://127.0.0.1:{port}", SECRET, "test", 5.0), 3)


def _port(server: StateServer) -> int:
    return int(server._server.server_address[1])


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not retry answers without a proof."""
    monkeypatch.setattr(state_client, "_UNPROVEN_S", 0.0)


@FEW_OR_MANY
def test_a_field_is_parsed_or_rejected(num_examples: int) -> None:
    patterns = [fields.NONCE, fields.TICKET, fields.MAC, fields.NUMBER, fields.PROOF]

    def check(value: Any, pattern: Any) -> None:
        try:
            groups = parse_field("X", value, pattern)
        except RpcError as error:
            assert str(error).isprintable()
            return
        assert value.isascii()
        (int if pattern is fields.NUMBER else bytes.fromhex)(groups[0])

    values = header_values | st.none() | st.binary() | st.integers() | _PROOFS
    fuzz(num_examples, check, value=values, pattern=st.sampled_from(patterns))


def test_a_right_field_is_parsed() -> None:
    client = ClientSession(SECRET, "test")
    client.open(*ServerSessions(SECRET, "test").challenge(client.nonce))
    proof = client.sign(b"content")
    assert RequestProof.parse(str(proof)) == proof
    assert printable("\x1b[2J" + "x" * 1000) == "?[2J" + "x" * 196


def test_bytes_above_ascii_in_a_mac_are_rejected(
    server: StateServer, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forge(monkeypatch, {state_server.MAC: "\xff" * 64})
    with pytest.raises(RpcError, match="without a proof"):
        _connection(_port(server)).fetch_header()


@FEW_OR_MANY
def test_forged_headers_raise_rpc_errors(
    num_examples: int, server: StateServer, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged: dict[str, str] = {}
    _forge(monkeypatch, forged)
    connection = _connection(_port(server))

    def check(name: str, value: str) -> None:
        forged.clear()
        forged[name] = value
        with suppress(RpcError):
            connection.fetch_header()
        connection.close()

    fuzz(num_examples, check, name=st.sampled_from(_HEADERS), value=header_values)
    forged.clear()
    assert connection.fetch_header() == b"header"
    connection.close()


@pytest.mark.parametrize("name", [state_server.SERIAL, state_server.PREPARED])
@pytest.mark.parametrize("version", [3, 4])
def test_a_forged_number_is_not_believed(
    name: str, version: int, server: StateServer, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forge(monkeypatch, {name: "99"})
    connection = _connection(_port(server))
    connection.select(version)
    with pytest.raises(RpcError, match="proof|MAC"):
        connection.fetch_range(0, [memoryview(bytearray(1))])
    connection.close()


@pytest.mark.parametrize("status", [200, 206, 401, 404, 416, 500, 503])
def test_a_forged_status_delays_a_client_only(
    status: int, server: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of somebody who answers in place of the peer, for a while."""
    honest = state_server._Handler.do_GET
    num_forged = 3

    def answer(handler: state_server._Handler) -> None:
        nonlocal num_forged
        if num_forged == 0:
            honest(handler)
            return
        num_forged -= 1
        handler.send_response(status)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    monkeypatch.setattr(state_server._Handler, "do_GET", answer)
    connection = _connection(_port(server))
    assert connection.fetch_header() == b"header" and num_forged == 0
    connection.close()


def test_a_wait_that_was_altered_is_rejected(server: StateServer, at_once: None) -> None:
    connection = _connection(_port(server))
    connection.fetch_header()
    request = connection._http.request

    def altered(method: str, path: str, headers: dict[str, str]) -> None:
        request(method, path, headers={**headers, state_server.WAIT: "1 5000"})

    connection._http.request = altered  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RpcError, match="HTTP 401"):
        connection.fetch_range(0, [memoryview(bytearray(1))])
    connection.close()


def test_progress_does_not_extend_a_wait_without_end(
    server: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_client, "_MAX_PREPARING", 1.5)
    endpoint = PeerEndpoint(f"http://127.0.0.1:{_port(server)}", SECRET, "test", 1.0)
    connection = StateConnection(endpoint, 4)
    began_s, progress = time.monotonic(), itertools.count(1)

    def tick() -> None:
        server.prepare(4, next(progress))

    with pytest.raises(RpcError, match="HTTP 503"):
        connection.fetch_header(tick)
    assert 1.5 <= time.monotonic() - began_s < 20.0
    connection.close()


def _forge(monkeypatch: pytest.MonkeyPatch, forged: dict[str, str]) -> None:
    """Replace the values of these headers on their way to the client."""
    send = BaseHTTPRequestHandler.send_header

    def send_forged(handler: BaseHTTPRequestHandler, name: str, value: str) -> None:
        send(handler, name, forged.get(name, value))

    monkeypatch.setattr(BaseHTTPRequestHandler, "send_header", send_forged)


@pytest.fixture
def stranger() -> Iterator[ForgedServer]:
    with forged_server() as made:
        yield made


@FEW_OR_MANY
def test_answers_of_a_stranger_raise_rpc_errors(
    num_examples: int, at_once: None, stranger: ForgedServer
) -> None:
    def check(answer: bytes) -> None:
        stranger.answer = answer
        connection = _connection(stranger.port)
        with pytest.raises(RpcError):
            connection.fetch_header()
        connection.close()

    fuzz(num_examples, check, answer=raw_messages)


@FEW_OR_MANY
def test_a_state_server_survives_forged_requests(
    num_examples: int, server: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[BaseException | None] = []
    monkeypatch.setattr(
        type(server._server), "handle_error", lambda *_: errors.append(sys.exc_info()[1])
    )

    def check(content: bytes) -> None:
        send_raw(("127.0.0.1", _port(server)), content)
        assert all(isinstance(error, OSError) for error in errors), errors

    fuzz(num_examples, check, content=raw_messages)
    connection = _connection(_port(server))
    assert connection.fetch_header() == b"header"
    connection.close()


class _Echo:
    """Service whose call returns its request."""

    def __init__(self) -> None:
        self.calls = 0

    def echo(self, request: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        return {"echo": request["text"]}

    def services(self) -> list[Service]:
        return [Service(Identity("Echo", SECRET, "echo"), {"Echo": self.echo})]


@FEW_OR_MANY
def test_a_server_of_calls_survives_forged_requests(num_examples: int) -> None:
    echo = _Echo()
    with RpcServer("127.0.0.1:0", echo.services, name="echo") as server:
        host, _, port = server.address.rpartition(":")
        opening = ClientStream(Identity("Echo", SECRET, "echo")).opening

        def check(content: bytes, is_opened: bool) -> None:
            send_raw((host, int(port)), opening + content if is_opened else content)

        fuzz(num_examples, check, content=raw_messages, is_opened=st.booleans())
        assert echo.calls == 0
        with RpcClient(server.address, "Echo", SECRET, "echo") as client:
            assert client.call("Echo", {"text": "a"}, 30) == {"echo": "a"}


@FEW_OR_MANY
def test_answers_of_a_stranger_to_a_call_raise_rpc_errors(
    num_examples: int, stranger: ForgedServer
) -> None:
    def check(answer: bytes, is_opened: bool) -> None:
        start = protocol._MAGIC + bytes(16) if is_opened else b""
        stranger.answer = start + answer
        with (
            RpcClient(f"127.0.0.1:{stranger.port}", "Echo", SECRET, "echo") as client,
            pytest.raises(RpcError),
        ):
            client.call("Echo", {}, 0.3)

    fuzz(num_examples, check, answer=raw_messages, is_opened=st.booleans())


def test_a_handler_that_fails_answers_with_its_proof(caplog: pytest.LogCaptureFixture) -> None:
    with (
        RpcServer("127.0.0.1:0", _Echo().services, name="echo") as server,
        RpcClient(server.address, "Echo", SECRET, "echo") as client,
        pytest.raises(RpcError, match="KeyError") as caught,
    ):
        client.call("Echo", {}, 30)
    assert caught.value.code is RpcStatus.INTERNAL and not caught.value.is_final
