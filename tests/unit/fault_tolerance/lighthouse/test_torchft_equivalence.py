"""The same events give the same quorums as with torchft's lighthouse.

Differences, which the scripts avoid; the docstring of `rules` has the reasons, `test_rules` and
`test_links` the tests:

- Ids that only send heartbeats count for at most the join timeout: replicas that are waited for
  longer than that request a quorum first.
- An older process of the same id has left when the newer one requests a quorum. torchft's
  lighthouse waits for it until the join timeout; the quorum is the same.
- There are no reports of broken links: torchft's protocol has none.
"""

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

from tests.harness.launch import wait_until
from tests.unit.fault_tolerance.lighthouse.clients import LighthouseClients, ReceivedQuorum
from torchtitan_lite.fault_tolerance.lighthouse import torchft_messages as messages
from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings
from torchtitan_lite.fault_tolerance.lighthouse.server import LighthouseService

NEVER_MS = 60_000
"""Longer than a script takes on a slow machine."""
JOIN_MS, HEARTBEAT_MS = 1000, 2000
"""Timeouts of the scripts in which one of them expires."""


class ObservedClients(LighthouseClients):
    """Replicas, and the number of them that the lighthouse knows to wait for a quorum."""

    def __init__(self, address: str, num_requests: Callable[[], int]) -> None:
        super().__init__(f"http://{address}")
        self._num_requests = num_requests

    def wait_for_requests(self, number: int) -> None:
        """Block until this many replicas wait."""
        wait_until(lambda: self._num_requests() == number, 30)


Script = Callable[[ObservedClients], list[ReceivedQuorum | None]]
Address = tuple[str, Callable[[], int]]
"""The address of a lighthouse, and the number of replicas that wait there."""


@contextmanager
def _torchft(
    min_replicas: int, join_ms: int = JOIN_MS, heartbeat_ms: int = HEARTBEAT_MS
) -> Iterator[Address]:
    server = LighthouseServer(
        "127.0.0.1:0",
        min_replicas,
        join_timeout_ms=join_ms,
        quorum_tick_ms=10,
        heartbeat_timeout_ms=heartbeat_ms,
    )
    address = f"127.0.0.1:{server.address().rpartition(':')[2]}"

    def num_requests() -> int:
        with urlopen(f"http://{address}/status", timeout=30) as page:
            match = re.search(r"/(\d+) participants healthy", page.read().decode())
        return int(match[1]) if match else 0

    try:
        yield address, num_requests
    finally:
        server.shutdown()


@contextmanager
def _ours(
    min_replicas: int, join_ms: int = JOIN_MS, heartbeat_ms: int = HEARTBEAT_MS
) -> Iterator[Address]:
    settings = QuorumSettings(min_replicas, join_ms, heartbeat_ms)
    with LighthouseService("127.0.0.1:0", settings) as service:
        yield service.address, lambda: len(service.status()["waiting"])


def _join_and_continue(clients: ObservedClients) -> list[ReceivedQuorum | None]:
    clients.start_heartbeats("c", "a", "b")
    return [*clients.request_all("c", "b", "a"), *clients.request_all("a", "b", "c")]


def _join_late(clients: ObservedClients) -> list[ReceivedQuorum | None]:
    clients.start_heartbeats("a", "b")
    quorums = clients.request_all("a", "b")
    clients.start_heartbeats("c")
    # All members of the last quorum request one, so the lighthouse waits for no other.
    quorums += clients.request_all("a", "b")
    late = clients.request("c")
    clients.wait_for_requests(1)
    return [*quorums, *clients.request_all("a", "b"), late.result()]


def _one_dies(clients: ObservedClients) -> list[ReceivedQuorum | None]:
    clients.start_heartbeats("a", "b", "c")
    quorums = clients.request_all("a", "b", "c")
    clients.stop_heartbeats("c")
    return [*quorums, *clients.request_all("a", "b"), *clients.request_all("a", "b")]


def _most_die(clients: ObservedClients) -> list[ReceivedQuorum | None]:
    clients.start_heartbeats("a", "b", "c")
    quorums = clients.request_all("a", "b", "c")
    clients.stop_heartbeats("b", "c")
    # Two silent replicas are the majority until their heartbeats expire.
    return [*quorums, *clients.request_all("a", timeout_s=0.6), *clients.request_all("a")]


def _one_rejoins(clients: ObservedClients) -> list[ReceivedQuorum | None]:
    clients.start_heartbeats("a:1", "b:1")
    quorums = clients.request_all("a:1", "b:1", step=3)
    clients.stop_heartbeats("b:1")
    clients.start_heartbeats("b:2")
    waiting = clients.request("a:1", step=4)
    return [*quorums, *clients.request_all("b:2", step=0), waiting.result()]


def _no_newcomers(clients: ObservedClients) -> list[ReceivedQuorum | None]:
    clients.start_heartbeats("a", "b", "c")
    quorums = clients.request_all("a", "b", "c")
    clients.start_heartbeats("d")
    newcomer = clients.request("d")
    clients.wait_for_requests(1)
    quorums += clients.request_all("a", "b", "c", shrink_only=True)
    # torchft's lighthouse adds it again by itself, after it notified the others.
    clients.wait_for_requests(1)
    quorums += clients.request_all("a", "b", "c")
    return [*quorums, newcomer.result()]


def _no_newcomers_and_one_dies(clients: ObservedClients) -> list[ReceivedQuorum | None]:
    clients.start_heartbeats("a", "b", "c")
    quorums = clients.request_all("a", "b", "c")
    clients.stop_heartbeats("a")
    return [*quorums, *clients.request_all("b", "c", shrink_only=True)]


def _request_in_turn(clients: ObservedClients, *ids: str) -> list[ReceivedQuorum | None]:
    """Request quorums in turn, for replicas that withdrew before: torchft's lighthouse would give
    the first of the others a quorum with them while they do not request one."""
    answers = []
    for one in ids[:-1]:
        answers.append(clients.request(one))
        # torchft's lighthouse does not report that it has received a request of a replica that it
        # has never removed.
        time.sleep(0.3)
    answers.append(clients.request(ids[-1]))
    return [answer.result() for answer in answers]


def _half_of_them(clients: ObservedClients) -> list[ReceivedQuorum | None]:
    clients.start_heartbeats("a", "b", "c", "d")
    quorums = clients.request_all("a", "b", "c", "d")
    quorums += clients.request_all("a", "b", timeout_s=0.6)
    return quorums + _request_in_turn(clients, "a", "b", "c")


def _too_few(clients: ObservedClients) -> list[ReceivedQuorum | None]:
    clients.start_heartbeats("a", "b")
    quorums = clients.request_all("a", "b", timeout_s=0.4)
    clients.start_heartbeats("c")
    return quorums + _request_in_turn(clients, "a", "b", "c")


def _steps_differ(clients: ObservedClients) -> list[ReceivedQuorum | None]:
    clients.start_heartbeats("a", "b")
    ahead = clients.request("b", step=9)
    quorums = clients.request_all("a", step=5)
    return [*quorums, ahead.result()]


SCRIPTS: dict[str, tuple[tuple[int, int, int], Script]] = {
    "all join and continue": ((1, NEVER_MS, NEVER_MS), _join_and_continue),
    "one joins late": ((1, NEVER_MS, NEVER_MS), _join_late),
    "one dies": ((1, JOIN_MS, NEVER_MS), _one_dies),
    "most die": ((1, NEVER_MS, HEARTBEAT_MS), _most_die),
    "one rejoins with a new uuid": ((2, JOIN_MS, NEVER_MS), _one_rejoins),
    "no newcomers are accepted": ((1, NEVER_MS, NEVER_MS), _no_newcomers),
    "no newcomers, and one dies": ((1, JOIN_MS, NEVER_MS), _no_newcomers_and_one_dies),
    "half of them request a quorum": ((1, JOIN_MS, NEVER_MS), _half_of_them),
    "too few request a quorum": ((3, NEVER_MS, NEVER_MS), _too_few),
    "their steps differ": ((1, NEVER_MS, NEVER_MS), _steps_differ),
}
"""By name: minimum number of replicas, join timeout, heartbeat timeout."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_events_same_quorums(name: str) -> None:
    settings, script = SCRIPTS[name]
    expected, quorums = _play_both(script, *settings)
    if quorums != expected:
        # A busy machine delays requests of one round by more than the timeout of one of the two.
        min_replicas, *timeouts_ms = settings
        expected, quorums = _play_both(script, min_replicas, *(8 * ms for ms in timeouts_ms))
    assert quorums == expected
    assert any(quorums)


def _play_both(script: Script, *settings: int) -> list[list[ReceivedQuorum | None]]:
    """Play a script with torchft's lighthouse and with ours."""

    def play(address: Address) -> list[ReceivedQuorum | None]:
        with closing(ObservedClients(*address)) as clients:
            return script(clients)

    with (
        _torchft(*settings) as theirs,
        _ours(*settings) as ours,
        ThreadPoolExecutor(2) as threads,
    ):
        return list(threads.map(play, (theirs, ours)))


def _request_once(at: str, **options: Any) -> Any:
    """Send the request of torchft's client with the messages of this project."""
    with grpc.insecure_channel(at) as channel:
        call = channel.unary_unary(
            f"/{messages.SERVICE}/Quorum",
            request_serializer=messages.LighthouseQuorumRequest.SerializeToString,
            response_deserializer=messages.LighthouseQuorumResponse.FromString,
        )
        member = messages.QuorumMember(**options)
        return call(messages.LighthouseQuorumRequest(requester=member), timeout=30).quorum


@pytest.mark.parametrize("lighthouse", [_torchft, _ours])
def test_all_fields_arrive_and_failures_count(
    lighthouse: Callable[[int], Any],
) -> None:
    options = {
        "replica_id": "a:1",
        "address": "http://host:1",
        "store_address": "host:2",
        "step": -3,
        "world_size": 2**40,
        "shrink_only": True,
        "data": '{"key": "ä"}',
    }
    with lighthouse(1) as (address, _):
        quorums = [
            _request_once(address, **options, commit_failures=count) for count in (0, 0, 1, 2, 0)
        ]
    assert [quorum.quorum_id for quorum in quorums] == [1, 1, 2, 3, 3]
    (member,) = quorums[3].participants
    assert member == messages.QuorumMember(**options, commit_failures=2)
    assert abs(quorums[0].created.seconds - time.time()) < 60
