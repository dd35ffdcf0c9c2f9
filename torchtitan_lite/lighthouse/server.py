"""gRPC server of a lighthouse, in a thread of its own.

Invariants: it listens only on the given address, and on a port that no other process shares; its
state is accessed by its own thread only. Layer: above servicer.
"""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from torchtitan_lite.errors import LighthouseError
from torchtitan_lite.lighthouse.rules import QuorumSettings
from torchtitan_lite.lighthouse.servicer import LighthouseServicer

_T = TypeVar("_T")
_ANSWER_S = 10.0
_GRACE_S = 1.0
"""Time for pending responses when it stops."""
_LAST_PORT = 65535
_OPTIONS = (
    # Without this, a second lighthouse on the same port would receive part of the calls.
    ("grpc.so_reuseport", 0),
    # torchft's clients ping every minute, also without pending calls.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)


class LighthouseService:
    """Lighthouse at `bind`, "HOST:PORT"; port 0 selects a free one.

    With an empty token it accepts only torchft's calls.
    """

    def __init__(
        self, bind: str, settings: QuorumSettings, token: str = "", *, first_id: int = 0
    ) -> None:
        """Quorum ids are greater than `first_id`."""
        self._bind, self._settings, self._token = bind, settings, token
        self._first_id = first_id
        self._host = bind.rpartition(":")[0]
        self._port = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._servicer: LighthouseServicer | None = None
        self._stopping: asyncio.Event | None = None

    @property
    def address(self) -> str:
        """ "HOST:PORT" with the actual port."""
        return f"{self._host}:{self._port}"

    def start(self) -> Self:
        """Start to listen. Raises LighthouseError if that fails."""
        _check(self._bind)
        listening: Future[int] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listening)), name="lighthouse", daemon=True
        )
        self._thread.start()
        try:
            self._port = listening.result()
        except LighthouseError:
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

    def mark_left(self, replica_id: str) -> list[str]:
        """Count a replica as left, by its id or its name. Return the ids that no longer count."""
        return self._run_on_loop(lambda calls: calls.mark_left(replica_id))

    def status(self) -> dict[str, Any]:
        """Return the status as plain data, see `status.describe`."""
        return self._run_on_loop(lambda calls: calls.status())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _run_on_loop(self, question: Callable[[LighthouseServicer], _T]) -> _T:
        if self._thread is None or self._loop is None or self._servicer is None:
            raise LighthouseError(f"The lighthouse at {self._bind} is not running.")
        calls = self._servicer

        async def answer() -> _T:
            return question(calls)

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(_ANSWER_S)

    async def _serve(self, listening: "Future[int]") -> None:
        server = grpc.aio.server(options=_OPTIONS)
        try:
            self._loop = asyncio.get_running_loop()
            self._stopping = asyncio.Event()
            self._servicer = LighthouseServicer(self._settings, self._token, self._first_id)
            server.add_generic_rpc_handlers(self._servicer.handlers())
            port = server.add_insecure_port(self._bind)
            await server.start()
        except Exception as error:
            failure = LighthouseError(f"A lighthouse cannot listen at {self._bind}: {error}")
            listening.set_exception(failure)
            return
        listening.set_result(port)
        await self._stopping.wait()
        self._servicer.close()
        await server.stop(_GRACE_S)


def _check(bind: str) -> None:
    """Raise LighthouseError if `bind` is not available. gRPC would not report why, maps ports above
    65535 to others, and accepts a name of which it can bind only one address."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _LAST_PORT:
        raise LighthouseError(f"{bind!r} is not HOST:PORT, such as 127.0.0.1:29510.")
    try:
        places = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise LighthouseError(f"{host} has no address: {error.strerror}.") from None
    failures: list[OSError] = []
    for family, kind, _, _, place in places:
        try:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            failures.append(error)
    in_use = any(failure.errno == errno.EADDRINUSE for failure in failures)
    if in_use or len(failures) == len(places):
        problem = "another process listens there" if in_use else failures[0].strerror
        raise LighthouseError(
            f"A lighthouse cannot listen at {bind}: {problem}. Choose another address or port."
        )
