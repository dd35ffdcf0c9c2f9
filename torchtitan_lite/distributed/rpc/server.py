"""Server of authenticated calls, on an event loop in a thread of its own.

A call takes and returns a JSON object. It is served only to clients that prove that they have the
secret; requests are bounded in size and number. Connections that have not proved themselves are few
and short, see `strangers`.

Invariant: a stranger never displaces a connection that has proved itself, and changes nothing.
"""

import asyncio
import errno
import inspect
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from torchtitan_lite.core.errors import RpcError, RpcStatus
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.rpc.descriptors import leaves_reserve, raise_descriptor_limit
from torchtitan_lite.distributed.rpc.protocol import Identity, ServerStream
from torchtitan_lite.distributed.rpc.strangers import StrangerLimits, Strangers

_T = TypeVar("_T")
Handler = Callable[[dict[str, Any]], dict[str, Any] | Awaitable[dict[str, Any]]]
"""Handler of a call. It may raise CallError. One that does not wait need not be a coroutine."""
PROVE_S = 5.0
"""Time in which a connection must prove itself."""
_LIMITS = StrangerLimits(in_all=128, per_address=64)
_EXHAUSTED_S = 0.1
"""Pause after a connection for which there is no descriptor: it stays readable."""
_ACCEPTED_AT_ONCE = 32
"""Connections accepted before calls are served again."""
_SILENT_MS = 8000
"""Time after which a connection whose peer acknowledges nothing is lost."""
_KEEPALIVE_S = 5
"""Time without data after which a peer must acknowledge a probe."""
_MAX_CALLS = 64
"""Pending calls of a connection, so that those of one client cannot crowd out those of another."""
_MAX_UNSENT_BYTES = 8 << 20
"""Responses that a client has not read, after which its connection is closed."""
_ANSWER_S = 10.0
_GRACE_S = 1.0
"""Time for pending responses when the server stops."""
_LAST_PORT = 65535
_BACKLOG = 512


class CallError(Exception):
    """Failure of a call: its status and the reason."""

    def __init__(self, code: RpcStatus, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(frozen=True)
class Service:
    """Calls that a server offers under one name."""

    identity: Identity
    calls: Mapping[str, Handler]


class RpcServer:
    """Server at `bind`, "HOST:PORT"; port 0 selects a free one."""

    def __init__(
        self,
        bind: str,
        services: Callable[[], Sequence[Service]],
        *,
        name: str,
        on_stop: Callable[[], Awaitable[None]] | None = None,
        serve: Callable[[Sequence[socket.socket]], Awaitable["Serving"]] | None = None,
    ) -> None:
        """`services` is called on the event loop, and so is `on_stop` before the server stops;
        `name` is what errors call the server; `serve` serves the clients that connect to some
        listeners in another way."""
        self._bind, self._services, self._name, self._on_stop = bind, services, name, on_stop
        self._serve_clients = serve
        self._host = bind.rpartition(":")[0]
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
        listeners = listen(self._bind, self._name)
        self._port = listeners[0].getsockname()[1]
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
        try:
            self._loop = asyncio.get_running_loop()
            self._stopping = asyncio.Event()
            if self._serve_clients is not None:
                serving = await self._serve_clients(listeners)
            else:
                serving = Connections(listeners, self._services())
        except Exception as error:
            for listener in listeners:
                listener.close()
            failure = RpcError(f"A {self._name} cannot listen at {self._bind}: {error}")
            is_open.set_exception(failure)
            return
        is_open.set_result(None)
        await self._stopping.wait()
        serving.stop_accepting()
        if self._on_stop is not None:
            await self._on_stop()
        await serving.close(_GRACE_S)


class Serving(Protocol):
    """What serves clients on the event loop."""

    def stop_accepting(self) -> None:
        """Accept no further connections."""
        ...

    async def close(self, grace_s: float) -> None:
        """Close all connections, after their pending calls have had time to end."""
        ...


class Connections(Serving):
    """Accepts connections on the running event loop, and serves their calls."""

    def __init__(self, listeners: Sequence[socket.socket], services: Sequence[Service]) -> None:
        self._listeners = listeners
        self._services = {service.identity.service: service for service in services}
        self._identities = [service.identity for service in services]
        self._strangers: Strangers[_Connection] = Strangers(_LIMITS)
        self._open: set[_Connection] = set()
        self._loop = asyncio.get_running_loop()
        for listener in listeners:
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept, listener)

    def stop_accepting(self) -> None:
        """Close the listeners."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()

    async def close(self, grace_s: float) -> None:
        """Close all connections, after their pending calls have had time to end."""
        calls = [call for connection in self._open for call in connection.calls.values()]
        if calls:
            await asyncio.wait(calls, timeout=grace_s)
        for connection in list(self._open):
            connection.close()
        # Their responses are sent, and their calls cancelled.
        await asyncio.sleep(0)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, address = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                self._drop_idlest()
                self._loop.remove_reader(listener)
                self._loop.call_later(_EXHAUSTED_S, self._resume, listener)
                return
            if leaves_reserve(client.fileno()) or self._drop_idlest():
                self._admit(client, address[0])
            else:
                client.close()

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._accept, listener)

    def _drop_idlest(self) -> bool:
        idlest = self._strangers.pop_idlest()
        if idlest is not None:
            idlest.abort()
        return idlest is not None

    def _admit(self, client: socket.socket, address: str) -> None:
        client.setblocking(False)
        keep_alive(client, _KEEPALIVE_S, _SILENT_MS)
        connection = _Connection(self, ServerStream(self._identities))
        self._open.add(connection)
        displaced = self._strangers.add(connection, address)
        if displaced is not None:
            displaced.abort()
        self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: connection, client)
        ).add_done_callback(lambda task: self._admitted(task, connection))
        self._loop.call_later(PROVE_S, self._expire, connection)

    def _admitted(self, task: "asyncio.Task[Any]", connection: "_Connection") -> None:
        if task.cancelled() or task.exception() is not None:
            self.forget(connection)

    def _expire(self, connection: "_Connection") -> None:
        if connection in self._strangers:
            connection.abort()

    def touch(self, connection: "_Connection") -> None:
        """Count a connection as just used."""
        self._strangers.touch(connection)

    def trust(self, connection: "_Connection") -> None:
        """Count a connection as one that has proved itself."""
        self._strangers.discard(connection)

    def forget(self, connection: "_Connection") -> None:
        """Count a connection as closed."""
        self._strangers.discard(connection)
        self._open.discard(connection)

    def handler(self, service: str, call: object) -> Handler | None:
        """Return the handler of a call, if there is one."""
        return self._services[service].calls.get(call) if isinstance(call, str) else None


class _Connection(asyncio.Protocol):
    """One connection, and its pending calls."""

    def __init__(self, owner: Connections, stream: ServerStream) -> None:
        self._owner, self._stream = owner, stream
        self._transport: asyncio.Transport | None = None
        self._is_aborted = False
        self.calls: dict[int, asyncio.Task[None]] = {}
        """Pending calls by the id of the request."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._is_aborted:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_aborted = True
        self._owner.forget(self)
        for call in self.calls.values():
            call.cancel()

    def abort(self) -> None:
        """Close the connection at once."""
        self._is_aborted = True
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection when its responses are sent."""
        self._is_aborted = True
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_aborted or self._transport is None:
            return
        was_proven = self._stream.frames is not None
        try:
            answer, messages = self._stream.receive(data)
        except RpcError:
            self.abort()
            return
        if answer:
            self._transport.write(answer)
        if not was_proven:
            if self._stream.frames is not None:
                self._owner.trust(self)
            else:
                self._owner.touch(self)
        for message in messages:
            self._receive(message)

    def _receive(self, message: dict[str, Any]) -> None:
        number, call, content = message["id"], message.get("call"), message.get("content")
        if "call" not in message:
            if number in self.calls:
                self.calls[number].cancel()
            return
        handler = self._owner.handler(self._stream.service, call)
        if handler is None or not isinstance(content, dict) or number in self.calls:
            problem = f"There is no call {call!r:.60} with these arguments."
            self._send(number, CallError(RpcStatus.UNIMPLEMENTED, problem))
        elif len(self.calls) >= _MAX_CALLS:
            problem = f"{_MAX_CALLS} calls are pending."
            self._send(number, CallError(RpcStatus.UNAVAILABLE, problem))
        else:
            try:
                outcome = handler(content)
            except Exception as error:
                outcome = error
            if inspect.isawaitable(outcome):
                task = asyncio.get_running_loop().create_task(self._wait(number, outcome))
                self.calls[number] = task
                task.add_done_callback(lambda _: self.calls.pop(number, None))
            else:
                self._send(number, outcome)

    async def _wait(self, number: int, outcome: Awaitable[dict[str, Any]]) -> None:
        try:
            result: dict[str, Any] | Exception = await outcome
        except Exception as error:
            result = error
        self._send(number, result)

    def _send(self, number: int, outcome: dict[str, Any] | Exception) -> None:
        if self._is_aborted or self._transport is None or self._stream.frames is None:
            return
        if isinstance(outcome, CallError):
            response = {"id": number, "error": outcome.code, "message": outcome.message}
        elif isinstance(outcome, Exception):
            logger.error("A call of %s failed", self._stream.service, exc_info=outcome)
            message = f"{outcome!r:.200}"
            response = {"id": number, "error": RpcStatus.INTERNAL, "message": message}
        else:
            response = {"id": number, "result": outcome}
        try:
            self._transport.write(self._stream.frames.encode(response))
        except RpcError as error:
            self._send(number, CallError(RpcStatus.INTERNAL, str(error)))
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self.abort()


def keep_alive(connection: socket.socket, idle_s: int, silent_ms: int) -> None:
    """Let the kernel close a TCP connection whose peer has acknowledged nothing for `silent_ms`;
    without data, it is probed after `idle_s`."""
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_USER_TIMEOUT, silent_ms),
        (socket.TCP_KEEPIDLE, idle_s),
        (socket.TCP_KEEPINTVL, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def listen(bind: str, name: str) -> list[socket.socket]:
    """Listen at all addresses of `bind`, at one port. Raises RpcError."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _LAST_PORT:
        raise RpcError(f"{bind!r} is not HOST:PORT, such as 127.0.0.1:29520.")
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
