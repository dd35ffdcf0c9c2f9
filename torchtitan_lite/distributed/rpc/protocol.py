"""Protocol of authenticated calls over a byte stream, without I/O.

A client opens with a nonce and the name of a service. The server answers with a nonce of its own
and a proof, the client with its proof, and frames follow in both directions: the length of a JSON
object, a MAC and the object. The key of both is derived from the secret, the purpose of the server
and the nonces, so that nothing of one connection is valid in another one. A MAC contains the number
of its frame and the direction: no frame can be repeated, dropped, reordered or returned.

A request is {"id", "call", "content"}; {"id"} alone cancels it. A response is {"id", "result"} or
{"id", "error", "message"}.

Invariants: what a peer has not proved is bounded by the size of an opening; whatever arrives,
`receive` raises nothing but RpcError.
"""

import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.core.errors import RpcError, RpcStatus
from torchtitan_lite.distributed.rpc.authentication import (
    AuthenticationError,
    message_authentication_code,
    secret_key,
)

MAX_MESSAGE_BYTES = 1 << 20
_MAGIC = b"ttlite1\n"
_NONCE_BYTES, _MAC_BYTES, _LENGTH_BYTES = 16, 32, 4
_MAX_SERVICE_CHARS = 64
_REQUEST, _RESPONSE = b"request ", b"response"


class Frames:
    """Encodes the frames of one end, and decodes those of the other."""

    def __init__(self, key: bytes, own: bytes, others: bytes) -> None:
        """`own` and `others` are the names of the directions."""
        self._key, self._own, self._others = key, own, others
        self._num_sent = self._num_received = 0
        self._received = bytearray()

    def encode(self, message: Mapping[str, Any]) -> bytes:
        """Return a message as a frame. Raises RpcError if it is too large."""
        content = json.dumps(message, separators=(",", ":")).encode()
        if len(content) > MAX_MESSAGE_BYTES:
            raise RpcError(
                f"A message of {len(content)} bytes is too large: the maximum is "
                f"{MAX_MESSAGE_BYTES}.",
                RpcStatus.INVALID_ARGUMENT,
                is_final=True,
            )
        mac = self._mac(self._own, self._num_sent, content)
        self._num_sent += 1
        return len(content).to_bytes(_LENGTH_BYTES, "little") + mac + content

    def receive(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that are complete with `data`. Raises RpcError."""
        received, messages, start = self._received, [], 0
        received += data
        while len(received) - start >= _LENGTH_BYTES:
            length = int.from_bytes(received[start : start + _LENGTH_BYTES], "little")
            if length > MAX_MESSAGE_BYTES:
                raise AuthenticationError("A frame is too large.")
            begin = start + _LENGTH_BYTES + _MAC_BYTES
            if len(received) < begin + length:
                break
            mac, content = received[begin - _MAC_BYTES : begin], received[begin : begin + length]
            wanted = self._mac(self._others, self._num_received, content)
            if not hmac.compare_digest(wanted, mac):
                raise AuthenticationError("A frame is altered, or was not sent by the peer.")
            self._num_received += 1
            start = begin + length
            messages.append(_parse(content))
        del received[:start]
        return messages

    def _mac(self, direction: bytes, number: int, content: bytes | bytearray) -> bytes:
        return hmac.digest(self._key, direction + number.to_bytes(8, "little") + content, "sha256")


def _parse(content: bytes | bytearray) -> dict[str, Any]:
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RpcError(f"A message is not JSON: {error!r:.100}") from None
    if not isinstance(message, dict) or type(message.get("id")) is not int:
        raise RpcError("A message has no id.")
    return message


@dataclass(frozen=True)
class Identity:
    """What both sides of a service know."""

    service: str
    """Name of the service, ASCII."""
    secret: str
    purpose: str
    """Separates servers of different kinds, and runs, that share the secret."""

    def key(self, client_nonce: bytes, server_nonce: bytes) -> bytes:
        """Return the key of a connection."""
        return message_authentication_code(
            secret_key(self.secret),
            b"calls",
            self.service.encode(),
            self.purpose.encode(),
            client_nonce,
            server_nonce,
        )


class ClientStream:
    """The client's end of a connection."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        name = identity.service.encode()
        self.opening = _MAGIC + self._nonce + bytes([len(name)]) + name
        """What to send first."""
        self.frames: Frames | None = None
        """Set once the server has proved itself."""
        self.proof = b""
        """What to send then."""
        self._received = b""

    def receive(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that are complete with `data`. Raises RpcError."""
        if self.frames is None:
            data = self._open(data)
        return [] if self.frames is None else self.frames.receive(data)

    def _open(self, data: bytes) -> bytes:
        """Receive the answer to the opening, and return what follows it."""
        self._received += data
        start = self._received[: len(_MAGIC)]
        if start != _MAGIC[: len(start)]:
            raise RpcError("It answers in another protocol.", RpcStatus.UNIMPLEMENTED)
        end = len(_MAGIC) + _NONCE_BYTES + _MAC_BYTES
        if len(self._received) < end:
            return b""
        nonce = self._received[len(_MAGIC) : end - _MAC_BYTES]
        key = self._identity.key(self._nonce, nonce)
        if not hmac.compare_digest(_proof(key, _RESPONSE), self._received[end - _MAC_BYTES : end]):
            raise AuthenticationError("The server does not have the secret.")
        self.frames, self.proof = Frames(key, _REQUEST, _RESPONSE), _proof(key, _REQUEST)
        return self._received[end:]


class ServerStream:
    """The server's end of a connection."""

    def __init__(self, identities: Sequence[Identity]) -> None:
        """`identities`: the services at this address."""
        self._identities = {identity.service: identity for identity in identities}
        self.service = ""
        """Name of the service that the client has selected."""
        self.frames: Frames | None = None
        """Set once the client has proved itself."""
        self._key = b""
        self._received = b""

    def receive(self, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """Return what to send, and the messages that are complete with `data`. Raises RpcError."""
        answer = b""
        if self.frames is None:
            self._received += data
            if not self._key:
                answer = self._answer()
            data = self._check_proof() if self._key else b""
        return answer, [] if self.frames is None else self.frames.receive(data)

    def _answer(self) -> bytes:
        """Return the answer to the opening, once that is complete."""
        received, end = self._received, len(_MAGIC) + _NONCE_BYTES + 1
        start = received[: len(_MAGIC)]
        if start != _MAGIC[: len(start)]:
            raise RpcError("The client opens another protocol.")
        if len(received) < end:
            return b""
        num_chars = received[end - 1]
        if num_chars > _MAX_SERVICE_CHARS:
            raise RpcError("The name of the service is too long.")
        if len(received) < end + num_chars:
            return b""
        name = received[end : end + num_chars]
        identity = self._identities.get(name.decode("ascii", "replace"))
        if identity is None:
            raise RpcError("There is no such service.")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._key = identity.key(received[len(_MAGIC) : end - 1], nonce)
        self.service, self._received = identity.service, received[end + num_chars :]
        return _MAGIC + nonce + _proof(self._key, _RESPONSE)

    def _check_proof(self) -> bytes:
        """Check the proof of the client, once it is complete, and return what follows it."""
        if len(self._received) < _MAC_BYTES:
            return b""
        if not hmac.compare_digest(self._received[:_MAC_BYTES], _proof(self._key, _REQUEST)):
            raise AuthenticationError("The client does not have the secret.")
        self.frames = Frames(self._key, _RESPONSE, _REQUEST)
        data, self._received = self._received[_MAC_BYTES:], b""
        return data


def _proof(key: bytes, direction: bytes) -> bytes:
    return message_authentication_code(key, b"proof", direction)
