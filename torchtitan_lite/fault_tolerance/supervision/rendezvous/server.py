"""The rendezvous as a server of authenticated calls."""

import time
from collections.abc import Sequence
from typing import Any

import grpc

from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.rpc.authentication import ServerSessions
from torchtitan_lite.distributed.rpc.server import (
    CallError,
    RpcServer,
    Trust,
    authenticated_service,
)
from torchtitan_lite.fault_tolerance.supervision.rendezvous.coordinator import (
    Busy,
    Coordinator,
    Rejected,
)
from torchtitan_lite.fault_tolerance.supervision.rendezvous.messages import (
    PURPOSE,
    SERVICE,
    Report,
    RunState,
)


def rendezvous_server(bind: str, secret: str) -> RpcServer:
    """Return the rendezvous at `bind`, "HOST:PORT"; port 0 selects a free one. `start` listens."""
    return RpcServer(bind, lambda trust: _handlers(secret, trust), name="rendezvous")


def _handlers(secret: str, trust: Trust) -> Sequence[grpc.GenericRpcHandler]:
    calls = _Calls()
    sessions = ServerSessions(secret, PURPOSE)
    return [
        authenticated_service(
            SERVICE, sessions, {"Report": calls.report, "Leave": calls.leave}, trust
        )
    ]


class _Calls:
    """Handlers of the calls, all on one event loop."""

    def __init__(self) -> None:
        self._coordinator = Coordinator(time.monotonic())
        self._shown: tuple[RunState, int, int] | None = None

    async def report(self, request: dict[str, Any]) -> dict[str, Any]:
        """Record the report of a machine, and return the answer to it."""
        try:
            report = Report.parse(request)
            answer = self._coordinator.report(report, time.monotonic())
        except ValueError as error:
            text = f"The report is malformed: {error}."
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, text) from None
        except Rejected as error:
            raise CallError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None
        except Busy as error:
            raise CallError(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        shown = answer.state, answer.attempt, answer.num_joined
        if self._shown != shown:
            self._shown = shown
            logger.info(
                "%s, attempt %d, %d machines: %s%s",
                answer.state,
                answer.attempt,
                answer.num_joined,
                answer.joined,
                f" ({answer.reason})" if answer.reason else "",
            )
        return answer.to_json()

    async def leave(self, request: dict[str, Any]) -> dict[str, Any]:
        """Forget a machine."""
        try:
            report = Report.parse(dict(request.get("report", {})))
        except (TypeError, ValueError) as error:
            text = f"The last report is malformed: {error}."
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, text) from None
        reason = str(request.get("reason", ""))
        self._coordinator.leave(report, reason[:1000], time.monotonic())
        return {}
