"""A lighthouse at work: what it does at once, what it refuses, and how it ends."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.launch import wait_until
from tests.unit.lighthouse.crew import Crew, Told, crew_of
from torchtitan_lite.errors import LighthouseError
from torchtitan_lite.lighthouse import client, server
from torchtitan_lite.lighthouse.rules import QuorumSettings
from torchtitan_lite.lighthouse.server import LighthouseService

TOKEN = "a secret of the tests"
# Waits so long that nothing which comes at once can be taken for the end of a wait, however slow
# the machine is.
PATIENT = QuorumSettings(min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=60_000)
_AT_ONCE_S = 10
_ANSWER_S = 30


@pytest.fixture
def service() -> Iterator[LighthouseService]:
    with LighthouseService("127.0.0.1:0", PATIENT, TOKEN) as service:
        yield service


@pytest.fixture
def crew(service: LighthouseService) -> Iterator[Crew]:
    with crew_of(service.address) as crew:
        yield crew


def _until_asking(service: LighthouseService, *steps: tuple[str, int]) -> None:
    """Wait until just these replicas ask, from these steps."""
    wait_until(lambda: _asking(service) == [*steps], _ANSWER_S)


def _until_asked(
    service: LighthouseService, call: "Future[Told | None]", step: tuple[str, int]
) -> None:
    """Wait until a call has arrived; on a slow machine it may have ended since."""
    wait_until(lambda: _asking(service) == [step] or call.done(), _ANSWER_S)


def _asking(service: LighthouseService) -> list[tuple[str, int]]:
    return [(one["replica_id"], one["step"]) for one in service.status()["waiting"]]


def test_a_quorum_comes_at_once_when_a_replica_is_told_to_have_left(
    service: LighthouseService, crew: Crew
) -> None:
    crew.live("a:1", "b:1")
    assert all(crew.ask_all("a:1", "b:1"))
    # It goes on to send heartbeats: what is under way must not bring it back.
    waiting = crew.ask("a:1")
    _until_asking(service, ("a:1", 0))
    time.sleep(0.2)
    assert not waiting.done()
    started_s = time.monotonic()
    assert client.notify_left(service.address, "b", TOKEN, _ANSWER_S) == ["b:1"]
    told = waiting.result()
    assert time.monotonic() - started_s < _AT_ONCE_S
    assert told is not None
    assert (told.quorum_id, told.ids) == (2, ("a:1",))
    time.sleep(0.2)
    assert [one["replica_id"] for one in service.status()["replicas"]] == ["a:1"]


def test_a_quorum_comes_at_once_when_the_last_one_asks(crew: Crew) -> None:
    crew.live("a", "b")
    assert all(crew.ask_all("a", "b"))
    durations_s = []
    for _ in range(20):
        started_s = time.monotonic()
        assert all(crew.ask_all("a", "b"))
        durations_s.append(time.monotonic() - started_s)
    assert min(durations_s) < 0.05


def test_who_has_left_is_told_so(service: LighthouseService, crew: Crew) -> None:
    crew.live("a:1", "b:1")
    waiting = crew.ask("a:1")
    _until_asking(service, ("a:1", 0))
    assert service.mark_left("a:1") == ["a:1"]
    with pytest.raises(RuntimeError, match="a:1 was reported to have left"):
        waiting.result()
    with pytest.raises(RuntimeError, match="under a new id"):
        crew.ask("a:1").result()
    (told,) = crew.ask_all("b:1")
    assert told is not None
    assert told.ids == ("b:1",)


def test_who_has_given_up_is_in_no_quorum(service: LighthouseService, crew: Crew) -> None:
    crew.live("a", "b", "c")
    assert crew.ask("a", timeout_s=0.2).result() is None
    _until_asking(service)
    others = [crew.ask("b"), crew.ask("c")]
    _until_asking(service, ("b", 0), ("c", 0))
    time.sleep(0.1)
    assert not any(other.done() for other in others)
    (told,) = crew.ask_all("a")
    assert told is not None
    assert told.ids == ("a", "b", "c")
    assert [other.result() for other in others] == [told, told]


def test_an_earlier_call_of_the_same_replica_takes_nothing_back(
    service: LighthouseService, crew: Crew
) -> None:
    crew.live("a", "b")
    earlier = crew.ask("a", step=1, timeout_s=1)
    _until_asked(service, earlier, ("a", 1))
    later = crew.ask("a", step=2)
    assert earlier.result() is None
    _until_asking(service, ("a", 2))
    (told,) = crew.ask_all("b")
    assert told is not None
    assert told.ids == ("a", "b")
    assert later.result() == told


def test_heartbeats_that_end_free_those_who_wait() -> None:
    settings = QuorumSettings(min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=1500)
    with (
        LighthouseService("127.0.0.1:0", settings) as service,
        crew_of(service.address) as crew,
    ):
        crew.live("a", "b")
        # To ask is a heartbeat, too: the last one of b is not before this.
        alive_s = time.monotonic()
        assert all(crew.ask_all("a", "b"))
        crew.die("b")
        (told,) = crew.ask_all("a")
        assert told is not None
        assert told.ids == ("a",)
        assert 1.5 <= time.monotonic() - alive_s < 1.5 + _AT_ONCE_S


def test_status(service: LighthouseService, crew: Crew) -> None:
    empty = client.status(f"http://{service.address}", TOKEN, _ANSWER_S)
    assert (empty["quorum_id"], empty["quorum_age_s"], empty["members"]) == (0, None, [])
    crew.live("a", "b")
    assert all(crew.ask_all("a", "b", step=4))
    waiting = crew.ask("a", step=5)
    _until_asking(service, ("a", 5))
    told = client.status(service.address, TOKEN, _ANSWER_S)
    assert told["quorum_id"] == 1
    assert 0 < told["quorum_age_s"] < 60
    assert [(one["replica_id"], one["step"]) for one in told["members"]] == [("a", 4), ("b", 4)]
    assert [(one["replica_id"], one["step"]) for one in told["waiting"]] == [("a", 5)]
    assert [(one["replica_id"], one["is_healthy"]) for one in told["replicas"]] == [
        ("a", True),
        ("b", True),
    ]
    assert told["verdict"] == "1 of 2 live replicas wait, more than half are required"
    assert told["heartbeat_timeout_ms"] == 60_000
    assert told.keys() == service.status().keys()
    assert crew.ask_all("b", step=5) == [waiting.result()]


@pytest.mark.parametrize("wrong", ["", "another", TOKEN + " ", "ä"])
def test_another_token_is_refused(service: LighthouseService, crew: Crew, wrong: str) -> None:
    crew.live("a:1")
    with pytest.raises(LighthouseError, match="another token"):
        client.notify_left(service.address, "a", wrong, _ANSWER_S)
    with pytest.raises(LighthouseError, match="another token"):
        client.status(service.address, wrong, _ANSWER_S)
    assert service.status()["replicas"]


def test_without_a_token_all_such_calls_are_refused() -> None:
    with LighthouseService("127.0.0.1:0", PATIENT) as service:
        with pytest.raises(LighthouseError, match="without a token"):
            client.notify_left(service.address, "a", "", _ANSWER_S)
        assert service.mark_left("a") == []


def test_nobody_answers() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(LighthouseError, match=f"No lighthouse answers at {address}"):
            client.status(address, TOKEN, _ANSWER_S)
        free.listen()
        with pytest.raises(LighthouseError, match="did not answer in 0.2 s"):
            client.status(address, TOKEN, 0.2)


def test_the_end_fails_calls_that_wait(
    service: LighthouseService, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It does not wait for them to end by themselves.
    monkeypatch.setattr(server, "_GRACE_S", 60.0)
    crew.live("a", "b")
    waiting = crew.ask("a")
    _until_asking(service, ("a", 0))
    crew.die("a", "b")
    started_s = time.monotonic()
    service.stop()
    service.stop()
    with pytest.raises(RuntimeError, match="The lighthouse stops"):
        waiting.result()
    assert time.monotonic() - started_s < _AT_ONCE_S
    with pytest.raises(LighthouseError, match="not running"):
        service.status()


@pytest.mark.parametrize("bind", ["29510", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", ":1"])
def test_no_place_to_listen_at(bind: str) -> None:
    with pytest.raises(LighthouseError, match="is not HOST:PORT"):
        LighthouseService(bind, PATIENT).start()


def test_an_address_of_another_machine() -> None:
    service = LighthouseService("192.0.2.1:0", PATIENT)
    with pytest.raises(LighthouseError, match="192.0.2.1:0: Cannot assign"):
        service.start()
    service.stop()


def test_a_port_in_use(service: LighthouseService) -> None:
    with pytest.raises(LighthouseError, match="another process listens there"):
        LighthouseService(service.address, PATIENT).start()
