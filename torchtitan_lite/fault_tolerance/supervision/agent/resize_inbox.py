"""Requests to resize a run on several machines, received, checked and answered by a thread: storage
that hangs must not block the agent's main loop, which keeps the lease."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.log import logger
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import MAX_CHARS
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    RequestInbox,
    ResizeRequest,
    ResizeState,
    RunMesh,
)

_POLL_S = 0.25
_CLOSE_S = 2.0


class ResizeInbox:
    """The requests of one machine, one at a time, and checks of those of all machines."""

    def __init__(
        self,
        inbox: RequestInbox,
        check: Callable[[ResizeRequest], None],
        *,
        check_arguments: Callable[[Sequence[str]], None],
    ) -> None:
        """`check` raises ConfigError for a request that the run cannot follow, and
        `check_arguments`, which reads no file, for arguments that may not change."""
        self._inbox, self._check, self._check_arguments = inbox, check, check_arguments
        self.request: ResizeRequest | None = None
        """The request that was made on this machine, until its final answer."""
        self.is_open = False
        """Whether requests are received: all ranks train."""
        self._checking = ""
        """Id of the last request whose check was ordered."""
        self._checked = "", ""
        """Id of the last request that was checked, and why it is refused."""
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="resize requests", daemon=True)

    def start(self) -> None:
        """Start to receive requests."""
        self._thread.start()

    def parse(self, text: str) -> RunMesh:
        """Return the mesh of a message. Raises ConfigError for arguments that may not change, and
        ValueError for what is not a mesh."""
        mesh = RunMesh.from_text(text)
        self._check_arguments(mesh.arguments)
        return mesh

    def refusal(self, request_id: str, mesh: str) -> str | None:
        """Return why this machine cannot follow a request, empty if it can; None until that is
        known."""
        checked_id, refusal = self._checked
        if checked_id == request_id:
            return refusal
        if self._checking != request_id:
            self._checking = request_id
            self._orders.put(partial(self._check_request, request_id, mesh))
        return None

    def answer(self, state: ResizeState, reason: str = "") -> None:
        """Answer the request of this machine; a final answer ends it."""
        request = self.request
        assert request is not None
        if state in (ResizeState.REJECTED, ResizeState.FAILED):
            logger.warning("Resize to %s %s: %s", request.mesh, state, reason)
        if state.is_final:
            self.request = None
        self._orders.put(partial(self._inbox.answer, request, state, reason))

    def close(self, reason: str) -> None:
        """Let a request that has no final answer fail because of `reason`, if storage responds in
        time, and end."""
        self.is_open = False
        self._orders.put(lambda: self._close(reason))
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not (self._is_closed and self._orders.empty()):
            try:
                self._orders.get(timeout=_POLL_S)()
            except Empty:
                self._receive()
            self._inbox.repeat(time.monotonic())

    def _close(self, reason: str) -> None:
        self._is_closed = True
        if self.request is not None:
            self.answer(ResizeState.FAILED, reason)

    def _receive(self) -> None:
        request = self._inbox.poll(time.monotonic()) if self.is_open else None
        if request is None:
            return
        if self.request is not None:
            refusal = f"a resize to {self.request.mesh} has not ended"
        else:
            refusal = self._refusal(request.mesh.to_text())
        if refusal:
            logger.warning("Resize to %s rejected: %s", request.mesh, refusal)
            self._inbox.answer(request, ResizeState.REJECTED, refusal)
        else:
            self._inbox.answer(request, ResizeState.ACCEPTED)
            # The coordinator will name it to this machine, too.
            self._checked = request.id, ""
            self.request = request

    def _check_request(self, request_id: str, mesh: str) -> None:
        self._checked = request_id, self._refusal(mesh)

    def _refusal(self, text: str) -> str:
        """Return why the run cannot have a mesh; empty if it can."""
        if len(text) > MAX_CHARS:
            return f"its arguments have {len(text)} characters, at most {MAX_CHARS} fit"
        return refusal_of(lambda: self._check(ResizeRequest(mesh=self.parse(text))))


def refusal_of(check: Callable[[], None]) -> str:
    """Return why a check rejects a request; empty if it does not. An error of whatever kind rejects
    it: it must not end the run, nor the thread that answers requests."""
    try:
        check()
    except Exception as error:
        text = str(error) if isinstance(error, ConfigError) else ""
        return text or repr(error)
    return ""
