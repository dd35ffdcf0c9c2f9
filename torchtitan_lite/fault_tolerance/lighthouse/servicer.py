"""Calls of a lighthouse, on one event loop: pending calls, and when to evaluate the rules.

Invariants: the rules are evaluated at every event and when their outcome may change by itself,
never periodically; an ended call no longer counts as a request; with a secret, nothing changes any
state but authenticated calls, and only members of one run with a right seal count.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan_lite.core.errors import RpcStatus
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.rpc.authentication import AuthenticationError
from torchtitan_lite.distributed.rpc.protocol import Identity
from torchtitan_lite.distributed.rpc.server import CallError, Handler, Service
from torchtitan_lite.fault_tolerance.lighthouse.member import PURPOSE, SERVICE, Member
from torchtitan_lite.fault_tolerance.lighthouse.rules import (
    LEFT,
    Quorum,
    QuorumRules,
    QuorumSettings,
)
from torchtitan_lite.fault_tolerance.lighthouse.status import describe


class LighthouseServicer:
    """Handlers of all calls. Created and used on a running event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: QuorumSettings,
        secret: str,
        first_id: int,
        *,
        may_decide: Callable[[], bool] = lambda: True,
    ) -> None:
        """`may_decide` returns whether a quorum may be formed now; call `reconsider` when it has
        become true."""
        self._loop, self._may_decide = loop, may_decide
        self._rules = QuorumRules(settings, first_id)
        self._secret = secret
        self._instance = secrets.token_hex(8)
        self._run_id: str | None = None
        """Run of the live replicas."""
        self._waiting: dict[asyncio.Future[Any], str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._quorum_made_s: float | None = None
        self._sealed: tuple[Quorum, list[str]] | None = None
        """The last quorum that was sent, with the sealed statements of its members."""

    def service(self) -> Service:
        """Return the service of this project's replicas."""
        calls: dict[str, Handler] = {
            "Quorum": self._quorum,
            "Heartbeat": self._heartbeat,
            "Left": self._left,
        }
        return Service(Identity(SERVICE, self._secret, PURPOSE), calls)

    def mark_left(self, replica_id: str) -> list[str]:
        """Count a replica as left, see `QuorumRules.mark_left`, and fail its pending calls."""
        left = self._rules.mark_left(replica_id)
        self._fail_departed()
        if left:
            logger.info("Left: %s", ", ".join(left))
        self._answer_waiting()
        return left

    def reconsider(self) -> None:
        """Answer the calls that wait, if quorums may be formed now."""
        self._answer_waiting()

    def status(self) -> dict[str, Any]:
        """Return the status, see `describe`."""
        return describe(self._rules, self._loop.time(), self._quorum_made_s)

    def close(self) -> None:
        """Fail all pending calls."""
        self._drop_cancelled()
        while self._waiting:
            call, _ = self._waiting.popitem()
            call.set_exception(CallError(RpcStatus.UNAVAILABLE, "The lighthouse stops."))
        if self._timer is not None:
            self._timer.cancel()

    async def _quorum(self, request: dict[str, Any]) -> dict[str, Any]:
        """Wait for the next quorum of the replica whose sealed statement is "member";
        "unreachable" lists the ids of replicas that it could not reach."""
        try:
            member = Member.unseal(str(request.get("member")), self._secret)
        except AuthenticationError as error:
            raise CallError(RpcStatus.PERMISSION_DENIED, str(error)) from None
        if not self._serves(member.run_id):
            raise CallError(
                RpcStatus.FAILED_PRECONDITION,
                f"This lighthouse serves run {self._run_id}, and {member.replica_id} is of run "
                f"{member.run_id}: start a lighthouse for each run.",
            )
        self._rules.report_links(member.replica_id, _ids(request.get("unreachable")))
        quorum = await self.wait_for_quorum(member)
        if self._sealed is None or self._sealed[0] is not quorum:
            members = [member for member in quorum.members if isinstance(member, Member)]
            self._sealed = quorum, [member.seal(self._secret) for member in members]
        return {
            "lighthouse": self._instance,
            "quorum_id": quorum.quorum_id,
            "members": self._sealed[1],
        }

    def _heartbeat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Record a heartbeat. Return the last quorum, which of its members are dead, and whether
        the replica is a member."""
        replica_id, run_id = str(request.get("replica_id")), str(request.get("run_id"))
        now_s = self._loop.time()
        unknown = {"quorum_id": 0, "dead": [], "is_member": True}
        if not self._serves(run_id):
            return unknown
        self.record_heartbeat(replica_id, _ids(request.get("unreachable")))
        quorum = self._rules.quorum
        if quorum is None:
            return unknown
        dead = [id_ for id_ in quorum.ids if not self._rules.is_healthy(id_, now_s)]
        is_member = replica_id in quorum.ids
        return {"quorum_id": quorum.quorum_id, "dead": dead, "is_member": is_member}

    def record_heartbeat(self, replica_id: str, unreachable: Sequence[str] = ()) -> None:
        """Record a heartbeat, and the ids of the replicas that the sender cannot reach."""
        # Rejecting heartbeats of a replica that has left would only make it reconnect.
        if self._rules.heartbeat(replica_id, self._loop.time()):
            self._rules.report_links(replica_id, unreachable)
            self._answer_waiting()

    def _left(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"replica_ids": self.mark_left(str(request.get("replica_id")))}

    def _serves(self, run_id: str) -> bool:
        """Return whether the lighthouse serves a run: the first one, until its replicas are
        dead."""
        now_s = self._loop.time()
        if not any(
            self._rules.is_healthy(replica_id, now_s) for replica_id in self._rules.heartbeats
        ):
            self._run_id = run_id
        return self._run_id == run_id

    async def wait_for_quorum(self, member: Any) -> Quorum:
        """Wait for the next quorum of a replica, this project's or torchft's. Raises CallError."""
        call = self._loop.create_future()
        try:
            if not self._rules.request_quorum(member, self._loop.time()):
                raise self._departed(member.replica_id)
            # Before anything drops requests without a call: an earlier call of this replica may
            # have been cancelled just now.
            self._waiting[call] = member.replica_id
            self._fail_departed()
            self._answer_waiting()
            return await call
        finally:
            if call in self._waiting:
                self._answer_waiting()

    def _fail_departed(self) -> None:
        """Fail the pending calls of replicas that have left for good or were replaced."""
        self._drop_cancelled()
        for call, asked_by in list(self._waiting.items()):
            if self._rules.departure(asked_by) is not None:
                del self._waiting[call]
                call.set_exception(self._departed(asked_by))

    def _departed(self, replica_id: str) -> CallError:
        message = f"Replica {replica_id} {self._rules.departure(replica_id) or LEFT}."
        return CallError(RpcStatus.FAILED_PRECONDITION, message)

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
        while self._may_decide() and (quorum := self._rules.form_quorum(self._loop.time())):
            self._quorum_made_s = self._loop.time()
            if quorum.quorum_id != last_id:
                logger.info("Quorum %d: %s", quorum.quorum_id, ", ".join(quorum.ids))
                last_id = quorum.quorum_id
            for call, asked_by in list(self._waiting.items()):
                if asked_by in quorum.ids:
                    del self._waiting[call]
                    call.set_result(quorum)
        until_s = self._rules.evaluate(self._loop.time()).until_s
        if until_s is not None:
            self._timer = self._loop.call_at(until_s, self._answer_waiting)


def first_quorum_id() -> int:
    """Return a number above the quorum ids of all earlier lighthouses. Replicas outlive a
    lighthouse, and so do the process groups named after its quorum ids: a repeated id would be
    taken for the same group. Quorums are rarer than one per microsecond."""
    return time.time_ns() // 1000


def _ids(ids: Any) -> list[str]:
    return [id_ for id_ in ids if isinstance(id_, str)] if isinstance(ids, list) else []
