"""gRPC server with authenticated calls, on an event loop in a thread of its own.

A call takes and returns a JSON object. It is served only to clients that prove that they have the
secret; requests are bounded in size and number, and an unauthenticated one changes nothing.
"""

import asyncio
import errno
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from torchtitan_lite.core.errors import RpcError
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.rpc.authentication import (
    AuthenticationError,
    RequestProof,
    ServerSession,
    ServerSessions,
)
from torchtitan_lite.distributed.rpc.descriptors import raise_descriptor_limit
from torchtitan_lite.distributed.rpc.gate import Gate
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

_T = TypeVar("_T")
Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Handler of a call. It may raise CallError."""
Trust = Callable[[str], None]
"""Counts the connection of a peer as one that has proved itself, see `Gate.trust`."""
_ANSWER_S = 10.0
_GRACE_S = 1.0
"""Time for pending responses when the server stops."""
_LAST_PORT = 65535
_BACKLOG = 512
_MAX_MESSAGE_BYTES = 1 << 20
_OPTIONS = (
    # Clients may ping without pending calls, as torchft's do every minute.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    # Notice within seconds that a client's machine is gone.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # Per connection, so that the calls of one client cannot crowd out those of another.
    ("grpc.max_concurrent_streams", 64),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.server_handshake_timeout_ms", 5000),
)


class CallError(Exception):
    """Failure of a call: its gRPC status and the reason."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class RpcServer:
    """Server at `bind`, "HOST:PORT"; port 0 selects a free one."""

    def __init__(
        self,
        bind: str,
        handlers: Callable[[Trust], Sequence[grpc.GenericRpcHandler]],
        *,
        name: str,
        on_stop: Callable[[], Awaitable[None]] | None = None,
        must_prove: bool = True,
    ) -> None:
        """`handlers` is called on the event loop, with what `authenticated_service` takes, and so
        is `on_stop` before the server stops; `name` is what errors call the server; `must_prove`:
        whether all its services are authenticated."""
        self._bind, self._handlers, self._name, self._on_stop = bind, handlers, name, on_stop
        self._host, self._must_prove = bind.rpartition(":")[0], must_prove
        self._port = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    @property
    def address(self) -> str:
        """ "HOST:PORT" with the actual port."""
        return f"{self._host}:{self._port}"

    def start(self) -> Self:
        """Start to listen. Raises RpcError if that fails."""
        raise_descriptor_limit()
        listeners = _listeners(self._bind, self._name)
        is_open: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listeners, is_open)),
            name=self._name,
            daemon=True,
        )
        self._thread.start()
        try:
            is_open.result()
        except RpcError:
            self._thread = None
            raise
        self._port = listeners[0].getsockname()[1]
        return self

    def stop(self) -> None:
        """Stop to listen; pending calls end with an error. Idempotent."""
        if self._thread is None or self._loop is None or self._stopping is None:
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def run_on_loop(self, question: Callable[[], _T]) -> _T:
        """Call `question` on the event loop and return its result. Raises RpcError if the server
        does not run."""
        if self._thread is None or self._loop is None:
            raise RpcError(f"A {self._name} at {self._bind} is not running.")

        async def answer() -> _T:
            return question()

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(_ANSWER_S)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the event loop and return its result. Raises what it raises."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve(self, listeners: Sequence[socket.socket], is_open: "Future[None]") -> None:
        server = grpc.aio.server(options=_OPTIONS)
        gate = Gate(listeners, must_prove=self._must_prove)
        try:
            self._loop = asyncio.get_running_loop()
            self._stopping = asyncio.Event()
            server.add_generic_rpc_handlers(tuple(self._handlers(gate.trust)))
            await gate.open(server)
        except Exception as error:
            gate.stop_accepting()
            failure = RpcError(f"A {self._name} cannot listen at {self._bind}: {error}")
            is_open.set_exception(failure)
            return
        is_open.set_result(None)
        await self._stopping.wait()
        gate.stop_accepting()
        if self._on_stop is not None:
            await self._on_stop()
        await server.stop(_GRACE_S)
        gate.close()


def authenticated_service(
    service: str, sessions: ServerSessions, calls: Mapping[str, Handler], trust: Trust
) -> grpc.GenericRpcHandler:
    """Return the gRPC handler of a service with authenticated calls. `trust` is called with the
    peer of each."""

    async def hello(request: bytes, context: Any) -> bytes:
        try:
            ticket, proof = sessions.challenge(request)
        except AuthenticationError as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise
        return ticket + proof

    def handler(call: str, answer: Handler) -> Any:
        async def handle(request: bytes, context: Any) -> bytes:
            session, content = await _authenticate(sessions, service, call, request, context)
            trust(context.peer())
            try:
                outcome = {RESULT: await answer(content)}
            except CallError as error:
                # In a signed response: any machine on the way could forge a gRPC status.
                outcome = {ERROR: error.code.name, MESSAGE: error.message}
            except Exception as error:
                logger.exception("%s of %s failed", call, service)
                outcome = {ERROR: grpc.StatusCode.INTERNAL.name, MESSAGE: f"{error!r:.200}"}
            response = encode(outcome)
            context.set_trailing_metadata(((PROOF, session.sign(response).hex()),))
            return response

        return grpc.unary_unary_rpc_method_handler(handle)

    methods = {call: handler(call, answer) for call, answer in calls.items()}
    return grpc.method_handlers_generic_handler(
        service, {HELLO: grpc.unary_unary_rpc_method_handler(hello), **methods}
    )


async def _authenticate(
    sessions: ServerSessions, service: str, call: str, request: bytes, context: Any
) -> tuple[ServerSession, dict[str, Any]]:
    metadata = dict(context.invocation_metadata())
    try:
        proof = RequestProof.parse(metadata.get(AUTHORIZATION))
        method = method_of(service, call).encode()
        return sessions.authenticate(proof, method, request), decode(request)
    except RpcError as error:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    raise AssertionError("context.abort raises")


def _listeners(bind: str, name: str) -> list[socket.socket]:
    """Listen at all addresses of `bind`, at one port. Raises RpcError."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _LAST_PORT:
        raise RpcError(f"{bind!r} is not HOST:PORT, such as 127.0.0.1:29510.")
    try:
        places = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise RpcError(f"{host} has no address: {error.strerror}.") from None
    listeners: list[socket.socket] = []
    failures: list[OSError] = []
    for family, _, _, _, place in places:
        chosen = listeners[0].getsockname()[1] if listeners else int(port)
        is_any = place[0] == "::"
        try:
            listeners.append(
                socket.create_server(
                    (place[0], chosen, *place[2:]),
                    family=family,
                    backlog=_BACKLOG,
                    dualstack_ipv6=is_any and socket.has_dualstack_ipv6(),
                )
            )
        except OSError as error:
            failures.append(error)
    in_use = any(failure.errno == errno.EADDRINUSE for failure in failures)
    if in_use or not listeners:
        for listener in listeners:
            listener.close()
        problem = "another process listens there" if in_use else failures[0].strerror
        raise RpcError(
            f"A {name} cannot listen at {bind}: {problem}. Choose another address or port."
        )
    return listeners
