"""Decisions of a replica's coordinator, without servers and on a clock of the test."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from torchtitan_lite.core.errors import ReplicaError, RpcError, RpcStatus
from torchtitan_lite.distributed.rpc.server import CallError
from torchtitan_lite.fault_tolerance.lighthouse.member import Member
from torchtitan_lite.fault_tolerance.replica import lighthouse_link
from torchtitan_lite.fault_tolerance.replica import replica_server as module
from torchtitan_lite.fault_tolerance.replica.lighthouse_link import (
    HEARTBEAT_INTERVAL_S,
    AgreedQuorum,
    LastQuorum,
)
from torchtitan_lite.fault_tolerance.replica.replica_server import (
    CoordinatorClient,
    ReplicaIdentity,
    ReplicaServer,
)

_OWN, _OTHER = "own:f:1", "other:f:2"
_NO_ANSWER = RpcError("no answer", RpcStatus.UNAVAILABLE)
_START_S = 1000.0


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while all tasks wait for a timer."""

    now_s = _START_S

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        internals, base = cast(Any, self), cast(Any, super())
        if not internals._ready and not internals._stopping:
            assert internals._scheduled, "all tasks wait forever"
            self.now_s = max(self.now_s, internals._scheduled[0].when())
        base._run_once()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Loop]:
    loop = _Loop()
    clock = SimpleNamespace(monotonic=loop.time)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(lighthouse_link, "time", clock)
    yield loop
    # Python logs a task that is still pending when it is deleted, maybe during a later test.
    for task in asyncio.all_tasks(loop):
        task.cancel()
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
    loop.close()


class _Link:
    """A lighthouse that answers as the test says: with results, errors, or after a time."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[Any, set[str]]] = []
        self.is_closed = False

    async def _answer(self, content: Any, unreachable: set[str]) -> Any:
        self.requests.append((content, set(unreachable)))
        answer = self.answers.pop(0) if self.answers else asyncio.Event().wait()
        if isinstance(answer, Awaitable):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    quorum = heartbeat = _answer

    async def close(self) -> None:
        self.is_closed = True


def _coordinator(link: Any = None, world_size: int = 2, host: str = "127.0.0.1") -> Any:
    """Return a coordinator in the running event loop."""
    identity = ReplicaIdentity("a run", _OWN, "store", world_size)
    link = link or _Link()
    coordinator: Any = ReplicaServer(identity, lambda: link, secret="", host=host)
    coordinator._services()
    return coordinator


def _member(replica_id: str) -> Member:
    return Member(
        run_id="a run",
        replica_id=replica_id,
        address="127.0.0.1:1",
        store_address="store",
        step=0,
        world_size=2,
        state_urls=("url 0", "url 1"),
    )


def _agreed(*ids: str, quorum_id: int = 1) -> AgreedQuorum:
    return AgreedQuorum("a lighthouse", quorum_id, tuple(map(_member, ids)))


def _request(rank: int, **changes: Any) -> dict[str, Any]:
    request = {"step": 0, "state_url": f"url {rank}", "token": 0, "shrink_only": False}
    return {**request, "rank": rank, "commit_failures": 0, **changes}


def _tasks(*calls: Any) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(call) for call in calls]


async def _all(*calls: Any) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize(("host", "address"), [("10.0.0.1", "10.0.0.1:0"), ("::1", "[::1]:0")])
def test_the_address_of_a_coordinator(host: str, address: str, loop: _Loop) -> None:
    async def run() -> None:
        assert _coordinator(host=host).address == address

    loop.run_until_complete(run())


@pytest.mark.parametrize(
    ("votes", "commits"),
    [
        ([(1, True), (1, True)], True),
        ([(1, True), (1, False)], False),
        ([(1, False), (1, False)], False),
        # Only `true` is a vote to commit, and only one on the same step.
        ([(1, 1), (1, 1)], False),
        ([(1, True), (2, True)], False),
    ],
)
def test_a_step_is_committed_if_all_ranks_vote_for_it(
    votes: list[tuple[int, Any]], commits: bool, loop: _Loop
) -> None:
    async def run() -> None:
        coordinator = _coordinator()
        requests = [{"rank": r, "vote": n, "commit": v} for r, (n, v) in enumerate(votes)]
        answers = await _all(*map(coordinator._vote, requests))
        assert answers == [{"commit": commits}] * 2
        # The outcome of the last vote is kept, for a rank that did not receive it.
        last = max(requests, key=lambda request: request["vote"])
        assert await coordinator._vote(last) == {"commit": commits}
        for number in (-1, 9):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(coordinator._vote({**last, "vote": number}), 1)

    loop.run_until_complete(run())


@pytest.mark.parametrize("rank", [-1, 2, True, "0", None, 0.0])
def test_a_rank_that_is_not_of_the_replica_is_rejected(rank: Any, loop: _Loop) -> None:
    async def run() -> None:
        with pytest.raises(CallError, match=f"Rank {rank!r} is out of range.") as caught:
            await _coordinator()._vote({"rank": rank, "vote": 1, "commit": True})
        assert caught.value.code is RpcStatus.INVALID_ARGUMENT

    loop.run_until_complete(run())


def test_a_vote_counts_until_its_rank_gives_up(loop: _Loop) -> None:
    async def run() -> None:
        coordinator = _coordinator()

        async def vote(rank: int, number: int = 1) -> asyncio.Task[Any]:
            request = {"rank": rank, "vote": number, "commit": True}
            task = asyncio.ensure_future(coordinator._vote(request))
            await asyncio.sleep(1)
            return task

        # A repeated request replaces the earlier one, whose end does not withdraw it.
        first, again, other = await vote(0), await vote(0), await vote(1)
        assert first.cancelled() and await again == await other == {"commit": True}
        first = await vote(0, 2)
        first.cancel()
        other = await vote(1, 2)
        assert not other.done()
        assert await _all(await vote(0, 2), other) == [{"commit": True}] * 2

    loop.run_until_complete(run())


def test_a_request_for_a_quorum_states_what_all_ranks_need(loop: _Loop) -> None:
    async def run() -> None:
        link = _Link(_agreed(_OTHER, _OWN), _agreed(_OWN))
        coordinator = _coordinator(link)
        answers = await _all(
            coordinator._quorum_call(_request(0, step=7, token=5, commit_failures=1)),
            coordinator._quorum_call(_request(1, step=6, token=9, shrink_only=True)),
        )
        (member, unreachable), *_ = link.requests
        assert member == Member(
            run_id="a run",
            replica_id=_OWN,
            address="127.0.0.1:0",
            store_address="store",
            step=6,
            world_size=2,
            state_urls=("url 0", "url 1"),
            token=9,
            shrink_only=True,
            commit_failures=1,
        )
        assert unreachable == set() and [one["replica_rank"] for one in answers] == [1, 1]
        # One that gave up meanwhile does not keep the other from its quorum.
        link.answers = [asyncio.sleep(1, _agreed(_OWN, quorum_id=2))]
        gone, other = _tasks(*(coordinator._quorum_call(_request(rank)) for rank in (0, 1)))
        await asyncio.sleep(0.5)
        gone.cancel()
        assert (await other)["quorum_id"] == 2

    loop.run_until_complete(run())


@pytest.mark.parametrize(
    ("error", "text", "is_logged"),
    [
        (RpcError("another run", is_final=True), "another run", False),
        (ValueError("a defect"), "a defect", True),
        (KeyError(), "KeyError()", True),
    ],
)
def test_all_ranks_receive_the_error_of_a_request_for_a_quorum(
    error: Exception, text: str, is_logged: bool, loop: _Loop, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        coordinator = _coordinator(_Link(asyncio.sleep(1, error)), world_size=3)
        calls = _tasks(*(coordinator._quorum_call(_request(rank)) for rank in range(3)))
        await asyncio.sleep(0.5)
        calls[0].cancel()
        _, *errors = await _all(*calls)
        failed = [(type(one), one.code, one.message) for one in errors]
        assert failed == [(CallError, RpcStatus.FAILED_PRECONDITION, text)] * 2

    with caplog.at_level("WARNING", "torchtitan_lite"):
        loop.run_until_complete(run())
    assert bool(caplog.records) == is_logged


def test_a_request_for_a_quorum_is_repeated_when_the_lighthouse_answers_again(
    loop: _Loop, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        link = _Link(_NO_ANSWER, _NO_ANSWER, _agreed(_OWN))
        coordinator = _coordinator(link)
        calls = _tasks(*(coordinator._quorum_call(_request(rank)) for rank in (0, 1)))
        for num_requests in (1, 2):
            await asyncio.sleep(5)
            assert len(link.requests) == num_requests
            coordinator._answered.set()
        answers = await _all(*calls)
        assert [one["replica_ids"] for one in answers] == [[_OWN]] * 2

    with caplog.at_level("WARNING", "torchtitan_lite"):
        loop.run_until_complete(run())
    assert [record.getMessage() for record in caplog.records] == ["No quorum: no answer"] * 2


@pytest.mark.parametrize("commit_failures", [0, 1])
@pytest.mark.parametrize("silent_s", [2.5, 3.0])
def test_silent_members_are_probed_after_a_failed_step(
    commit_failures: int, silent_s: float, loop: _Loop
) -> None:
    """So that the next quorum does not wait for one that cannot be reached."""

    async def run() -> None:
        link = _Link(_agreed(_OWN), _agreed(_OWN, _OTHER, "well:f:3", quorum_id=2))
        coordinator = _coordinator(link, world_size=1)
        calls: list[str] = []
        coordinator._client_of = lambda member: _Peer(
            lambda: _NO_ANSWER if member.replica_id == _OTHER else None, calls
        )
        coordinator._ping_regularly = lambda *_: asyncio.sleep(0)
        await coordinator._quorum_call(_request(0, commit_failures=1))
        await coordinator._quorum_call(_request(0))
        await asyncio.sleep(silent_s)
        coordinator._answered_s["well:f:3"] = loop.time()
        link.answers = [_agreed(_OWN, quorum_id=3)]
        await coordinator._quorum_call(_request(0, commit_failures=commit_failures))
        is_probed = commit_failures > 0 and silent_s >= 3
        assert link.requests[-1][1] == ({_OTHER} if is_probed else set())
        assert calls == ["Ping", "closed"] * is_probed

    loop.run_until_complete(run())


class _Peer:
    """A client of another replica, whose calls end as the test says."""

    def __init__(self, answer: Callable[[], Exception | None], calls: list[str]) -> None:
        self._answer, self._calls = answer, calls

    async def call(self, name: str, content: object, timeout_s: float) -> None:
        self._calls.append(name)
        error = self._answer()
        if error is not None:
            raise error

    async def close(self) -> None:
        self._calls.append("closed")


async def _adopted(link: Any, *ids: str) -> Any:
    coordinator = _coordinator(link)
    coordinator._ping_regularly = lambda *_: asyncio.sleep(0)
    await coordinator._adopt(_agreed(*ids))
    return coordinator


def test_a_watch_ends_with_its_quorum(loop: _Loop) -> None:
    async def run() -> None:
        link = _Link()
        coordinator = await _adopted(link, _OWN, _OTHER)
        watched, *others = _tasks(
            *(coordinator._watch({"quorum_id": number}) for number in (1, 1, 0, 2))
        )
        await asyncio.sleep(1)
        # Those of other quorums have ended at once.
        assert [one.done() for one in (watched, *others)] == [False, False, True, True]
        await coordinator._break(1, "first")
        assert await _all(watched, *others) == [
            {"reason": text} for text in ("first",) * 2 + ("",) * 2
        ]
        assert await coordinator._watch({"quorum_id": 1}) == {"reason": "first"}
        (call,) = _tasks(coordinator._watch({"quorum_id": 1}))
        await coordinator._adopt(_agreed(_OWN, quorum_id=2))
        assert await coordinator._watch({"quorum_id": 1}) == {"reason": ""}
        # It ends after a while, for the client to ask again, and with the coordinator.
        since_s = loop.time()
        assert await coordinator._watch({"quorum_id": 2}) == {"reason": ""}
        assert loop.time() == since_s + 20
        (call,) = _tasks(coordinator._watch({"quorum_id": 2}))
        coordinator._spawn(asyncio.sleep(1000))
        await asyncio.sleep(1)
        await coordinator._end()
        assert await call == {"reason": ""} and loop.time() == since_s + 21
        await asyncio.sleep(0)
        assert not coordinator._tasks and link.is_closed

    loop.run_until_complete(run())


def test_heartbeats_are_regular_and_measure_the_connection(loop: _Loop) -> None:
    async def run() -> None:
        well = LastQuorum(0, frozenset(), is_member=True)
        link = _Link(well, asyncio.sleep(0.2, well), asyncio.sleep(0.9, well), _NO_ANSWER, well)
        coordinator = _coordinator(link)
        sent_s: list[float] = []
        heartbeat = link.heartbeat

        async def beat(replica_id: str, unreachable: set[str]) -> Any:
            sent_s.append(round(loop.time() - _START_S, 3))
            connected_s.append(round(coordinator.connected_s(), 3))
            return await heartbeat(replica_id, unreachable)

        connected_s: list[float] = []
        coordinator._link.heartbeat = beat
        coordinator._watch_links()
        await asyncio.sleep(4)
        interval_s = HEARTBEAT_INTERVAL_S
        assert sent_s == [
            0,
            interval_s,
            2 * interval_s,
            1.5,
            1.5 + interval_s,
            1.5 + 2 * interval_s,
        ]
        assert connected_s == [0, interval_s, 2 * interval_s, 1.5, 0, interval_s]
        assert {one for one, _ in link.requests} == {_OWN}
        await coordinator._end()

    loop.run_until_complete(run())


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (LastQuorum(1, frozenset(), is_member=True), None),
        (LastQuorum(1, frozenset({_OWN}), is_member=True), None),
        (LastQuorum(2, frozenset({_OTHER}), is_member=True), None),
        (LastQuorum(1, frozenset({_OTHER}), is_member=True), "other sends no heartbeats any more"),
        (
            LastQuorum(1, frozenset({_OTHER, "b:f:3"}), is_member=True),
            "b, other sends no heartbeats any more",
        ),
        (LastQuorum(2, frozenset(), is_member=False), "the others continued without this replica"),
    ],
)
def test_the_answer_to_a_heartbeat_breaks_the_quorum(
    last: LastQuorum, reason: str | None, loop: _Loop, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        # Without a quorum nothing breaks; a defect does not end the heartbeats.
        link = _Link(last, ValueError("a defect"))
        coordinator = await _adopted(link, _OWN, _OTHER, "b:f:3")
        quorum, coordinator._quorum = coordinator._quorum, None
        coordinator._watch_links()
        await asyncio.sleep(2 * HEARTBEAT_INTERVAL_S - 0.1)
        assert coordinator._broken is None
        coordinator._quorum = quorum
        link.answers = [last]
        await asyncio.sleep(2 * HEARTBEAT_INTERVAL_S)
        assert coordinator._broken == reason
        await coordinator._end()

    loop.run_until_complete(run())
    assert caplog.text.count("A heartbeat failed") == 1


@pytest.mark.parametrize(
    ("num_members", "fails_s", "broken_s"),
    [
        # Pings at 0, 1, ... fail from one on; the time is that since the last answer.
        (1, [(0, 99)], 6),
        (1, [(3, 99)], 8),
        (40, [(0, 99)], 12),
        (1, [(0, 5), (7, 11)], None),
    ],
)
def test_a_member_that_answers_no_ping_for_a_while_breaks_the_quorum(
    num_members: int, fails_s: list[tuple[int, int]], broken_s: int | None, loop: _Loop
) -> None:
    async def run() -> None:
        coordinator = await _adopted(None, _OWN, _OTHER)

        def answer() -> Exception | None:
            now_s = loop.time() - _START_S
            return _NO_ANSWER if any(a <= now_s <= b for a, b in fails_s) else None

        coordinator._client_of = lambda member: _Peer(answer, calls)
        calls: list[str] = []
        pings = ReplicaServer._ping_regularly(coordinator, 1, _member(_OTHER), num_members)
        (task,) = _tasks(pings)
        watch = await coordinator._watch({"quorum_id": 1})
        name = "other cannot be reached: no answer"
        assert watch == {"reason": name if broken_s is not None else ""}
        assert loop.time() == _START_S + (20 if broken_s is None else broken_s)
        assert coordinator._unreachable == (set() if broken_s is None else {_OTHER})
        if broken_s is None:
            assert coordinator._answered_s == {_OTHER: _START_S + 20}
        task.cancel()
        await _all(task)
        assert calls[-1] == "closed"

    loop.run_until_complete(run())


@pytest.mark.parametrize(
    ("results", "is_broken"),
    [
        ([_NO_ANSWER, None, _NO_ANSWER, None, _NO_ANSWER, _NO_ANSWER], [False] * 5 + [True]),
        ([_NO_ANSWER, _NO_ANSWER], [False, True]),
    ],
)
def test_one_late_ping_does_not_break_the_quorum(
    results: list[Exception | None], is_broken: list[bool], loop: _Loop
) -> None:
    """It may fail because this process itself was suspended."""

    async def run() -> None:
        coordinator = await _adopted(None, _OWN, _OTHER)
        found, remaining = [], [*results]

        def answer() -> Exception | None:
            loop.now_s += 30
            return remaining.pop(0)

        async def sleep(seconds: float) -> None:
            found.append(coordinator._broken is not None)
            if not remaining:
                raise asyncio.CancelledError

        coordinator._client_of = lambda member: _Peer(answer, [])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.asyncio, "sleep", sleep)
            pings = ReplicaServer._ping_regularly(coordinator, 1, _member(_OTHER), 1)
            await _all(*_tasks(pings))
        assert found == is_broken

    loop.run_until_complete(run())


@pytest.mark.parametrize("returns_s", [500, None])
def test_a_former_member_is_pinged_until_it_answers_or_is_forgotten(
    returns_s: int | None, loop: _Loop
) -> None:
    async def run() -> None:
        coordinator = await _adopted(None, _OWN, _OTHER)

        def answer() -> Exception | None:
            now_s = loop.time() - _START_S
            return None if returns_s is not None and now_s >= returns_s else _NO_ANSWER

        coordinator._client_of = lambda member: _Peer(answer, [])
        (task,) = _tasks(ReplicaServer._ping_regularly(coordinator, 1, _member(_OTHER), 1))
        await asyncio.sleep(10)
        await coordinator._adopt(_agreed(_OWN, quorum_id=2))
        assert coordinator._unreachable == {_OTHER}
        await task
        # The ping after the answer, or the time after which it may never return.
        assert loop.time() - _START_S == (600 if returns_s is None else returns_s + 1)
        assert coordinator._unreachable == set() and coordinator._answered_s == {}

    loop.run_until_complete(run())


def _client(call: Callable[..., Any]) -> Any:
    client: Any = CoordinatorClient("127.0.0.1:1", "", _OWN)
    client._client.close()
    client._client = SimpleNamespace(call=call)
    return client


def test_a_vote_is_repeated_until_its_deadline(
    loop: _Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(name: str, request: dict[str, Any], timeout_s: float) -> Any:
        calls.append((name, request["vote"], round(timeout_s, 3)))
        if len(calls) < 3:
            loop.now_s += 0.5
            raise _NO_ANSWER
        return {"commit": True}

    def sleep(seconds: float) -> None:
        loop.now_s += seconds

    calls: list[Any] = []
    monkeypatch.setattr(module.time, "sleep", sleep, raising=False)
    client = _client(call)
    assert client.should_commit(1, 9, True, timedelta(seconds=2))
    assert client.should_commit(1, 9, True, timedelta(seconds=0))
    # The calls of one vote have its number, and end with its time.
    assert calls == [("Vote", 1, 2.0), ("Vote", 1, 1.4), ("Vote", 1, 0.8), ("Vote", 2, 0.1)]
    calls.clear()
    with pytest.raises(RpcError, match="no answer"):
        client.should_commit(1, 9, True, timedelta(seconds=0.5))
    assert calls == [("Vote", 3, 0.5)]


def test_a_rank_asks_its_coordinator() -> None:
    def call(name: str, request: dict[str, Any], timeout_s: float) -> Any:
        calls.append((name, request, timeout_s))
        if isinstance(answer, Exception):
            raise answer
        return answer

    calls: list[Any] = []
    client = _client(call)
    answer: Any = {"reason": "b is dead"}
    assert client.wait_until_broken(7) == "b is dead"
    # Longer than a coordinator waits before it answers.
    assert calls.pop() == ("Watch", {"quorum_id": 7}, 40.0)
    asked = {"group_rank": 1, "step": 5, "checkpoint_metadata": "url", "shrink_only": True}
    options = {**asked, "timeout": timedelta(seconds=3), "commit_failures": 2, "init_sync": False}
    answer = {"quorum_id": 4, "heal": False}
    assert client._quorum(**options, token=8).quorum_id == 4
    request = {"step": 5, "state_url": "url", "shrink_only": True, "commit_failures": 2}
    assert calls.pop() == ("Quorum", {**request, "rank": 1, "token": 8}, 3.0)
    for answer, kind in (
        (RpcError("no answer"), RpcError),
        (RpcError("another run", is_final=True), ReplicaError),
    ):
        with pytest.raises(kind, match=str(answer)) as caught:
            client._quorum(**options)
        assert type(caught.value) is kind
