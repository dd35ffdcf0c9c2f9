"""How a subscriber waits for the next version, and asks the servers of several ranks."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from torchtitan_lite.core.errors import RpcError
from torchtitan_lite.serving.publish import publisher, sources
from torchtitan_lite.serving.publish.publication import Publication
from torchtitan_lite.serving.publish.sources import ServerSource
from torchtitan_lite.serving.publish.subscriber import Subscription


class _Publication:
    """Records waits, and ends the test after some."""

    generation_id = "generation"

    def __init__(self) -> None:
        self.waits: list[int] = []

    def wait(self, timeout_s: float, num_retries: int) -> None:
        self.waits.append(num_retries)


class _Subscriber:
    def __init__(self, seen: Sequence[int | None]) -> None:
        self.publication = _Publication()
        self._seen = iter(seen)

    def newest(self) -> int | None:
        return next(self._seen)


def waits(seen: Sequence[int | None], others: Sequence[int], held: int) -> list[int]:
    """Return the retries of each wait of a process that sees these versions, while the agreed one
    is at most that of `others`."""
    subscriber = _Subscriber(seen)
    subscription = Subscription(cast("Any", subscriber), [], version=held)
    # Per turn: the version, and whether there is time for another turn.
    agreed = iter([*[one for other in others for one in (other, 1)][:-1], 0])
    assert subscription.update(timeout_s=60, agree=lambda own: min(own, next(agreed))) is None
    return subscriber.publication.waits


def test_a_process_waits_long_only_if_it_has_seen_nothing_newer() -> None:
    assert waits([4, 4, 4], [4, 4, 4], held=4) == [0, 0]
    # The other process looked before version 5 was complete: it must be asked again at once.
    assert waits([5, 5, 5, 5], [4, 4, 4, 4], held=4) == [1, 2, 3]
    assert waits([None, 5, 4, 4], [4, 4, 4, 4], held=4) == [0, 1, 0]


class _Connection:
    def wait_for_change(self, timeout_s: float) -> None:
        raise RpcError("the server has ended")


def test_waits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(sources.time, "sleep", slept.append)
    source = ServerSource.__new__(ServerSource)
    source._status = cast("Any", _Connection())
    publication = Publication(where="here", ranks=(source,))
    for timeout_s, num_retries in ((9.0, 0), (0.001, 0), (9.0, 1), (9.0, 2), (9.0, 99), (0.0, 3)):
        publication.wait(timeout_s, num_retries)
    assert slept == [0.05, 0.001, 0.002, 0.004, 0.05, 0.0]


def _served(num_ranks: int) -> Publication:
    return Publication(where="here", ranks=(ServerSource.__new__(ServerSource),) * num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_servers_are_asked_at_the_same_time(num_ranks: int) -> None:
    asked: list[int] = []

    def ask(rank: int, is_cancelled: Callable[[], bool]) -> int:
        asked.append(rank)
        deadline = time.monotonic() + 30
        while len(asked) < num_ranks:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return 10 * rank

    expected = list(range(0, 10 * num_ranks, 10))
    assert _served(num_ranks).map_ranks(ask, list(range(num_ranks))) == expected
    # More ranks than connections.
    assert _served(40).map_ranks(ask, list(range(40))) == list(range(0, 400, 10))


def test_the_others_are_cancelled_if_a_server_fails() -> None:
    asked: list[int] = []
    cancelled: list[int] = []

    def ask(rank: int, is_cancelled: Callable[[], bool]) -> int:
        asked.append(rank)
        deadline = time.monotonic() + 30
        if rank == 2:
            while not {0, 1} <= set(asked):
                assert time.monotonic() < deadline
            raise RpcError("rank 2 is gone")
        while not is_cancelled():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        cancelled.append(rank)
        raise sources.VersionGone("cancelled")

    with pytest.raises(RpcError, match="rank 2 is gone"):
        _served(40).map_ranks(ask, list(range(40)))
    assert {0, 1} <= set(cancelled)
    # Those for which there was a connection, and the one that took over that of rank 2.
    assert len(asked) <= 17 and len(cancelled) == len(asked) - 1


def test_a_publisher_waits_for_a_free_slot_no_longer_than_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher.time, "sleep", lambda _: pytest.fail("it waits longer"))
    waits: Any = SimpleNamespace(
        _config=SimpleNamespace(when_in_use="wait", max_wait_s=0.0),
        _free_slot=lambda: (None, None),
    )
    assert publisher.Publisher._wait_for_slot(waits) == (None, None)
