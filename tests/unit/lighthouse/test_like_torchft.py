"""The same events give the same quorums as with torchft's own lighthouse."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from torchft.coordination import LighthouseServer

from tests.launch import wait_until
from tests.unit.lighthouse.crew import Crew, Told
from torchtitan_lite.lighthouse import messages
from torchtitan_lite.lighthouse.rules import QuorumSettings
from torchtitan_lite.lighthouse.server import LighthouseService

NEVER_MS = 60_000
"""Longer than a script takes, however slow the machine is."""
JOIN_MS, HEARTBEAT_MS = 1000, 2000
"""Of the scripts that wait for the end of one of them."""


class Scene(Crew):
    """Replicas, and a look at how many of them the lighthouse knows to ask."""

    def __init__(self, address: str, num_asking: Callable[[], int]) -> None:
        super().__init__(f"http://{address}")
        self._num_asking = num_asking

    def until_asking(self, number: int) -> None:
        """Wait until so many ask."""
        wait_until(lambda: self._num_asking() == number, 30)


Script = Callable[[Scene], list[Told | None]]
Place = tuple[str, Callable[[], int]]
"""Where a lighthouse is, and how many ask there."""


@contextmanager
def _torchft(
    min_replicas: int, join_ms: int = JOIN_MS, heartbeat_ms: int = HEARTBEAT_MS
) -> Iterator[Place]:
    server = LighthouseServer(
        "127.0.0.1:0",
        min_replicas,
        join_timeout_ms=join_ms,
        quorum_tick_ms=10,
        heartbeat_timeout_ms=heartbeat_ms,
    )
    address = f"127.0.0.1:{server.address().rpartition(':')[2]}"

    def num_asking() -> int:
        with urlopen(f"http://{address}/status", timeout=30) as page:
            told = re.search(r"/(\d+) participants healthy", page.read().decode())
        return int(told[1]) if told else 0

    try:
        yield address, num_asking
    finally:
        server.shutdown()


@contextmanager
def _ours(
    min_replicas: int, join_ms: int = JOIN_MS, heartbeat_ms: int = HEARTBEAT_MS
) -> Iterator[Place]:
    settings = QuorumSettings(min_replicas, join_ms, heartbeat_ms)
    with LighthouseService("127.0.0.1:0", settings) as service:
        yield service.address, lambda: len(service.status()["waiting"])


def _come_and_go_on(crew: Scene) -> list[Told | None]:
    crew.live("c", "a", "b")
    return [*crew.ask_all("c", "b", "a"), *crew.ask_all("a", "b", "c")]


def _join_late(crew: Scene) -> list[Told | None]:
    crew.live("a", "b")
    told = crew.ask_all("a", "b")
    crew.live("c")
    # All of the last quorum are back, so nobody is waited for.
    told += crew.ask_all("a", "b")
    late = crew.ask("c")
    crew.until_asking(1)
    return [*told, *crew.ask_all("a", "b"), late.result()]


def _one_dies(crew: Scene) -> list[Told | None]:
    crew.live("a", "b", "c")
    told = crew.ask_all("a", "b", "c")
    crew.die("c")
    return [*told, *crew.ask_all("a", "b"), *crew.ask_all("a", "b")]


def _most_die(crew: Scene) -> list[Told | None]:
    crew.live("a", "b", "c")
    told = crew.ask_all("a", "b", "c")
    crew.die("b", "c")
    # Two silent ones are the majority until their heartbeats end.
    return [*told, *crew.ask_all("a", timeout_s=0.6), *crew.ask_all("a")]


def _one_returns(crew: Scene) -> list[Told | None]:
    crew.live("a:1", "b:1")
    told = crew.ask_all("a:1", "b:1", step=3)
    crew.die("b:1")
    crew.live("b:2")
    waiting = crew.ask("a:1", step=4)
    return [*told, *crew.ask_all("b:2", step=0), waiting.result()]


def _no_newcomers(crew: Scene) -> list[Told | None]:
    crew.live("a", "b", "c")
    told = crew.ask_all("a", "b", "c")
    crew.live("d")
    newcomer = crew.ask("d")
    crew.until_asking(1)
    told += crew.ask_all("a", "b", "c", shrink_only=True)
    # torchft's lighthouse takes it in again by itself, after the others were told.
    crew.until_asking(1)
    told += crew.ask_all("a", "b", "c")
    return [*told, newcomer.result()]


def _no_newcomers_and_one_dies(crew: Scene) -> list[Told | None]:
    crew.live("a", "b", "c")
    told = crew.ask_all("a", "b", "c")
    crew.die("a")
    return [*told, *crew.ask_all("b", "c", shrink_only=True)]


def _ask_in_turn(crew: Scene, *ids: str) -> list[Told | None]:
    """For those who have given up before: torchft's lighthouse would give the first of the others
    a quorum with them while they do not ask again."""
    answers = []
    for one in ids[:-1]:
        answers.append(crew.ask(one))
        # Nothing tells when torchft's has heard of one that it has never taken out.
        time.sleep(0.3)
    answers.append(crew.ask(ids[-1]))
    return [answer.result() for answer in answers]


def _half_of_them(crew: Scene) -> list[Told | None]:
    crew.live("a", "b", "c", "d")
    told = crew.ask_all("a", "b", timeout_s=0.6)
    return told + _ask_in_turn(crew, "a", "b", "c")


def _too_few(crew: Scene) -> list[Told | None]:
    crew.live("a", "b")
    told = crew.ask_all("a", "b", timeout_s=0.4)
    crew.live("c")
    return told + _ask_in_turn(crew, "a", "b", "c")


def _steps_differ(crew: Scene) -> list[Told | None]:
    crew.live("a", "b")
    ahead = crew.ask("b", step=9)
    told = crew.ask_all("a", step=5)
    return [*told, ahead.result()]


SCRIPTS: dict[str, tuple[tuple[int, int, int], Script]] = {
    "all come, and go on": ((1, NEVER_MS, NEVER_MS), _come_and_go_on),
    "one joins late": ((1, NEVER_MS, NEVER_MS), _join_late),
    "one dies": ((1, JOIN_MS, NEVER_MS), _one_dies),
    "most die": ((1, NEVER_MS, HEARTBEAT_MS), _most_die),
    "one returns with a new uuid": ((2, JOIN_MS, NEVER_MS), _one_returns),
    "no newcomers are wanted": ((1, NEVER_MS, NEVER_MS), _no_newcomers),
    "no newcomers, and one dies": ((1, JOIN_MS, NEVER_MS), _no_newcomers_and_one_dies),
    "half of them ask": ((1, JOIN_MS, NEVER_MS), _half_of_them),
    "too few ask": ((3, NEVER_MS, NEVER_MS), _too_few),
    "their steps differ": ((1, NEVER_MS, NEVER_MS), _steps_differ),
}
"""By name: how many are needed, how long those who ask wait for others, how long a heartbeat
counts."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_events_same_quorums(name: str) -> None:
    settings, script = SCRIPTS[name]

    def play(place: Place) -> list[Told | None]:
        with closing(Scene(*place)) as crew:
            return script(crew)

    with (
        _torchft(*settings) as theirs,
        _ours(*settings) as ours,
        ThreadPoolExecutor(2) as threads,
    ):
        expected, told = threads.map(play, (theirs, ours))
    assert told == expected
    assert any(told)


def _ask_once(at: str, **asked: Any) -> Any:
    """What torchft's client does, with the messages of this project."""
    with grpc.insecure_channel(at) as channel:
        call = channel.unary_unary(
            f"/{messages.TORCHFT_SERVICE}/Quorum",
            request_serializer=messages.LighthouseQuorumRequest.SerializeToString,
            response_deserializer=messages.LighthouseQuorumResponse.FromString,
        )
        member = messages.QuorumMember(**asked)
        return call(messages.LighthouseQuorumRequest(requester=member), timeout=30).quorum


@pytest.mark.parametrize("lighthouse", [_torchft, _ours])
def test_every_field_arrives_and_failures_count(
    lighthouse: Callable[[int], Any],
) -> None:
    asked = {
        "replica_id": "a:1",
        "address": "http://host:1",
        "store_address": "host:2",
        "step": -3,
        "world_size": 2**40,
        "shrink_only": True,
        "data": '{"key": "ä"}',
    }
    with lighthouse(1) as (address, _):
        quorums = [_ask_once(address, **asked, commit_failures=count) for count in (0, 0, 1, 2, 0)]
    assert [quorum.quorum_id for quorum in quorums] == [1, 1, 2, 3, 3]
    (member,) = quorums[3].participants
    assert member == messages.QuorumMember(**asked, commit_failures=2)
    assert abs(quorums[0].created.seconds - time.time()) < 60
