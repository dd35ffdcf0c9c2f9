"""The coordinator as a server of authenticated calls. At the same address it is the lighthouse of a
run of several replicas."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from torchtitan_lite.core.log import logger
from torchtitan_lite.core.outputs import quorum_name
from torchtitan_lite.distributed.rpc.authentication import ServerSessions
from torchtitan_lite.distributed.rpc.server import (
    CallError,
    RpcServer,
    Trust,
    authenticated_service,
)
from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings
from torchtitan_lite.fault_tolerance.lighthouse.servicer import LighthouseServicer, first_quorum_id
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    PURPOSE,
    SERVICE,
    Report,
    RunState,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.replica_coordinator import (
    Busy,
    Rejected,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.run_coordinator import RunCoordinator


def coordinator_server(bind: str, secret: str) -> RpcServer:
    """Return the coordinator at `bind`, "HOST:PORT"; port 0 selects a free one. `start` listens."""
    lighthouse: list[LighthouseServicer] = []

    def handlers(trust: Trust) -> Sequence[grpc.GenericRpcHandler]:
        loop = asyncio.get_running_loop()
        lighthouse.append(LighthouseServicer(loop, QuorumSettings(), secret, first_quorum_id()))
        calls = _Calls(lighthouse[0].mark_left)
        sessions = ServerSessions(secret, PURPOSE)
        own = {"Report": calls.report, "Leave": calls.leave}
        service = authenticated_service(SERVICE, sessions, own, trust)
        return [service, *lighthouse[0].handlers(trust)]

    async def fail_calls() -> None:
        lighthouse[0].close()

    return RpcServer(bind, handlers, name="coordinator", on_stop=fail_calls)


class _Calls:
    """Handlers of the calls, all on one event loop."""

    def __init__(self, mark_left: Callable[[str], object]) -> None:
        """`mark_left` notifies the lighthouse that a replica, given by its name, has ended."""
        self._coordinator = RunCoordinator(time.monotonic())
        self._mark_left = mark_left
        self._shown: dict[int, tuple[RunState, int, int]] = {}

    async def report(self, request: dict[str, Any]) -> dict[str, Any]:
        """Record the report of a machine, and return the answer to it."""
        before = self._coordinator.states
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
        self._notify(before)
        shown = answer.state, answer.generation, answer.num_joined
        if self._shown.get(answer.replica) != shown:
            self._shown[answer.replica] = shown
            logger.info(
                "%s%s, generation %d, %d machines: %s%s",
                f"replica {answer.replica}: " if report.num_replicas > 1 else "",
                answer.state,
                answer.generation,
                answer.num_joined,
                answer.joined,
                f" ({answer.reason})" if answer.reason else "",
            )
        return answer.to_json()

    def _notify(self, before: Sequence[RunState]) -> None:
        """Notify the lighthouse of the replicas whose generation has ended, so that the others do
        not wait until their heartbeats are late."""
        for replica, (was, state) in enumerate(zip(before, self._coordinator.states, strict=False)):
            if was is RunState.RUNNING and state is RunState.FORMING:
                self._mark_left(quorum_name(replica))

    async def leave(self, request: dict[str, Any]) -> dict[str, Any]:
        """Forget a machine."""
        try:
            report = Report.parse(dict(request.get("report", {})))
        except (TypeError, ValueError) as error:
            text = f"The last report is malformed: {error}."
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, text) from None
        reason = str(request.get("reason", ""))
        before = self._coordinator.states
        self._coordinator.leave(report, reason[:1000], time.monotonic())
        self._notify(before)
        return {}
