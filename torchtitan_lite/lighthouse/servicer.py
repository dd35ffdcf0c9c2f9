"""gRPC servicer of a lighthouse, on one event loop: pending calls, and when to evaluate the rules.

Invariants: the rules are evaluated at every event and when their outcome may change by itself,
never periodically; an ended call no longer counts as a request; this project's own calls require
the token. Layer: above rules, messages and status.
"""

import asyncio
import hmac
import json
import time
from typing import Any

import grpc

from torchtitan_lite.lighthouse import messages
from torchtitan_lite.lighthouse.rules import LEFT, Quorum, QuorumRules, QuorumSettings
from torchtitan_lite.lighthouse.status import describe
from torchtitan_lite.log import logger


class _CallError(Exception):
    """Failure of a pending call: its gRPC status and the reason."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class LighthouseServicer:
    """Handlers of all calls. Created and used on a running event loop."""

    def __init__(self, settings: QuorumSettings, token: str, first_id: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._rules = QuorumRules(settings, first_id)
        self._token = token.encode()
        self._waiting: dict[asyncio.Future[Any], str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._quorum_made_s: float | None = None

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Return the handlers for a grpc.aio server."""
        return (
            _service(
                messages.TORCHFT_SERVICE,
                {
                    "Quorum": (self._quorum, messages.LighthouseQuorumRequest),
                    "Heartbeat": (self._heartbeat, messages.LighthouseHeartbeatRequest),
                },
            ),
            _service(
                messages.OWN_SERVICE,
                {
                    "Left": (self._left_call, messages.LeftRequest),
                    "Status": (self._status, messages.StatusRequest),
                },
            ),
        )

    def mark_left(self, replica_id: str) -> list[str]:
        """Count a replica as left, see `QuorumRules.mark_left`, and fail its pending calls."""
        left = self._rules.mark_left(replica_id)
        self._fail_departed()
        if left:
            logger.info("Left: %s", ", ".join(left))
        self._answer_waiting()
        return left

    def status(self) -> dict[str, Any]:
        """Return the status, see `describe`."""
        return describe(self._rules, self._loop.time(), self._quorum_made_s)

    def close(self) -> None:
        """Fail all pending calls."""
        self._drop_cancelled()
        while self._waiting:
            call, _ = self._waiting.popitem()
            call.set_exception(_CallError(grpc.StatusCode.UNAVAILABLE, "The lighthouse stops."))
        if self._timer is not None:
            self._timer.cancel()

    async def _quorum(self, request: Any, context: Any) -> Any:
        if not request.HasField("requester"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The requester is missing.")
        replica_id = request.requester.replica_id
        call = self._loop.create_future()
        try:
            if not self._rules.request_quorum(request.requester, self._loop.time()):
                raise self._departed(replica_id)
            self._fail_departed()
            self._waiting[call] = replica_id
            self._answer_waiting()
            return await call
        except _CallError as refused:
            await context.abort(refused.code, refused.message)
        finally:
            if call in self._waiting:
                self._answer_waiting()

    async def _heartbeat(self, request: Any, context: Any) -> Any:
        del context
        # Rejecting heartbeats of a replica that has left would only make it reconnect.
        if self._rules.heartbeat(request.replica_id, self._loop.time()):
            self._answer_waiting()
        return messages.LighthouseHeartbeatResponse()

    async def _left_call(self, request: Any, context: Any) -> Any:
        await self._check_token(request, context)
        return messages.LeftResponse(replica_ids=self.mark_left(request.replica_id))

    async def _status(self, request: Any, context: Any) -> Any:
        await self._check_token(request, context)
        return messages.StatusResponse(json=json.dumps(self.status()))

    async def _check_token(self, request: Any, context: Any) -> None:
        if not self._token:
            message = "This lighthouse was started without a token and accepts no such calls."
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)
        if not hmac.compare_digest(request.token.encode(), self._token):
            message = "The lighthouse has another token."
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)

    def _fail_departed(self) -> None:
        """Fail the pending calls of replicas that have left for good or were replaced."""
        self._drop_cancelled()
        for call, asked_by in list(self._waiting.items()):
            if self._rules.departure(asked_by) is not None or asked_by not in self._rules.waiting:
                del self._waiting[call]
                call.set_exception(self._departed(asked_by))

    def _departed(self, replica_id: str) -> _CallError:
        message = f"Replica {replica_id} {self._rules.departure(replica_id) or LEFT}."
        return _CallError(grpc.StatusCode.FAILED_PRECONDITION, message)

    def _drop_cancelled(self) -> None:
        """Remove the requests of replicas whose client has cancelled its call or died."""
        ended = {call: asked_by for call, asked_by in self._waiting.items() if call.cancelled()}
        for call in ended:
            del self._waiting[call]
        # A client that reconnects may repeat its request before its earlier call is known to have
        # ended.
        for replica_id in set(ended.values()) - set(self._waiting.values()):
            self._rules.cancel_request(replica_id)

    def _answer_waiting(self) -> None:
        """Answer all calls that can be answered now, and schedule the next evaluation."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._drop_cancelled()
        last_id = self._rules.quorum.quorum_id if self._rules.quorum else 0
        while (quorum := self._rules.form_quorum(self._loop.time())) is not None:
            self._quorum_made_s = self._loop.time()
            if quorum.quorum_id != last_id:
                logger.info("Quorum %d: %s", quorum.quorum_id, ", ".join(quorum.ids))
                last_id = quorum.quorum_id
            response = _response(quorum)
            for call, asked_by in list(self._waiting.items()):
                if asked_by in quorum.ids:
                    del self._waiting[call]
                    call.set_result(response)
        until_s = self._rules.evaluate(self._loop.time()).until_s
        if until_s is not None:
            self._timer = self._loop.call_at(until_s, self._answer_waiting)


def _service(name: str, calls: dict[str, tuple[Any, Any]]) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        name,
        {
            call: grpc.unary_unary_rpc_method_handler(
                answer,
                request_deserializer=request.FromString,
                response_serializer=lambda response: response.SerializeToString(),
            )
            for call, (answer, request) in calls.items()
        },
    )


def _response(quorum: Quorum) -> Any:
    response = messages.LighthouseQuorumResponse()
    response.quorum.quorum_id = quorum.quorum_id
    response.quorum.participants.extend(quorum.members)
    response.quorum.created.seconds, response.quorum.created.nanos = divmod(
        time.time_ns(), 1_000_000_000
    )
    return response
