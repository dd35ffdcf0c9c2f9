"""Lighthouse in a thread."""

import asyncio
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from torchtitan_lite.core.errors import LighthouseError, RpcError
from torchtitan_lite.distributed.rpc.server import RpcServer, Service, Serving
from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings
from torchtitan_lite.fault_tolerance.lighthouse.servicer import LighthouseServicer


class LighthouseService:
    """Lighthouse at `bind`, "HOST:PORT"; port 0 selects a free one.

    With a secret it serves replicas that have it, and nothing else. Without one it serves any
    client, including torchft's managers.
    """

    def __init__(
        self, bind: str, settings: QuorumSettings, secret: str = "", *, first_id: int = 0
    ) -> None:
        """Quorum ids are greater than `first_id`."""
        self._settings, self._secret, self._first_id = settings, secret, first_id
        self._servicer: LighthouseServicer | None = None
        self._server = RpcServer(
            bind,
            self._services,
            name="lighthouse",
            on_stop=self._fail_calls,
            serve=None if secret else self._serve_torchft,
        )

    @property
    def address(self) -> str:
        """ "HOST:PORT" with the actual port."""
        return self._server.address

    def start(self) -> Self:
        """Start to listen. Raises LighthouseError if that fails."""
        try:
            self._server.start()
        except RpcError as error:
            raise LighthouseError(str(error)) from None
        return self

    def stop(self) -> None:
        """Stop to listen; pending calls end with an error. Idempotent."""
        self._server.stop()

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

    def _run_on_loop(self, question: Any) -> Any:
        servicer = self._servicer
        try:
            return self._server.run_on_loop(lambda: question(servicer))
        except RpcError as error:
            raise LighthouseError(str(error)) from None

    def _services(self) -> Sequence[Service]:
        loop = asyncio.get_running_loop()
        self._servicer = LighthouseServicer(loop, self._settings, self._secret, self._first_id)
        return [self._servicer.service()]

    async def _serve_torchft(self, listeners: Sequence[socket.socket]) -> Serving:
        # Its replicas have gRPC.
        from torchtitan_lite.fault_tolerance.lighthouse.torchft_server import serve_torchft

        self._services()
        assert self._servicer is not None
        return await serve_torchft(self._servicer, listeners)

    async def _fail_calls(self) -> None:
        assert self._servicer is not None
        self._servicer.close()
