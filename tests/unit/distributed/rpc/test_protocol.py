"""The protocol of calls: only frames of the peer count, once, in order and unaltered."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.unit.fuzzing import FEW_OR_MANY, fuzz
from torchtitan_lite.core.errors import RpcError, RpcStatus
from torchtitan_lite.distributed.rpc.authentication import AuthenticationError
from torchtitan_lite.distributed.rpc.protocol import (
    MAX_MESSAGE_BYTES,
    ClientStream,
    Frames,
    Identity,
    ServerStream,
)

_IDENTITY = Identity("Echo", "a secret of the run", "tests")


def _opened(chunk: int = 1 << 20) -> tuple[ClientStream, ServerStream]:
    """Return two ends that have opened, with bytes that arrive in chunks."""
    client, server = ClientStream(_IDENTITY), ServerStream([_IDENTITY])
    answer = b""
    for start in range(0, len(client.opening), chunk):
        answer += server.receive(client.opening[start : start + chunk])[0]
    for start in range(0, len(answer), chunk):
        assert client.receive(answer[start : start + chunk]) == []
    for start in range(0, len(client.proof), chunk):
        assert server.receive(client.proof[start : start + chunk]) == (b"", [])
    return client, server


def _frames(stream: ClientStream | ServerStream) -> Frames:
    assert stream.frames is not None
    return stream.frames


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_messages_arrive_however_they_are_divided(chunk: int) -> None:
    client, server = _opened(chunk)
    assert server.service == "Echo"
    messages = [{"id": number, "content": "x" * number} for number in range(30)]
    sent = b"".join(map(_frames(client).encode, messages))
    received: list[dict[str, Any]] = []
    for start in range(0, len(sent), chunk):
        received += server.receive(sent[start : start + chunk])[1]
    assert received == messages
    assert client.receive(b"".join(map(_frames(server).encode, messages))) == messages


def test_a_server_with_several_services_has_the_one_that_is_named() -> None:
    others = [Identity("Other", "another secret", "x"), _IDENTITY, Identity("", "a", "b")]
    client, server = ClientStream(_IDENTITY), ServerStream(others)
    client.receive(server.receive(client.opening)[0])
    server.receive(client.proof)
    assert server.service == "Echo" and server.frames is not None


@pytest.mark.parametrize(
    "other",
    [
        Identity("Echo", "another secret of it", "tests"),
        Identity("Echo", "a secret of the run", "other tests"),
    ],
)
def test_both_sides_prove_themselves(other: Identity) -> None:
    client, server = ClientStream(other), ServerStream([_IDENTITY])
    with pytest.raises(AuthenticationError, match="The server does not have the secret"):
        client.receive(server.receive(client.opening)[0])
    assert client.frames is None
    with pytest.raises(AuthenticationError, match="The client does not have the secret"):
        server.receive(bytes(32))
    assert server.frames is None


@pytest.mark.parametrize("index", [0, 4, 35, 36, 50])
def test_an_altered_frame_is_rejected(index: int) -> None:
    client, server = _opened()
    frame = bytearray(_frames(client).encode({"id": 1, "call": "Echo", "content": {}}))
    frame[index] ^= 1
    with pytest.raises(RpcError, match="A frame is altered"):
        # With bytes that follow, in case it is longer now.
        server.receive(bytes(frame) + bytes(2))


def test_repeated_dropped_and_returned_frames_are_rejected() -> None:
    for order in ((0, 0), (1,), (0, 2)):
        client, server = _opened()
        frames = [_frames(client).encode({"id": number}) for number in range(3)]
        with pytest.raises(AuthenticationError):
            for number in order:
                server.receive(frames[number])
    client, server = _opened()
    with pytest.raises(AuthenticationError):
        client.receive(_frames(client).encode({"id": 0}))
    client, server = _opened()
    another, _ = _opened()
    with pytest.raises(AuthenticationError):
        server.receive(_frames(another).encode({"id": 0}))


def test_messages_are_bounded() -> None:
    client, server = _opened()
    room = MAX_MESSAGE_BYTES - len('{"id":1,"text":""}')
    assert server.receive(_frames(client).encode({"id": 1, "text": "x" * room}))[1]
    with pytest.raises(RpcError, match="is too large") as caught:
        _frames(client).encode({"id": 1, "text": "x" * (room + 1)})
    assert caught.value.is_final and caught.value.code is RpcStatus.INVALID_ARGUMENT
    # It is not sent, and the next one is in order.
    assert server.receive(_frames(client).encode({"id": 2}))[1] == [{"id": 2}]
    with pytest.raises(AuthenticationError, match="too large"):
        server.receive((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"id": "1"}', b'{"id": true}', b"[" * 9999])
def test_what_is_no_message_is_rejected(content: bytes) -> None:
    client, server = _opened()
    frames = _frames(client)
    mac = frames._mac(frames._own, 0, content)
    with pytest.raises(RpcError, match="A message"):
        server.receive(len(content).to_bytes(4, "little") + mac + content)


@pytest.mark.parametrize("opening", [b"PRI * HTTP/2.0", b"ttlite0", b"t" * 8])
def test_another_protocol_is_named(opening: bytes) -> None:
    with pytest.raises(RpcError, match="another protocol"):
        ServerStream([_IDENTITY]).receive(opening)
    with pytest.raises(RpcError, match="another protocol") as caught:
        ClientStream(_IDENTITY).receive(opening)
    assert caught.value.code is RpcStatus.UNIMPLEMENTED


@pytest.mark.parametrize(("num_chars", "problem"), [(65, "too long"), (5, "no such service")])
def test_a_service_that_does_not_exist_is_rejected(num_chars: int, problem: str) -> None:
    opening = ClientStream(_IDENTITY).opening
    server = ServerStream([_IDENTITY])
    with pytest.raises(RpcError, match=problem):
        server.receive(opening[:24] + bytes([num_chars]) + b"x" * num_chars)


@FEW_OR_MANY
def test_arbitrary_bytes_raise_nothing_but_rpc_errors(num_examples: int) -> None:
    def check(parts: list[bytes], num_right: int) -> None:
        client, server = ClientStream(_IDENTITY), ServerStream([_IDENTITY])
        with suppress(RpcError):
            answer = server.receive(client.opening)[0] if num_right > 0 else b""
            if num_right > 1:
                client.receive(answer)
                server.receive(client.proof)
            for part in parts:
                assert server.receive(part)[1] == []
        with suppress(RpcError):
            for part in parts:
                assert client.receive(part) == []

    parts = st.lists(st.binary(max_size=80) | st.just(b"ttlite1\n"), max_size=4)
    fuzz(num_examples, check, parts=parts, num_right=st.integers(0, 2))
