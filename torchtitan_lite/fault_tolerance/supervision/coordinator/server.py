"""The coordinator as a server of authenticated calls. At the same address it is the lighthouse of a
run of several replicas."""

import asyncio
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from random import SystemRandom
from typing import Any

from torchtitan_lite.core.errors import RpcStatus
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_fence import lease_clock_s
from torchtitan_lite.core.outputs import quorum_name
from torchtitan_lite.distributed.rpc.protocol import Identity
from torchtitan_lite.distributed.rpc.server import CallError, Handler, RpcServer, Service
from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings
from torchtitan_lite.fault_tolerance.lighthouse.servicer import LighthouseServicer, first_quorum_id
from torchtitan_lite.fault_tolerance.supervision.coordinator.coordinator import Coordinator
from torchtitan_lite.fault_tolerance.supervision.coordinator.leadership import new_term
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    PURPOSE,
    SERVICE,
    Answer,
    Claim,
    Report,
    RunState,
    Vote,
    VoterList,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.replica_coordinator import (
    Busy,
    Rejected,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    BROKEN_S,
    PASS_S,
    WAIT_S,
)

_MARGIN_S = 0.01
"""So that a timer is not early."""
_LATE_S = 0.15
"""Delay of a timer up to which the reports of all machines that live have been served."""


def coordinator_server(
    bind: str, secret: str, settings: QuorumSettings | None = None, *, is_sole: bool = False
) -> RpcServer:
    """Return the coordinator at `bind`, "HOST:PORT"; port 0 selects a free one. `start` listens.
    `settings` are those of the quorums of its replicas; `is_sole`: no other one may serve the run,
    see `Leadership`."""
    lighthouse: list[LighthouseServicer] = []

    def services() -> Sequence[Service]:
        loop = asyncio.get_running_loop()
        coordinator = Coordinator(new_term(time.time(), SystemRandom()), is_sole=is_sole)
        lighthouse.append(
            LighthouseServicer(
                loop,
                settings or QuorumSettings(),
                secret,
                first_quorum_id(),
                may_decide=lambda: coordinator.may_decide(lease_clock_s()),
            )
        )
        calls = _Calls(coordinator, lighthouse[0])
        own: dict[str, Handler] = {
            "Report": calls.report,
            "Leave": calls.leave,
            "Wait": calls.wait,
            "Status": calls.status,
        }
        service = Service(Identity(SERVICE, secret, PURPOSE), own)
        return [service, lighthouse[0].service()]

    async def fail_calls() -> None:
        lighthouse[0].close()

    return RpcServer(bind, services, name="coordinator", on_stop=fail_calls)


class _Calls:
    """Handlers of the calls, all on one event loop."""

    def __init__(self, coordinator: Coordinator, lighthouse: LighthouseServicer) -> None:
        """`lighthouse` is that of the run's replicas."""
        self._coordinator, self._lighthouse = coordinator, lighthouse
        self._shown: dict[int, tuple[RunState, int, int]] = {}
        self._claim: Claim | None = None
        """The last one."""
        self._news: dict[int, Hashable] = {}
        self._revisions: Counter[int] = Counter()
        """Number of changes of the news of each replica."""
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        """Machines that wait for the next change, by replica."""
        self._last_waits: dict[str, asyncio.Future[None]] = {}
        """The newest one of each machine: an earlier connection of it may end later."""
        self._breaks_due_s: float | None = None
        """When the connections that broke are looked at; None if none did."""
        self._next_pass_s = 0.0
        self._delayed: set[int] = set()
        """Replicas about which is decided when their delay is over."""

    def report(self, request: dict[str, Any]) -> dict[str, Any]:
        """Record the report of a machine, and return the answer to it."""
        report, vote = _parse(request)
        before = self._coordinator.states
        try:
            claim, answer = self._coordinator.report(report, vote, lease_clock_s())
        except Rejected as error:
            raise CallError(RpcStatus.FAILED_PRECONDITION, str(error)) from None
        except Busy as error:
            raise CallError(RpcStatus.UNAVAILABLE, str(error)) from None
        self._notify(before)
        self._show(claim)
        if answer is None:
            return {"claim": claim.to_json()}
        self._announce(answer.replica)
        self._schedule(answer)
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
        revision = self._revisions[answer.replica]
        return {"claim": claim.to_json(), "answer": answer.to_json(), "revision": revision}

    async def wait(self, request: dict[str, Any]) -> dict[str, Any]:
        """Wait until a machine should report because its replica has changed since the revision of
        its last answer, or for a while."""
        replica, revision = request.get("replica"), request.get("revision")
        machine = str(request.get("machine", ""))
        if type(replica) is not int or revision != self._revisions.get(replica, 0):
            return {}
        change = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(replica, set()).add(change)
        self._last_waits[machine] = change
        try:
            async with asyncio.timeout(WAIT_S):
                await change
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if self._last_waits.get(machine) is change:
                self._disconnected(machine)
            raise
        finally:
            if self._last_waits.get(machine) is change:
                del self._last_waits[machine]
            self._waiting.get(replica, set()).discard(change)
        return {}

    def _disconnected(self, machine: str) -> None:
        """Decide whether a machine is lost when it has had time to connect again."""
        now_s = lease_clock_s()
        self._coordinator.disconnected(machine, now_s)
        if self._breaks_due_s is None:
            self._check_breaks_at(now_s + BROKEN_S)
        else:
            # One pass is enough for all, and must not precede the last one.
            self._breaks_due_s = now_s + BROKEN_S

    def _check_breaks_at(self, due_s: float) -> None:
        self._breaks_due_s = due_s
        delay_s = max(0.0, due_s - lease_clock_s()) + _MARGIN_S
        asyncio.get_running_loop().call_later(delay_s, self._check_breaks)

    def _check_breaks(self) -> None:
        now_s, due_s = lease_clock_s(), self._breaks_due_s
        assert due_s is not None
        if now_s < due_s:
            self._check_breaks_at(due_s)
            return
        if now_s > due_s + _LATE_S:
            # This process was paused or busy, and machines may wait to connect again.
            self._check_breaks_at(now_s + BROKEN_S)
            return
        self._breaks_due_s = None
        before = self._coordinator.states
        self._coordinator.check_breaks(now_s)
        self._notify(before)
        self._announce(*range(len(self._coordinator.states)))

    def _schedule(self, answer: Answer) -> None:
        """Decide about a replica when the delay of its next generation is over, and not only with
        the next report."""
        left_s = self._coordinator.restart_s(answer.replica) - lease_clock_s()
        if answer.state is RunState.FORMING and left_s > 0 and answer.replica not in self._delayed:
            self._delayed.add(answer.replica)
            asyncio.get_running_loop().call_later(left_s, self._decide, answer.replica)

    def _decide(self, replica: int) -> None:
        self._delayed.discard(replica)
        self._coordinator.advance(replica, lease_clock_s())
        self._announce(replica)

    def _announce(self, *replicas: int) -> None:
        """Let the machines of these replicas report if their news have changed; those of all
        replicas now and then, because a report may change others, too."""
        now_s = lease_clock_s()
        if now_s >= self._next_pass_s:
            self._next_pass_s = now_s + PASS_S
            replicas = (*range(len(self._coordinator.states)),)
        for number in replicas:
            news = self._coordinator.news(number)
            if self._news.get(number) != news:
                self._news[number] = news
                self._revisions[number] += 1
                for change in self._waiting.pop(number, set()):
                    if not change.done():
                        change.set_result(None)

    def status(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the status of the coordinator and of its lighthouse, as the "quorum"."""
        del request
        return {
            **self._coordinator.status(lease_clock_s()),
            "quorum": self._lighthouse.status(),
        }

    def _show(self, claim: Claim) -> None:
        """Log whether this coordinator leads when that changes."""
        before, self._claim = self._claim, claim
        had_led = before is not None and before.leads and before.term == claim.term
        if claim.leads and not had_led:
            logger.info("This coordinator leads (term %d).", claim.term)
            self._lighthouse.reconsider()
        elif had_led and not claim.leads:
            logger.warning(
                "This coordinator does not lead any more: %s. Until it does, nothing is decided "
                "and no machine keeps its lease. If the others are gone for good and no other "
                "coordinator runs, start it again with --sole.",
                claim.problem,
            )

    def _notify(self, before: Sequence[RunState]) -> None:
        """Notify the lighthouse of the replicas whose generation has ended, so that the others do
        not wait until their heartbeats are late."""
        for replica, (was, state) in enumerate(zip(before, self._coordinator.states, strict=False)):
            if was is RunState.RUNNING and state is RunState.FORMING:
                self._lighthouse.mark_left(quorum_name(replica))

    def leave(self, request: dict[str, Any]) -> dict[str, Any]:
        """Forget a machine."""
        report, vote = _parse(request)
        reason = str(request.get("reason", ""))
        before = self._coordinator.states
        self._coordinator.leave(report, vote, reason[:1000], lease_clock_s())
        self._notify(before)
        return {}


def _parse(request: dict[str, Any]) -> tuple[Report, Vote]:
    """Parse what every call contains. Raises CallError."""
    try:
        vote = Vote.parse(dict(request.get("vote", {})))
        VoterList.parse(vote.voters)
        return Report.parse(dict(request.get("report", {}))), vote
    except (TypeError, ValueError) as error:
        text = f"The report is malformed: {error}."
        raise CallError(RpcStatus.INVALID_ARGUMENT, text) from None
