"""Clients of authenticated calls."""

import asyncio
import itertools
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from torchtitan_lite.core.errors import RpcError, RpcStatus
from torchtitan_lite.distributed.rpc.authentication import AuthenticationError
from torchtitan_lite.distributed.rpc.fields import printable
from torchtitan_lite.distributed.rpc.protocol import ClientStream, Identity
from torchtitan_lite.distributed.rpc.server import keep_alive

_T = TypeVar("_T")
_CONNECT_S = 1.0
"""Time after which connecting is tried again: the kernel repeats it ever more rarely, so that the
end of a cut would be noticed late."""
_OPEN_S = 5.0
"""Time for all attempts, and for the proof of the server."""
_SILENT_MS = 3000
"""Time after which a connection whose server acknowledges nothing is lost."""
_KEEPALIVE_S = 2
_TRANSIENT = (RpcStatus.UNAVAILABLE, RpcStatus.INTERNAL)
"""Failures that the server has reported after which the call may be repeated."""
_SAME_SECRET = "TORCHTITAN_LITE_TOKEN must be the same here and where it was started."


class AsyncRpcClient:
    """Client of a service at `address` ("HOST:PORT" or a URL), on one event loop."""

    def __init__(self, address: str, service: str, secret: str, purpose: str) -> None:
        self._address = host_and_port(address)
        self._identity = Identity(service, secret, purpose)
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None
        self._is_closed = False

    async def call(self, name: str, content: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Call, and return the result. Raises RpcError."""
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connected()
                return await connection.call(name, content)
        except TimeoutError:
            message = f"{self._address} did not answer in {timeout_s:g} s."
            raise RpcError(message, RpcStatus.DEADLINE_EXCEEDED) from None
        except AuthenticationError as error:
            message = f"{self._address} cannot be trusted: {error} {_SAME_SECRET}"
            raise RpcError(message, RpcStatus.UNAUTHENTICATED) from None
        except RpcError as error:
            if error.code is not RpcStatus.UNIMPLEMENTED or error.is_final:
                raise
            message = f"{self._address} answers in another protocol."
            raise RpcError(message, RpcStatus.UNIMPLEMENTED) from None
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            message = f"Nothing answers at {self._address}: {printable(reason)}"
            raise RpcError(message, RpcStatus.UNAVAILABLE) from None

    async def close(self) -> None:
        """Close the connection; pending calls fail."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _connected(self) -> "_Connection":
        """Return a connection whose server has proved itself. Raises OSError or RpcError."""
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._is_closed:
            raise OSError("the client is closed")
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            # Whoever waits may stop to.
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        with suppress(asyncio.CancelledError):
            return await asyncio.shield(self._connecting)
        if self._is_closed:
            raise OSError("the client is closed")
        raise asyncio.CancelledError

    async def _connect(self) -> "_Connection":
        async with asyncio.timeout(_OPEN_S):
            connection = await self._reach()
            try:
                await connection.opened
            except BaseException:
                connection.close()
                raise
        self._connection = connection
        return connection

    async def _reach(self) -> "_Connection":
        loop, stream = asyncio.get_running_loop(), ClientStream(self._identity)
        host, _, port = self._address.rpartition(":")
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CONNECT_S):
                    _, connection = await loop.create_connection(
                        lambda: _Connection(stream), host.strip("[]"), int(port)
                    )
                return connection


class _Connection(asyncio.Protocol):
    """One connection, and its pending calls."""

    def __init__(self, stream: ClientStream) -> None:
        self._stream = stream
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set once the server has proved itself."""
        self.is_open = False

    async def call(self, name: str, content: dict[str, Any]) -> dict[str, Any]:
        """Call, and return the result. Raises OSError or RpcError."""
        assert self._transport is not None and self._stream.frames is not None
        number = next(self._numbers)
        frame = self._stream.frames.encode({"id": number, "call": name, "content": content})
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        self._transport.write(frame)
        try:
            response = await answer
        except asyncio.CancelledError:
            if self.is_open:
                self._transport.write(self._stream.frames.encode({"id": number}))
            raise
        finally:
            del self._pending[number]
        return _result_of(response)

    def close(self) -> None:
        """Close the connection; pending calls fail."""
        if self._transport is not None:
            self._transport.abort()
        self._fail(OSError("the client is closed"))

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"), _KEEPALIVE_S, _SILENT_MS)
        transport.write(self._stream.opening)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            messages = self._stream.receive(data)
        except RpcError as error:
            self._fail(error)
            self._transport.abort()
            return
        if not self.is_open and self._stream.frames is not None:
            self._transport.write(self._stream.proof)
            self.is_open = True
            if not self.opened.done():
                self.opened.set_result(None)
        for message in messages:
            answer = self._pending.get(message["id"])
            if answer is not None and not answer.done():
                answer.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("the connection was closed"))

    def _fail(self, error: Exception) -> None:
        self.is_open = False
        if not self.opened.done():
            self.opened.set_exception(error)
            # Nobody may wait for it any more.
            self.opened.exception()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error)


def _result_of(response: dict[str, Any]) -> dict[str, Any]:
    """Return the result in a response. Raises RpcError."""
    try:
        if "error" not in response:
            result = response["result"]
            if isinstance(result, dict):
                return result
            raise TypeError("the result is not an object")
        message, code = str(response["message"]), RpcStatus(response["error"])
    except (KeyError, TypeError, ValueError) as error:
        raise RpcError(f"The server answers in another format: {error!r:.100}") from None
    raise RpcError(message, code, is_final=code not in _TRANSIENT)


class RpcClient:
    """Client of a service at `address` ("HOST:PORT" or a URL). Thread-safe."""

    def __init__(self, address: str, service: str, secret: str, purpose: str) -> None:
        self._client = AsyncRpcClient(address, service, secret, purpose)

    def call(self, name: str, content: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Call, and return the result. Raises RpcError."""
        return _run(self._client.call(name, content, timeout_s))

    def close(self) -> None:
        """Close the connection; pending calls fail."""
        _run(self._client.close())

    def __enter__(self) -> "RpcClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""The event loop of the clients, by process: a forked process needs its own."""
_lock = threading.Lock()


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on the event loop of the clients of this process, and return its result."""
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="rpc clients", daemon=True).start()
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def host_and_port(address: str) -> str:
    """Return "HOST:PORT" of an address that may be a URL."""
    return address.rpartition("//")[2].rstrip("/")
