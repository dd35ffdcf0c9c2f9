"""Sessions between processes that share a secret: challenge and response, then a MAC for each
message.

A client sends a nonce. The server answers with a ticket, which is a time and a nonce of its own,
and with a proof that it has the secret. Both derive the key of the session from secret, purpose,
nonce and ticket. Every request carries a counter and a MAC; every response carries a MAC over the
request's MAC and the content, so that neither can be replayed, altered or moved to another request.

Invariants: unauthenticated messages change no state, so that a flood of them costs no memory; the
secret itself never leaves the process; comparisons take constant time.
"""

import hashlib
import hmac
import secrets
import threading
import time
from dataclasses import dataclass, field

from torchtitan_lite.core.errors import RpcError
from torchtitan_lite.distributed.rpc.fields import NONCE_BYTES, PROOF, parse_field

SESSION_S = 3600.0
"""Lifetime of a session. Clients open another one afterwards."""
TOKEN = "TORCHTITAN_LITE_TOKEN"
"""Environment variable: the secret of a run."""
_MIN_SECRET_CHARS = 16
_WINDOW = 1024
"""Counters of a session that are remembered: requests of threads may arrive out of order."""


class AuthenticationError(RpcError):
    """Message without a valid proof, or a repeated one."""


def secret_problem(secret: str) -> str:
    """Return why `secret` cannot be the secret of a run, and what to do; empty if it can."""
    if len(secret) >= _MIN_SECRET_CHARS:
        return ""
    return (
        f"{TOKEN} has {len(secret)} characters of at least {_MIN_SECRET_CHARS}: it is a secret "
        "that all processes of a run share. Set it to the output of `openssl rand -hex 16`."
    )


def message_authentication_code(key: bytes, *parts: bytes) -> bytes:
    """Return HMAC-SHA256 (RFC 2104) of `parts`, each with its length, so that no byte can move from
    one part to another."""
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True)
class RequestProof:
    """Proof that a request belongs to a session."""

    nonce: bytes
    ticket: bytes
    counter: int
    mac: bytes

    def __str__(self) -> str:
        """Return the proof as a header value."""
        return f"{self.nonce.hex()}.{self.ticket.hex()}.{self.counter}.{self.mac.hex()}"

    @staticmethod
    def parse(text: object) -> "RequestProof":
        """Parse a header value. Raises RpcError."""
        nonce, ticket, counter, mac = parse_field("The proof of the request", text, PROOF)
        return RequestProof(
            bytes.fromhex(nonce), bytes.fromhex(ticket), int(counter), bytes.fromhex(mac)
        )


class ClientSession:
    """Client's side of a session. Thread-safe."""

    def __init__(self, secret: str, purpose: str) -> None:
        """`purpose` separates servers of different kinds and runs that share the secret."""
        self._secret, self._purpose = secret_key(secret), purpose.encode()
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._ticket = b""
        self._key = b""
        self._counter = 0
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether the server has proved itself."""
        return bool(self._key)

    def open(self, ticket: bytes, proof: bytes) -> None:
        """Open the session with the server's answer to the nonce. Raises AuthenticationError."""
        wanted = message_authentication_code(
            self._secret, b"server", self._purpose, self.nonce, ticket
        )
        if not hmac.compare_digest(wanted, proof):
            raise AuthenticationError("The server does not have the secret.")
        self._ticket = ticket
        self._key = _session_key(self._secret, self._purpose, self.nonce, ticket)

    def sign(self, *content: bytes) -> RequestProof:
        """Return the proof of a request."""
        with self._lock:
            self._counter += 1
            counter = self._counter
        mac = message_authentication_code(
            self._key, b"request", counter.to_bytes(8, "little"), *content
        )
        return RequestProof(self.nonce, self._ticket, counter, mac)

    def check_response(self, request: RequestProof, mac: bytes, *content: bytes) -> None:
        """Check the MAC of a response. Raises AuthenticationError."""
        wanted = message_authentication_code(self._key, b"response", request.mac, *content)
        if not hmac.compare_digest(wanted, mac):
            raise AuthenticationError("The response does not carry the server's proof.")

    def response_digest(self, request: RequestProof) -> "hmac.HMAC":
        """Return a MAC to update with the content of a response that arrives in pieces, as
        `ServerSession.response_digest` does."""
        return _response_digest(self._key, request.mac)


@dataclass
class _Seen:
    """Counters that a session has used."""

    expires_s: float
    floor: int = 0
    counters: set[int] = field(default_factory=set)

    def add(self, counter: int) -> bool:
        """Record a counter, and return whether it is new."""
        if counter <= self.floor or counter in self.counters:
            return False
        self.counters.add(counter)
        if len(self.counters) > 2 * _WINDOW:
            kept = sorted(self.counters)[_WINDOW:]
            self.floor, self.counters = kept[0], set(kept)
        return True


@dataclass(frozen=True)
class ServerSession:
    """Server's side of one authenticated request."""

    key: bytes
    request_mac: bytes

    def sign(self, *content: bytes) -> bytes:
        """Return the MAC of the response."""
        return message_authentication_code(self.key, b"response", self.request_mac, *content)

    def response_digest(self) -> "hmac.HMAC":
        """Return a MAC to update with the content of a response in pieces."""
        return _response_digest(self.key, self.request_mac)


class ServerSessions:
    """Server's side of all sessions. Thread-safe."""

    def __init__(self, secret: str, purpose: str) -> None:
        self._secret, self._purpose = secret_key(secret), purpose.encode()
        self._own = secrets.token_bytes(32)
        self._seen: dict[bytes, _Seen] = {}
        self._lock = threading.Lock()

    def challenge(self, nonce: bytes) -> tuple[bytes, bytes]:
        """Return (ticket, proof) for a nonce. Keeps nothing. Raises AuthenticationError."""
        if len(nonce) != NONCE_BYTES:
            raise AuthenticationError(f"The nonce must have {NONCE_BYTES} bytes.")
        issued = int(time.monotonic() * 1000).to_bytes(8, "little")
        ticket = issued + self._ticket_mac(nonce, issued)
        proof = message_authentication_code(self._secret, b"server", self._purpose, nonce, ticket)
        return ticket, proof

    def authenticate(self, proof: RequestProof, *content: bytes) -> ServerSession:
        """Check a request, which is accepted once. Raises AuthenticationError."""
        issued, ticket_mac = proof.ticket[:8], proof.ticket[8:]
        if not hmac.compare_digest(ticket_mac, self._ticket_mac(proof.nonce, issued)):
            raise AuthenticationError("The session is not of this server.")
        expires_s = int.from_bytes(issued, "little") / 1000 + SESSION_S
        now_s = time.monotonic()
        if now_s >= expires_s:
            raise AuthenticationError("The session has expired.")
        key = _session_key(self._secret, self._purpose, proof.nonce, proof.ticket)
        counter = proof.counter.to_bytes(8, "little")
        wanted = message_authentication_code(key, b"request", counter, *content)
        if not hmac.compare_digest(wanted, proof.mac):
            raise AuthenticationError("The request is altered, or its sender has another secret.")
        with self._lock:
            if proof.ticket not in self._seen:
                self._seen = {
                    ticket: seen for ticket, seen in self._seen.items() if now_s < seen.expires_s
                }
                self._seen[proof.ticket] = _Seen(expires_s)
            if not self._seen[proof.ticket].add(proof.counter):
                raise AuthenticationError("The request was received before.")
        return ServerSession(key, proof.mac)

    def _ticket_mac(self, nonce: bytes, issued: bytes) -> bytes:
        return message_authentication_code(self._own, b"ticket", nonce, issued)


def secret_key(secret: str) -> bytes:
    """Return the key of a secret."""
    return message_authentication_code(secret.encode(), b"torchtitan_lite session")


def _session_key(secret: bytes, purpose: bytes, nonce: bytes, ticket: bytes) -> bytes:
    return message_authentication_code(secret, b"session", purpose, nonce, ticket)


def _response_digest(key: bytes, request_mac: bytes) -> "hmac.HMAC":
    digest = hmac.new(key, digestmod=hashlib.sha256)
    digest.update(b"response in pieces" + request_mac)
    return digest
