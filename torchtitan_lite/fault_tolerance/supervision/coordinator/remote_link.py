"""Link of a machine's member to the coordinator.

A thread sends the reports, so that the member never waits for the network. It sends them only while
the main loop runs: a machine whose main loop is blocked must count as lost.
"""

import secrets
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torchtitan_lite.core.errors import MACHINE_FAULT, RpcError, RpcStatus
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_fence import lease_clock_s
from torchtitan_lite.distributed.rpc.client import RpcClient
from torchtitan_lite.fault_tolerance.supervision.coordinator.link import Link
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    MAX_CHARS,
    PURPOSE,
    SERVICE,
    Answer,
    Claim,
    Report,
    Vote,
    VoterList,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    BLOCKED_S,
    CALL_S,
    LEASE_S,
    MAX_REPORT_S,
    REPORT_S,
    WAIT_S,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import RunMesh

_LEAVE_S = 1.0
_RECONNECT_S = 1.5
"""Time without a lease, from a coordinator that answers, after which this machine looks for
another one."""


class RemoteLink(Link):
    """Link to a coordinator that several machines share."""

    def __init__(
        self,
        endpoint: str,
        secret: str,
        *,
        address: str,
        name: str,
        run_id: str,
        num_machines: int,
        num_replicas: int = 1,
        num_ranks: int,
        fingerprint: str,
        dump_folder: str = "",
    ) -> None:
        """See `Report`."""
        self._connect = lambda: RpcClient(endpoint, SERVICE, secret, PURPOSE)
        self._client = self._connect()
        self.report = Report(
            machine=secrets.token_hex(16),
            sequence=0,
            name=name,
            address=address,
            run_id=run_id,
            num_machines=num_machines,
            num_replicas=num_replicas,
            num_ranks=num_ranks,
            mesh=RunMesh(num_ranks).to_text(),
            fingerprint=fingerprint,
            dump_folder=dump_folder[:MAX_CHARS],
        )
        self._sequence = 0
        self._vote = Vote()
        self._report_s = REPORT_S
        self.problem = "it has not answered yet"
        self._reported: object = RpcStatus.UNAVAILABLE
        """Status of the last failure that was logged; before the first answer, not that of a
        coordinator that starts later; None after an answer."""
        self._leased_s = self._beat_s = self._connected_s = 0.0
        self._wake = threading.Event()
        self._ended = False
        self._revision: tuple[int, int] | None = None
        """Replica and revision of the last answer; None if it has been waited for."""
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._waiter = threading.Thread(target=self._wait_for_news, name="news", daemon=True)

    def start(self) -> None:
        """Start to report."""
        self.beat()
        self._thread.start()
        self._waiter.start()

    def beat(self) -> None:
        self._beat_s = time.monotonic()

    def update(self, **changes: Any) -> None:
        self.report = replace(self.report, **changes)
        self._wake.set()

    @property
    def lease_until_s(self) -> float:
        return self._leased_s + LEASE_S

    def leave(self, reason: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(CALL_S + _LEAVE_S)
        with suppress(RpcError):
            if self._vote.term:
                self._client.call("Leave", {**self._request(), "reason": reason}, _LEAVE_S)
        self._client.close()

    def _request(self) -> dict[str, Any]:
        self._sequence += 1
        report = replace(self.report, sequence=self._sequence)
        vote = replace(self._vote, has_lease=self.has_lease)
        return {"report": report.to_json(), "vote": vote.to_json()}

    def _run(self) -> None:
        while not self._ended and not self.rejection:
            self._wake.clear()
            if time.monotonic() - self._beat_s <= BLOCKED_S:
                self._send(lease_clock_s())
            self._wake.wait(self._report_s)

    def _wait_for_news(self) -> None:
        """Report at once whenever the coordinator has decided something about the replica."""
        while not self._ended and not self.rejection:
            self._answered.wait(REPORT_S)
            revision, self._revision = self._revision, None
            self._answered.clear()
            if revision is None:
                continue
            request = {
                "replica": revision[0],
                "revision": revision[1],
                "machine": self.report.machine,
            }
            # The next report says why it fails; a machine whose connection broke must send it soon.
            with suppress(RpcError):
                self._client.call("Wait", request, WAIT_S + CALL_S)
            self._wake.set()

    def _send(self, now_s: float) -> None:
        try:
            response = self._client.call("Report", self._request(), CALL_S)
            claim = Claim.parse(response["claim"])
            voters = VoterList.parse(claim.voters)
            answer = Answer.parse(response["answer"]) if claim.leads else None
            revision = int(response["revision"]) if claim.leads else 0
        except RpcError as error:
            # Once it has answered, an error may be due to its restart, after which a machine of
            # another run may have reached it first. A status without a proof decides nothing,
            # because any machine on the way can forge it.
            is_at_fault = self.report.failure_status == MACHINE_FAULT
            if error.is_final and (self.answer is None or is_at_fault):
                self.rejection = self.problem = str(error)
            else:
                self._fail(str(error), error.code)
                if error.code is RpcStatus.DEADLINE_EXCEEDED:
                    # The path of this connection may drop everything.
                    self._replace_client()
            return
        except (KeyError, TypeError, ValueError) as error:
            self.rejection = f"The coordinator answers with a malformed message: {error}."
            return
        if claim.term < self._vote.term:
            self._fail("another coordinator has taken over from the one that answers", "term")
            self._reconnect(now_s)
            return
        is_new = claim.term > self._vote.term
        is_newer = voters.version > VoterList.parse(self._vote.voters).version
        self._vote = Vote(
            term=claim.term,
            answered_s=claim.answered_s,
            voters=claim.voters if is_newer else self._vote.voters,
        )
        self._report_s = min(max(REPORT_S, claim.report_s), MAX_REPORT_S)
        if answer is not None:
            self.problem, self._reported = "", None
            self.answer, self._leased_s = answer, now_s
            self._revision = answer.replica, revision
            self._answered.set()
        elif not is_new:
            self._fail(claim.problem, "leads")
            self._reconnect(now_s)
        if is_new or is_newer:
            self._wake.set()

    def _reconnect(self, now_s: float) -> None:
        """Connect again, unless that was tried just now: the address may be that of several
        coordinators, of which a connection reaches one."""
        if now_s - max(self._leased_s, self._connected_s) > _RECONNECT_S:
            self._connected_s = now_s
            self._replace_client()

    def _replace_client(self) -> None:
        self._client.close()
        self._client = self._connect()
        self._wake.set()

    def _fail(self, problem: str, kind: object) -> None:
        """Report once that the lease is not renewed; `kind` distinguishes failures."""
        if kind is not self._reported:
            self._reported = kind
            logger.warning("The coordinator does not renew the lease: %s", problem)
        self.problem = problem
