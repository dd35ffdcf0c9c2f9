"""A lighthouse that listens on a port, in a thread of its own.

Invariants: it listens where it is told to and nowhere else, and on a port that nobody else has; all
that it knows is touched by its own thread only. Layer: above calls.
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
from torchtitan_lite.lighthouse.calls import Calls
from torchtitan_lite.lighthouse.rules import QuorumSettings

_T = TypeVar("_T")
_ANSWER_S = 10.0
_GRACE_S = 1.0
"""For answers that are under way when it stops."""
_LAST_PORT = 65535
_OPTIONS = (
    # Without this, a second lighthouse on the same port would get part of the calls.
    ("grpc.so_reuseport", 0),
    # torchft's clients ping each minute, also when nothing is asked.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)


class LighthouseService:
    """A lighthouse at `bind`, "HOST:PORT", where port 0 takes a free one.

    With an empty token it takes no calls but torchft's.
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
        self._calls: Calls | None = None
        self._stopping: asyncio.Event | None = None

    @property
    def address(self) -> str:
        """ "HOST:PORT", with the port that it has got."""
        return f"{self._host}:{self._port}"

    def start(self) -> Self:
        """Listen. Raises LighthouseError when that is not possible."""
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
        """Stop listening; calls that wait end with an error. Does nothing when it has stopped."""
        if self._thread is None or self._loop is None or self._stopping is None:
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._thread = None

    def left(self, replica_id: str) -> list[str]:
        """A replica has left: its id or its name. Returns the ids that count no more."""
        return self._ask(lambda calls: calls.left(replica_id))

    def status(self) -> dict[str, Any]:
        """Plain data for a live view, see `status.describe`."""
        return self._ask(lambda calls: calls.status())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _ask(self, question: Callable[[Calls], _T]) -> _T:
        if self._thread is None or self._loop is None or self._calls is None:
            raise LighthouseError(f"The lighthouse at {self._bind} is not running.")
        calls = self._calls

        async def answer() -> _T:
            return question(calls)

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(_ANSWER_S)

    async def _serve(self, listening: "Future[int]") -> None:
        server = grpc.aio.server(options=_OPTIONS)
        try:
            self._loop = asyncio.get_running_loop()
            self._stopping = asyncio.Event()
            self._calls = Calls(self._settings, self._token, self._first_id)
            server.add_generic_rpc_handlers(self._calls.handlers())
            port = server.add_insecure_port(self._bind)
            await server.start()
        except Exception as error:
            told = LighthouseError(f"A lighthouse cannot listen at {self._bind}: {error}")
            listening.set_exception(told)
            return
        listening.set_result(port)
        await self._stopping.wait()
        self._calls.close()
        await server.stop(_GRACE_S)


def _check(bind: str) -> None:
    """Raises LighthouseError when nobody can listen at `bind`. gRPC would not say why, takes other
    ports for those above 65535, and is content with one of the addresses of a name."""
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _LAST_PORT:
        raise LighthouseError(f"{bind!r} is no HOST:PORT, such as 127.0.0.1:29510.")
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
        told = "another process listens there" if in_use else failures[0].strerror
        raise LighthouseError(
            f"A lighthouse cannot listen at {bind}: {told}. Name another address or a free port."
        )
