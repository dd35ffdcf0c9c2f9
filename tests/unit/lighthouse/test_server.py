"""A lighthouse at work: what it does at once, what it refuses, and how it ends."""

import socket
import time
from collections.abc import Iterator

import pytest

from tests.unit.lighthouse.crew import Crew, crew_of
from torchtitan_lite.errors import LighthouseError
from torchtitan_lite.lighthouse import client
from torchtitan_lite.lighthouse.rules import QuorumSettings
from torchtitan_lite.lighthouse.server import LighthouseService

TOKEN = "a secret of the tests"
PATIENT = QuorumSettings(min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=5000)


@pytest.fixture
def service() -> Iterator[LighthouseService]:
    with LighthouseService("127.0.0.1:0", PATIENT, TOKEN) as service:
        yield service


@pytest.fixture
def crew(service: LighthouseService) -> Iterator[Crew]:
    with crew_of(service.address) as crew:
        yield crew


def test_a_quorum_comes_at_once_when_a_replica_is_told_to_have_left(
    service: LighthouseService, crew: Crew
) -> None:
    crew.live("a:1", "b:1")
    assert all(crew.ask_all("a:1", "b:1"))
    # It goes on to send heartbeats: what is under way must not bring it back.
    waiting = crew.ask("a:1")
    time.sleep(0.2)
    assert not waiting.done()
    started_s = time.monotonic()
    assert client.tell_left(service.address, "b", TOKEN, 5) == ["b:1"]
    told = waiting.result()
    assert time.monotonic() - started_s < 0.3
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
    time.sleep(0.2)
    assert service.left("a:1") == ["a:1"]
    with pytest.raises(RuntimeError, match="a:1 has left"):
        waiting.result()
    with pytest.raises(RuntimeError, match="under a new id"):
        crew.ask("a:1").result()
    (told,) = crew.ask_all("b:1")
    assert told is not None
    assert told.ids == ("b:1",)


def test_who_has_given_up_is_in_no_quorum(crew: Crew) -> None:
    crew.live("a", "b", "c")
    assert crew.ask("a", timeout_s=0.2).result() is None
    others = [crew.ask("b", timeout_s=1), crew.ask("c", timeout_s=1)]
    time.sleep(0.2)
    assert not any(other.done() for other in others)
    (told,) = crew.ask_all("a")
    assert told is not None
    assert told.ids == ("a", "b", "c")
    assert [other.result() for other in others] == [told, told]


def test_an_earlier_call_of_the_same_replica_takes_nothing_back(crew: Crew) -> None:
    crew.live("a", "b")
    earlier = crew.ask("a", timeout_s=0.3)
    time.sleep(0.1)
    later = crew.ask("a", timeout_s=5)
    assert earlier.result() is None
    (told,) = crew.ask_all("b")
    assert told is not None
    assert told.ids == ("a", "b")
    assert later.result() == told


def test_heartbeats_that_end_free_those_who_wait() -> None:
    settings = QuorumSettings(min_replicas=1, join_timeout_ms=9000, heartbeat_timeout_ms=500)
    with (
        LighthouseService("127.0.0.1:0", settings) as service,
        crew_of(service.address) as crew,
    ):
        crew.live("a", "b")
        assert all(crew.ask_all("a", "b"))
        crew.die("b")
        started_s = time.monotonic()
        (told,) = crew.ask_all("a")
        assert told is not None
        assert told.ids == ("a",)
        assert 0.3 < time.monotonic() - started_s < 0.9


def test_status(service: LighthouseService, crew: Crew) -> None:
    empty = client.status(f"http://{service.address}", TOKEN, 5)
    assert (empty["quorum_id"], empty["quorum_age_s"], empty["members"]) == (0, None, [])
    crew.live("a", "b")
    assert all(crew.ask_all("a", "b", step=4))
    waiting = crew.ask("a", step=5, timeout_s=0.5)
    time.sleep(0.2)
    told = client.status(service.address, TOKEN, 5)
    assert told["quorum_id"] == 1
    assert 0 < told["quorum_age_s"] < 5
    assert [(one["replica_id"], one["step"]) for one in told["members"]] == [("a", 4), ("b", 4)]
    assert [(one["replica_id"], one["step"]) for one in told["waiting"]] == [("a", 5)]
    assert [(one["replica_id"], one["is_healthy"]) for one in told["replicas"]] == [
        ("a", True),
        ("b", True),
    ]
    assert told["verdict"] == "1 of 2 live replicas ask, more than half are needed"
    assert told["heartbeat_timeout_ms"] == 5000
    assert told.keys() == service.status().keys()
    assert waiting.result() is None


@pytest.mark.parametrize("wrong", ["", "another", TOKEN + " ", "ä"])
def test_another_token_is_refused(service: LighthouseService, crew: Crew, wrong: str) -> None:
    crew.live("a:1")
    with pytest.raises(LighthouseError, match="another token"):
        client.tell_left(service.address, "a", wrong, 5)
    with pytest.raises(LighthouseError, match="another token"):
        client.status(service.address, wrong, 5)
    assert service.status()["replicas"]


def test_without_a_token_all_such_calls_are_refused() -> None:
    with LighthouseService("127.0.0.1:0", PATIENT) as service:
        with pytest.raises(LighthouseError, match="without a token"):
            client.tell_left(service.address, "a", "", 5)
        assert service.left("a") == []


def test_nobody_answers() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(LighthouseError, match=f"No lighthouse answers at {address}"):
            client.status(address, TOKEN, 5)
        free.listen()
        with pytest.raises(LighthouseError, match="did not answer in 0.2 s"):
            client.status(address, TOKEN, 0.2)


def test_the_end_fails_calls_that_wait(service: LighthouseService, crew: Crew) -> None:
    crew.live("a", "b")
    waiting = crew.ask("a")
    time.sleep(0.2)
    crew.die("a", "b")
    started_s = time.monotonic()
    service.stop()
    service.stop()
    with pytest.raises(RuntimeError, match="The lighthouse ends"):
        waiting.result()
    assert time.monotonic() - started_s < 0.9
    with pytest.raises(LighthouseError, match="not running"):
        service.status()


@pytest.mark.parametrize("bind", ["29510", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", ":1"])
def test_no_place_to_listen_at(bind: str) -> None:
    with pytest.raises(LighthouseError, match="is no HOST:PORT"):
        LighthouseService(bind, PATIENT).start()


def test_an_address_of_another_machine() -> None:
    service = LighthouseService("192.0.2.1:0", PATIENT)
    with pytest.raises(LighthouseError, match="192.0.2.1:0: Cannot assign"):
        service.start()
    service.stop()


def test_a_port_in_use(service: LighthouseService) -> None:
    with pytest.raises(LighthouseError, match="another process listens there"):
        LighthouseService(service.address, PATIENT).start()
