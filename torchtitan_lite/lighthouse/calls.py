"""The calls of a lighthouse, on one event loop: who waits, and when to look at the rules again.

Invariants: the rules are looked at on every event and when their verdict may change by itself,
never on a tick; a call that has ended asks no more; calls of this project's own are refused without
the token. Layer: above rules, messages and status.
"""

import asyncio
import hmac
import json
import time
from typing import Any

import grpc

from torchtitan_lite.lighthouse import messages
from torchtitan_lite.lighthouse.rules import Quorum, QuorumSettings, Rules
from torchtitan_lite.lighthouse.status import describe
from torchtitan_lite.log import logger


class _Refused(Exception):
    """A waiting call gets no quorum: its status and why."""

    def __init__(self, code: grpc.StatusCode, told: str) -> None:
        super().__init__(told)
        self.code, self.told = code, told


class Calls:
    """Answers to all calls. Made, and used, on a running event loop."""

    def __init__(self, settings: QuorumSettings, token: str, first_id: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._rules = Rules(settings, first_id)
        self._token = token.encode()
        self._waiting: dict[asyncio.Future[Any], str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._quorum_made_s: float | None = None

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """What a grpc.aio server needs."""
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
                    "Left": (self._left, messages.LeftRequest),
                    "Status": (self._status, messages.StatusRequest),
                },
            ),
        )

    def left(self, replica_id: str) -> list[str]:
        """See `Rules.left`. Those who waited for it wait no more, and its own calls fail."""
        gone = self._rules.left(replica_id)
        self._drop_ended()
        for call, asked_by in list(self._waiting.items()):
            if asked_by in gone:
                del self._waiting[call]
                call.set_exception(_has_left(asked_by))
        if gone:
            logger.info("Left: %s", ", ".join(gone))
        self._settle()
        return gone

    def status(self) -> dict[str, Any]:
        """See `describe`."""
        return describe(self._rules, self._loop.time(), self._quorum_made_s)

    def close(self) -> None:
        """Calls that wait fail."""
        self._drop_ended()
        while self._waiting:
            call, _ = self._waiting.popitem()
            call.set_exception(_Refused(grpc.StatusCode.UNAVAILABLE, "The lighthouse ends."))
        if self._timer is not None:
            self._timer.cancel()

    async def _quorum(self, request: Any, context: Any) -> Any:
        if not request.HasField("requester"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The requester is missing.")
        replica_id = request.requester.replica_id
        call = self._loop.create_future()
        try:
            if not self._rules.ask(request.requester, self._loop.time()):
                raise _has_left(replica_id)
            self._waiting[call] = replica_id
            self._settle()
            return await call
        except _Refused as refused:
            await context.abort(refused.code, refused.told)
        finally:
            if call in self._waiting:
                self._settle()

    async def _heartbeat(self, request: Any, context: Any) -> Any:
        del context
        # To refuse those of a replica that has left would only make it connect again.
        if self._rules.beat(request.replica_id, self._loop.time()):
            self._settle()
        return messages.LighthouseHeartbeatResponse()

    async def _left(self, request: Any, context: Any) -> Any:
        await self._check_token(request, context)
        return messages.LeftResponse(replica_ids=self.left(request.replica_id))

    async def _status(self, request: Any, context: Any) -> Any:
        await self._check_token(request, context)
        return messages.StatusResponse(json=json.dumps(self.status()))

    async def _check_token(self, request: Any, context: Any) -> None:
        if not self._token:
            told = "This lighthouse was started without a token: it takes no such calls."
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, told)
        if not hmac.compare_digest(request.token.encode(), self._token):
            told = "The lighthouse knows another token."
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, told)

    def _drop_ended(self) -> None:
        """Replicas whose client has given up, or died, ask no more."""
        ended = {call: asked_by for call, asked_by in self._waiting.items() if call.cancelled()}
        for call in ended:
            del self._waiting[call]
        # A client that connects again may ask before its earlier call is known to have ended.
        for replica_id in set(ended.values()) - set(self._waiting.values()):
            self._rules.withdraw(replica_id)

    def _settle(self) -> None:
        """Answer all calls that can be answered now, and look again when that may change."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._drop_ended()
        last_id = self._rules.quorum.quorum_id if self._rules.quorum else 0
        while (quorum := self._rules.decide(self._loop.time())) is not None:
            self._quorum_made_s = self._loop.time()
            if quorum.quorum_id != last_id:
                logger.info("Quorum %d: %s", quorum.quorum_id, ", ".join(quorum.ids))
                last_id = quorum.quorum_id
            response = _response(quorum)
            for call, asked_by in list(self._waiting.items()):
                if asked_by in quorum.ids:
                    del self._waiting[call]
                    call.set_result(response)
        until_s = self._rules.verdict(self._loop.time()).until_s
        if until_s is not None:
            self._timer = self._loop.call_at(until_s, self._settle)


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


def _has_left(replica_id: str) -> _Refused:
    told = f"The lighthouse was told that {replica_id} has left: start it again under a new id."
    return _Refused(grpc.StatusCode.FAILED_PRECONDITION, told)
