"""The same events give the same quorums as with torchft's own lighthouse."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from torchft.coordination import LighthouseServer

from tests.unit.lighthouse.crew import Crew, Told, crew_of
from torchtitan_lite.lighthouse import messages
from torchtitan_lite.lighthouse.rules import QuorumSettings
from torchtitan_lite.lighthouse.server import LighthouseService

JOIN_MS, HEARTBEAT_MS = 400, 900
Script = Callable[[Crew], list[Told | None]]


@contextmanager
def _torchft(min_replicas: int) -> Iterator[str]:
    server = LighthouseServer(
        "127.0.0.1:0",
        min_replicas,
        join_timeout_ms=JOIN_MS,
        quorum_tick_ms=10,
        heartbeat_timeout_ms=HEARTBEAT_MS,
    )
    try:
        yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


@contextmanager
def _ours(min_replicas: int) -> Iterator[str]:
    settings = QuorumSettings(min_replicas, JOIN_MS, HEARTBEAT_MS)
    with LighthouseService("127.0.0.1:0", settings) as service:
        yield service.address


def _come_and_go_on(crew: Crew) -> list[Told | None]:
    crew.live("c", "a", "b")
    return [*crew.ask_all("c", "b", "a"), *crew.ask_all("a", "b", "c")]


def _join_late(crew: Crew) -> list[Told | None]:
    crew.live("a", "b")
    told = crew.ask_all("a", "b")
    crew.live("c")
    # All of the last quorum are back, so nobody is waited for.
    told += crew.ask_all("a", "b")
    late = crew.ask("c")
    time.sleep(0.1)
    return [*told, *crew.ask_all("a", "b"), late.result()]


def _one_dies(crew: Crew) -> list[Told | None]:
    crew.live("a", "b", "c")
    told = crew.ask_all("a", "b", "c")
    crew.die("c")
    return [*told, *crew.ask_all("a", "b"), *crew.ask_all("a", "b")]


def _most_die(crew: Crew) -> list[Told | None]:
    crew.live("a", "b", "c")
    told = crew.ask_all("a", "b", "c")
    crew.die("b", "c")
    # Two silent ones are the majority until their heartbeats end.
    return [*told, *crew.ask_all("a", timeout_s=0.6), *crew.ask_all("a")]


def _one_returns(crew: Crew) -> list[Told | None]:
    crew.live("a:1", "b:1")
    told = crew.ask_all("a:1", "b:1", step=3)
    crew.die("b:1")
    crew.live("b:2")
    waiting = crew.ask("a:1", step=4)
    return [*told, *crew.ask_all("b:2", step=0), waiting.result()]


def _no_newcomers(crew: Crew) -> list[Told | None]:
    crew.live("a", "b", "c")
    told = crew.ask_all("a", "b", "c")
    crew.live("d")
    newcomer = crew.ask("d")
    time.sleep(0.1)
    told += crew.ask_all("a", "b", "c", shrink_only=True)
    told += crew.ask_all("a", "b", "c")
    return [*told, newcomer.result()]


def _no_newcomers_and_one_dies(crew: Crew) -> list[Told | None]:
    crew.live("a", "b", "c")
    told = crew.ask_all("a", "b", "c")
    crew.die("a")
    return [*told, *crew.ask_all("b", "c", shrink_only=True)]


def _ask_in_turn(crew: Crew, *ids: str) -> list[Told | None]:
    """For those who have given up before: torchft's lighthouse would give the first of the others
    a quorum with them while they do not ask again."""
    answers = []
    for one in ids:
        answers.append(crew.ask(one))
        time.sleep(0.1)
    return [answer.result() for answer in answers]


def _half_of_them(crew: Crew) -> list[Told | None]:
    crew.live("a", "b", "c", "d")
    told = crew.ask_all("a", "b", timeout_s=0.6)
    return told + _ask_in_turn(crew, "a", "b", "c")


def _too_few(crew: Crew) -> list[Told | None]:
    crew.live("a", "b")
    told = crew.ask_all("a", "b", timeout_s=0.4)
    crew.live("c")
    return told + _ask_in_turn(crew, "a", "b", "c")


def _steps_differ(crew: Crew) -> list[Told | None]:
    crew.live("a", "b")
    ahead = crew.ask("b", step=9)
    told = crew.ask_all("a", step=5)
    return [*told, ahead.result()]


SCRIPTS: dict[str, tuple[int, Script]] = {
    "all come, and go on": (1, _come_and_go_on),
    "one joins late": (1, _join_late),
    "one dies": (1, _one_dies),
    "most die": (1, _most_die),
    "one returns with a new uuid": (2, _one_returns),
    "no newcomers are wanted": (1, _no_newcomers),
    "no newcomers, and one dies": (1, _no_newcomers_and_one_dies),
    "half of them ask": (1, _half_of_them),
    "too few ask": (3, _too_few),
    "their steps differ": (1, _steps_differ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_events_same_quorums(name: str) -> None:
    min_replicas, script = SCRIPTS[name]

    def play(address: str) -> list[Told | None]:
        with crew_of(address) as crew:
            return script(crew)

    with (
        _torchft(min_replicas) as theirs,
        _ours(min_replicas) as ours,
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
        return call(messages.LighthouseQuorumRequest(requester=member), timeout=5).quorum


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
    with lighthouse(1) as address:
        quorums = [_ask_once(address, **asked, commit_failures=count) for count in (0, 0, 1, 2, 0)]
    assert [quorum.quorum_id for quorum in quorums] == [1, 1, 2, 3, 3]
    (member,) = quorums[3].participants
    assert member == messages.QuorumMember(**asked, commit_failures=2)
    assert abs(quorums[0].created.seconds - time.time()) < 60
