"""Sessions: only messages of those who have the secret count, once, and unaltered."""

import hmac
from collections.abc import Callable
from dataclasses import replace

import pytest

from torchtitan_lite.core.errors import RpcError
from torchtitan_lite.distributed.rpc import authentication
from torchtitan_lite.distributed.rpc.authentication import (
    AuthenticationError,
    ClientSession,
    RequestProof,
    ServerSessions,
    message_authentication_code,
)

SECRET = "a secret of the tests"


@pytest.fixture
def server() -> ServerSessions:
    return ServerSessions(SECRET, "healing")


def _open(server: ServerSessions, secret: str = SECRET, purpose: str = "healing") -> ClientSession:
    client = ClientSession(secret, purpose)
    client.open(*server.challenge(client.nonce))
    return client


def test_a_request_and_its_response_are_accepted(server: ServerSessions) -> None:
    client = _open(server)
    proof = client.sign(b"/path", b"content")
    session = server.authenticate(RequestProof.parse(str(proof)), b"/path", b"content")
    client.check_response(proof, session.sign(b"answer"), b"answer")
    pieces, whole = session.response_digest(), client.response_digest(proof)
    pieces.update(b"an")
    pieces.update(b"swer")
    whole.update(b"answer")
    assert pieces.digest() == whole.digest()


@pytest.mark.parametrize(
    "alter",
    [
        lambda proof: replace(proof, counter=proof.counter + 1),
        lambda proof: replace(proof, mac=bytes(32)),
        lambda proof: replace(proof, nonce=bytes(16)),
        lambda proof: replace(proof, ticket=bytes(40)),
        lambda proof: replace(proof, ticket=b""),
    ],
)
def test_an_altered_proof_is_rejected(
    server: ServerSessions, alter: Callable[[RequestProof], RequestProof]
) -> None:
    proof = _open(server).sign(b"content")
    with pytest.raises(AuthenticationError):
        server.authenticate(alter(proof), b"content")
    server.authenticate(proof, b"content")


def test_altered_content_is_rejected(server: ServerSessions) -> None:
    client = _open(server)
    proof = client.sign(b"/state/8", b"bytes=0-7")
    for content in [(b"/state/9", b"bytes=0-7"), (b"/state/8b", b"ytes=0-7"), (b"/state/8",)]:
        with pytest.raises(AuthenticationError):
            server.authenticate(proof, *content)
    session = server.authenticate(proof, b"/state/8", b"bytes=0-7")
    with pytest.raises(AuthenticationError):
        client.check_response(proof, session.sign(b"answer"), b"another")
    other = client.sign(b"/state/8", b"bytes=0-7")
    with pytest.raises(AuthenticationError):
        client.check_response(other, session.sign(b"answer"), b"answer")


def test_a_repeated_request_is_rejected(
    server: ServerSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "_WINDOW", 8)
    client = _open(server)
    proofs = [client.sign(b"content") for _ in range(100)]
    # The requests of several threads arrive out of order.
    order = [i + (1 if i % 2 == 0 else -1) for i in range(100)]
    for i in order:
        server.authenticate(proofs[i], b"content")
    for proof in proofs:
        with pytest.raises(AuthenticationError, match="received before"):
            server.authenticate(proof, b"content")


def test_without_the_secret_neither_side_is_trusted(server: ServerSessions) -> None:
    stranger = ClientSession("another secret of them", "healing")
    ticket, proof = server.challenge(stranger.nonce)
    with pytest.raises(AuthenticationError, match="does not have the secret"):
        stranger.open(ticket, proof)
    forged = ServerSessions("another secret of them", "healing")
    with pytest.raises(AuthenticationError, match="does not have the secret"):
        _open(forged)
    # A session of a forged server gives no access to the real one.
    with pytest.raises(AuthenticationError, match="not of this server"):
        server.authenticate(_open(forged, "another secret of them").sign(b"x"), b"x")


def test_a_session_serves_one_purpose(server: ServerSessions) -> None:
    with pytest.raises(AuthenticationError, match="does not have the secret"):
        _open(server, purpose="lighthouse")


def test_a_session_expires_and_is_forgotten(
    server: ServerSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = _open(server)
    server.authenticate(client.sign(b"x"), b"x")
    now_s = authentication.time.monotonic() + authentication.SESSION_S
    monkeypatch.setattr(authentication.time, "monotonic", lambda: now_s)
    with pytest.raises(AuthenticationError, match="expired"):
        server.authenticate(client.sign(b"x"), b"x")
    server.authenticate(_open(server).sign(b"x"), b"x")
    assert len(server._seen) == 1


def test_a_flood_of_strangers_is_not_remembered(server: ServerSessions) -> None:
    for _ in range(1000):
        ClientSession("another secret of them", "healing")
        server.challenge(bytes(16))
        with pytest.raises(AuthenticationError):
            server.authenticate(RequestProof(bytes(16), bytes(40), 1, bytes(32)), b"x")
    assert not server._seen


@pytest.mark.parametrize("text", ["", "Bearer secret", "a.b.c.d", "00.00.1.00", "....", "é.é.1.é"])
def test_a_malformed_proof_is_rejected(text: str) -> None:
    with pytest.raises(RpcError, match="proof of the request"):
        RequestProof.parse(text)


def test_a_code_is_the_same_in_every_release() -> None:
    content = (2).to_bytes(8, "little") + b"ab" + (1).to_bytes(8, "little") + b"c"
    expected = hmac.digest(bytes(32), content, "sha256")
    assert message_authentication_code(bytes(32), b"ab", b"c") == expected


def test_parts_cannot_be_shifted() -> None:
    key = bytes(32)
    assert message_authentication_code(key, b"ab", b"c") != message_authentication_code(
        key, b"a", b"bc"
    )
