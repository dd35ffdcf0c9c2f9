"""An agent that is blocked does not report."""

import threading
import time
from contextlib import suppress
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.harness import launch
from tests.unit.fuzzing import FEW_OR_MANY, fuzz, json_objects
from torchtitan_lite.core.errors import MACHINE_FAULT, RpcError, RpcStatus
from torchtitan_lite.core.output_fence import lease_clock_s
from torchtitan_lite.distributed.rpc.client import RpcClient
from torchtitan_lite.distributed.rpc.server import RpcServer
from torchtitan_lite.fault_tolerance.supervision.coordinator import leadership, replica_coordinator
from torchtitan_lite.fault_tolerance.supervision.coordinator import remote_link as link_module
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import (
    PURPOSE,
    SERVICE,
    Answer,
    Claim,
    FailureKind,
    NodeState,
    Report,
    RunState,
    Vote,
)
from torchtitan_lite.fault_tolerance.supervision.coordinator.remote_link import RemoteLink
from torchtitan_lite.fault_tolerance.supervision.coordinator.server import coordinator_server
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    CALL_S,
    LEASE_S,
    REPORT_S,
    SUSPECT_S,
)

_SECRET = "a secret of the tests"
_ANSWER = tuple(field.name for field in fields(Answer))


def _link(endpoint: str, run_id: str = "run", num_machines: int = 1) -> RemoteLink:
    return RemoteLink(
        endpoint,
        _SECRET,
        address="127.0.0.1",
        name="a",
        run_id=run_id,
        num_machines=num_machines,
        num_ranks=1,
        fingerprint="1-abc",
    )


def test_reports_end_while_the_main_loop_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "BLOCKED_S", 0.3)
    monkeypatch.setattr(link_module, "REPORT_S", 0.05)
    with coordinator_server("127.0.0.1:0", _SECRET) as server:
        link = _link(server.address)
        link.start()
        launch.wait_until(lambda: (link.beat(), link.answer)[1], 10)
        time.sleep(0.6)
        lease_s = link.lease_until_s
        time.sleep(0.3)
        assert link.lease_until_s == lease_s
        link.beat()
        launch.wait_until(lambda: link.lease_until_s > lease_s, 5)
        link.leave()


def test_a_lease_ends_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    with coordinator_server("127.0.0.1:0", _SECRET) as server:
        link = _link(server.address)
        link.start()
        launch.wait_until(lambda: (link.beat(), link.answer)[1], 10)
        assert link.has_lease
        # Only this clock counts the time of a suspension.
        clock_gettime = time.clock_gettime

        def resumed(clock: int) -> float:
            return clock_gettime(clock) + (LEASE_S if clock == time.CLOCK_BOOTTIME else 0.0)

        with monkeypatch.context() as patch:
            patch.setattr(link_module, "REPORT_S", 60.0)
            patch.setattr(time, "clock_gettime", resumed)
            assert not link.has_lease
        link.leave()


def test_a_changed_report_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "REPORT_S", 60.0)
    with coordinator_server("127.0.0.1:0", _SECRET) as server:
        link = _link(server.address)
        link.start()
        launch.wait_until(lambda: link.answer, 10)
        lease_s = link.lease_until_s
        link.update(is_stopping=True)
        assert launch.wait_until(lambda: link.lease_until_s > lease_s, 5) < 2
        link.leave()


class _Client:
    """Records the calls of a link, whose reports last until `may_answer`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.code = RpcStatus.UNAVAILABLE
        self.may_answer = threading.Event()

    def call(self, name: str, content: object, timeout_s: float) -> Any:
        if name == "Report":
            assert self.may_answer.wait(10) and len(self.calls) < 9
        self.calls.append(name)
        raise RpcError("no answer", self.code)

    def close(self) -> None: ...


def test_a_report_without_an_answer_is_followed_by_one_on_another_connection() -> None:
    """A path that drops everything must not cost a machine its place."""
    link: Any = _link("127.0.0.1:1")
    clients: list[_Client] = []

    def connect() -> _Client:
        clients.append(_Client())
        return clients[-1]

    link._connect, link._client = connect, _Client()
    before, link._client.code = link._client, RpcStatus.DEADLINE_EXCEEDED
    link._client.may_answer.set()
    link._send(lease_clock_s())
    assert clients == [link._client] != [before] and link._wake.is_set()
    # One that was refused keeps its connection.
    link._client.may_answer.set()
    link._send(lease_clock_s())
    assert clients == [link._client]
    assert CALL_S + 2 * REPORT_S < SUSPECT_S


def test_reports_have_their_interval_unless_they_change() -> None:
    link: Any = _link("127.0.0.1:1")
    link._client = _Client()
    link._client.may_answer.set()
    waits: list[tuple[float, bool]] = []

    class Wake(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append((timeout, self.is_set()))
            link._ended = len(waits) == 3
            return True

    link._wake = Wake()
    link.update(is_stopping=True)
    link.beat()
    link._run()
    assert waits == [(REPORT_S, False)] * 3
    assert link._client.calls == ["Report"] * 3


def test_no_report_follows_the_departure() -> None:
    """It would bring the machine back."""
    link: Any = _link("127.0.0.1:1")
    client = link._client = _Client()
    link._vote = Vote(term=1)
    link.start()
    join = link._thread.join

    def end(timeout_s: float) -> None:
        client.may_answer.set()
        join(timeout_s)

    link._thread.join = end
    link.leave()
    client.may_answer.set()
    assert client.calls == ["Report", "Leave"]


@pytest.mark.parametrize("is_at_fault", [False, True])
def test_only_a_machine_at_fault_ends_when_it_is_rejected_after_a_restart(
    is_at_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "REPORT_S", 0.05)
    monkeypatch.setattr(link_module, "BLOCKED_S", 0.5)
    with coordinator_server("127.0.0.1:0", _SECRET) as server:
        address = server.address
        link = _link(address)
        link.start()
        launch.wait_until(lambda: (link.beat(), link.answer)[1], 10)
        if is_at_fault:
            link.update(failure_status=MACHINE_FAULT)
        # It is silent until a machine of another run has reached the next server.
        time.sleep(0.8)
    with coordinator_server(address, _SECRET):
        other = _link(address, "other")
        other.start()
        launch.wait_until(lambda: (other.beat(), other.answer)[1], 10)

        def is_rejected() -> bool:
            link.beat()
            return "--rdzv-id" in link.problem

        launch.wait_until(is_rejected, 20)
        assert bool(link.rejection) is is_at_fault
        other.leave()
        if not is_at_fault:
            launch.wait_until(lambda: (link.beat(), not link.problem)[1], 20)
        link.leave()


def test_a_malformed_report_is_answered_with_the_reason() -> None:
    with (
        coordinator_server("127.0.0.1:0", _SECRET) as server,
        RpcClient(server.address, SERVICE, _SECRET, PURPOSE) as client,
        pytest.raises(RpcError, match="The report is malformed") as caught,
    ):
        client.call("Report", {"report": {"machine": "a"}, "vote": Vote().to_json()}, 5)
    assert caught.value.is_final


@FEW_OR_MANY
def test_arbitrary_messages_are_parsed_or_rejected(num_examples: int) -> None:
    right = _link("127.0.0.1:1").report.to_json()

    def check(changes: dict[str, Any]) -> None:
        for kind, content in ((Report, {**right, **changes}), (Answer, changes), (Claim, changes)):
            with suppress(ValueError):
                assert kind.parse(content).to_json() == content

    fuzz(num_examples, check, changes=json_objects(*right, *_ANSWER))


@FEW_OR_MANY
def test_arbitrary_requests_are_answered(num_examples: int) -> None:
    with (
        coordinator_server("127.0.0.1:0", _SECRET) as server,
        RpcClient(server.address, SERVICE, _SECRET, PURPOSE) as client,
    ):

        def check(name: str, request: dict[str, Any]) -> None:
            with pytest.raises(RpcError, match="malformed") as caught:
                client.call(name, request, 30)
            assert caught.value.is_final

        names = st.sampled_from(["Report", "Leave"])
        fuzz(num_examples, check, name=names, request=json_objects("report", "reason", "machine"))


def test_a_status_without_a_proof_does_not_end_a_machine(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("WARNING", "torchtitan_lite"),
        RpcServer("127.0.0.1:0", lambda: (), name="stranger") as stranger,
    ):
        address = stranger.address
        link = _link(address)
        link.start()
        launch.wait_until(lambda: (link.beat(), "was closed" in link.problem)[1], 10)
        assert "was closed" not in caplog.text
        stranger.stop()
        with coordinator_server(address, _SECRET):
            launch.wait_until(lambda: (link.beat(), link.answer)[1], 20)
            assert not link.rejection
            link.leave()


def test_a_decision_reaches_all_machines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with their next report."""
    monkeypatch.setattr(link_module, "REPORT_S", 5.0)
    monkeypatch.setattr(leadership, "ACKNOWLEDGED_S", 60.0)
    monkeypatch.setattr(replica_coordinator, "LEARN_S", 0.5)
    with coordinator_server("127.0.0.1:0", _SECRET) as server:
        links = [_link(server.address, num_machines=2) for _ in range(2)]
        for link in links:
            link.start()
        launch.wait_until(lambda: all(link.answer for link in links), 10)
        # They know the revision, and wait for the next one.
        time.sleep(0.6)
        began_s = time.monotonic()
        links[0].update(name="another name")
        for link in links:
            launch.wait_until(lambda link=link: _state(link) is RunState.RUNNING, 3)
        assert time.monotonic() < began_s + 3
        for link in links:
            link.leave()


def _state(link: RemoteLink) -> RunState | None:
    return None if link.answer is None else link.answer.state


def test_the_next_generation_does_not_wait_for_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the delay of a restart, the coordinator decides by itself."""
    monkeypatch.setattr(link_module, "REPORT_S", 5.0)
    monkeypatch.setattr(leadership, "ACKNOWLEDGED_S", 60.0)
    monkeypatch.setattr(replica_coordinator, "LEARN_S", 0.5)
    with coordinator_server("127.0.0.1:0", _SECRET) as server:
        link = _link(server.address)
        link.start()
        launch.wait_until(lambda: link.answer, 10)
        time.sleep(0.6)
        link.update(name="another name")
        launch.wait_until(lambda: _state(link) is RunState.RUNNING, 3)
        joined = {"generation": 1, "replica": 0, "node_rank": 0, "seen_generation": 1}
        link.update(phase=NodeState.JOINED, **joined)
        time.sleep(0.3)
        link.update(phase=NodeState.FAILED, failure=FailureKind.DEATH, failure_text="killed")
        launch.wait_until(lambda: _state(link) is RunState.FORMING, 3)
        link.update(phase=NodeState.STANDBY)
        launch.wait_until(lambda: link.answer is not None and link.answer.generation == 2, 3)
        link.leave()
