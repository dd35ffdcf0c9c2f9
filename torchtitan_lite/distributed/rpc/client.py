"""Clients of authenticated calls."""

import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from torchtitan_lite.core.errors import RpcError
from torchtitan_lite.distributed.rpc.authentication import (
    AuthenticationError,
    ClientSession,
    RequestProof,
)
from torchtitan_lite.distributed.rpc.fields import MAC, TICKET_BYTES, parse_field, printable
from torchtitan_lite.distributed.rpc.messages import (
    AUTHORIZATION,
    ERROR,
    HELLO,
    MESSAGE,
    PROOF,
    RESULT,
    decode,
    encode,
    method_of,
)

OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # Without this, gRPC remembers an earlier failure, and does not try a server that has started
    # since.
    ("grpc.use_local_subchannel_pool", 1),
    # A cut of the network is noticed within seconds, and over within one more after it ends.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
)
"""Options of a channel, for both kinds of clients."""
_HELLO_S = 5.0
_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
"""Signed failures after which the call may be repeated."""


class RpcClient:
    """Client of a service at `address` ("HOST:PORT" or a URL). Thread-safe."""

    def __init__(self, address: str, service: str, secret: str, purpose: str) -> None:
        self._protocol = _Protocol(host_and_port(address), service, secret, purpose)
        self._channel = grpc.insecure_channel(self._protocol.address, options=OPTIONS)
        self._lock = threading.Lock()

    def call(self, name: str, content: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Call, and return the result. Raises RpcError."""
        protocol = self._protocol
        for is_last in (False, True):
            session = None
            try:
                with self._lock:
                    session = protocol.session or self._open(timeout_s)
                request, proof = protocol.request(session, name, content)
                response, call = self._method(name).with_call(
                    request, timeout=timeout_s, metadata=((AUTHORIZATION, str(proof)),)
                )
                return protocol.response(session, proof, response, call.trailing_metadata())
            except grpc.RpcError as error:
                if not protocol.can_retry(error, session) or is_last:
                    raise protocol.failure(error, timeout_s) from None
            except AuthenticationError as error:
                raise protocol.rejected(error) from None
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        """Close the connection; pending calls fail."""
        self._channel.close()

    def __enter__(self) -> "RpcClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, timeout_s: float) -> ClientSession:
        session = self._protocol.new_session()
        answer = self._method(HELLO)(session.nonce, timeout=min(timeout_s, _HELLO_S))
        return self._protocol.opened(session, answer)

    def _method(self, name: str) -> Any:
        return self._channel.unary_unary(method_of(self._protocol.service, name))


class AsyncRpcClient:
    """Client of a service at `address` ("HOST:PORT" or a URL), on one event loop."""

    def __init__(self, address: str, service: str, secret: str, purpose: str) -> None:
        self._protocol = _Protocol(host_and_port(address), service, secret, purpose)
        self._channel = grpc.aio.insecure_channel(self._protocol.address, options=OPTIONS)

    async def call(self, name: str, content: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Call, and return the result. Raises RpcError."""
        protocol = self._protocol
        for is_last in (False, True):
            session = None
            try:
                session = protocol.session or await self._open(timeout_s)
                request, proof = protocol.request(session, name, content)
                call = self._method(name)(
                    request, timeout=timeout_s, metadata=((AUTHORIZATION, str(proof)),)
                )
                response = await call
                return protocol.response(session, proof, response, await call.trailing_metadata())
            except grpc.aio.AioRpcError as error:
                if not protocol.can_retry(error, session) or is_last:
                    raise protocol.failure(error, timeout_s) from None
            except AuthenticationError as error:
                raise protocol.rejected(error) from None
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Close the connection; pending calls fail."""
        await self._channel.close()

    async def _open(self, timeout_s: float) -> ClientSession:
        session = self._protocol.new_session()
        answer = await self._method(HELLO)(session.nonce, timeout=min(timeout_s, _HELLO_S))
        return self._protocol.opened(session, answer)

    def _method(self, name: str) -> Callable[..., Any]:
        return self._channel.unary_unary(method_of(self._protocol.service, name))


class _Protocol:
    """Session handling of both kinds of clients, without I/O."""

    def __init__(self, address: str, service: str, secret: str, purpose: str) -> None:
        self.address, self.service = address, service
        self._secret, self._purpose = secret, purpose
        self.session: ClientSession | None = None

    def new_session(self) -> ClientSession:
        return ClientSession(self._secret, self._purpose)

    def opened(self, session: ClientSession, answer: bytes) -> ClientSession:
        session.open(answer[:TICKET_BYTES], answer[TICKET_BYTES:])
        self.session = session
        return session

    def request(
        self, session: ClientSession, name: str, content: dict[str, Any]
    ) -> tuple[bytes, RequestProof]:
        request = encode(content)
        return request, session.sign(method_of(self.service, name).encode(), request)

    def response(
        self, session: ClientSession, proof: RequestProof, response: bytes, metadata: Any
    ) -> dict[str, Any]:
        (mac,) = parse_field(f"The proof of {self.address}", dict(metadata or ()).get(PROOF), MAC)
        session.check_response(proof, bytes.fromhex(mac), response)
        try:
            outcome = decode(response)
            if ERROR not in outcome:
                return outcome[RESULT]
            message, code = str(outcome[MESSAGE]), grpc.StatusCode[outcome[ERROR]]
        except (KeyError, TypeError, ValueError) as error:
            raise RpcError(f"{self.address} answers in another format: {error!r:.100}") from None
        raise RpcError(message, code, is_final=code not in _TRANSIENT)

    def can_retry(self, error: Any, session: ClientSession | None) -> bool:
        """Forget the session of a call if the server does not accept it any more, and return
        whether that was the failure."""
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED or session is None:
            return False
        if self.session is session:
            self.session = None
        return True

    def rejected(self, error: AuthenticationError) -> RpcError:
        self.session = None
        message = f"{self.address} cannot be trusted: {error} {_SAME_SECRET}"
        return RpcError(message, grpc.StatusCode.UNAUTHENTICATED)

    def failure(self, error: Any, timeout_s: float) -> RpcError:
        code, details = error.code(), printable(error.details())
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return RpcError(f"{self.address} rejects the call: {details} {_SAME_SECRET}", code)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return RpcError(f"{self.address} did not answer in {timeout_s:g} s.", code)
        if code is grpc.StatusCode.UNAVAILABLE:
            return RpcError(f"Nothing answers at {self.address}: {details}", code)
        return RpcError(f"{self.address} rejects the call: {details}", code)


_SAME_SECRET = "TORCHTITAN_LITE_TOKEN must be the same here and where it was started."


def host_and_port(address: str) -> str:
    """Return "HOST:PORT" of an address that may be a URL."""
    return address.rpartition("//")[2].rstrip("/")
