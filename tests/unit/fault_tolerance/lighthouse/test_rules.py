"""The quorum rules, at times chosen by the tests."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_lite.core.errors import LighthouseError
from torchtitan_lite.fault_tolerance.lighthouse.rules import (
    LEFT,
    Quorum,
    QuorumRules,
    QuorumSettings,
    WaitingReplica,
)

NOW_S = 1000.0
SETTINGS = QuorumSettings(min_replicas=2, join_timeout_ms=3000, heartbeat_timeout_ms=5000)


@dataclass(frozen=True)
class Replica:
    """A member, as the rules see it."""

    replica_id: str
    shrink_only: bool = False
    commit_failures: int = 0
    step: int = 0


@dataclass(frozen=True)
class Case:
    """A point in time, and the members of a quorum then; None for no quorum."""

    name: str
    expected: tuple[str, ...] | None
    asking: dict[str, float]
    """Id -> time since the request, in seconds; with a "!" at the end of the id, no newcomers are
    accepted."""
    silent: dict[str, float] = field(default_factory=dict)
    """Heartbeats of replicas that do not request a quorum but did before, or that sent one after
    their request."""
    previous: tuple[str, ...] | None = None
    reason: str = ""
    changes_in_s: float | None = None


CASES = [
    Case("no replica waits", None, {}, {"a": 0}, reason="no replica waits"),
    Case("all live replicas wait", ("a", "b"), {"b": 1, "a": 0}, reason="all live"),
    Case("too few", None, {"a": 1}, reason="2 are required", changes_in_s=4),
    Case(
        "too few of the last quorum", None, {"a": 0}, previous=("a", "b"), reason="2 are required"
    ),
    Case(
        "another replica may join",
        None,
        {"a": 1, "b": 2},
        {"c": 0},
        reason="c may still",
        changes_in_s=1,
    ),
    Case(
        "its heartbeat expires before the join timeout",
        None,
        {"a": 1, "b": 2},
        {"c": 4.5},
        reason="c may still",
        changes_in_s=0.5,
    ),
    Case(
        "the join timeout expired",
        ("a", "b"),
        {"a": 1, "b": 3},
        {"c": 0},
        reason="the join timeout",
    ),
    Case("the last heartbeat has expired", ("a", "b"), {"a": 0, "b": 0}, {"c": 5}),
    Case("it has not expired", None, {"a": 0, "b": 0}, {"c": 4.99}, reason="c may still"),
    Case(
        "a waiting replica without heartbeats is excluded",
        ("b", "c"),
        {"a": 6, "b": 0, "c": 0},
        {"a": 6},
    ),
    Case("half is not enough", None, {"a": 9, "b": 9}, dict.fromkeys("abcd", 0), reason="half"),
    Case("more than half is enough", ("a", "b", "c"), dict.fromkeys("abc", 4), {"d": 0, "e": 0}),
    Case("all of the last quorum wait", ("a", "b"), dict.fromkeys("ab", 0), {"c": 0}, ("a", "b")),
    Case(
        "all of it wait, and others too",
        ("a", "b", "c"),
        dict.fromkeys("abc", 0),
        {"d": 0},
        ("a", "b"),
    ),
    Case("all of it wait, fewer than required", ("a",), {"a": 0}, dict.fromkeys("bcd", 0), ("a",)),
    Case(
        "all of it wait, one without heartbeats",
        None,
        {"a": 6, "b": 0},
        {"a": 6},
        ("a", "b"),
        "2 are required",
    ),
    Case(
        "one of the last quorum does not wait",
        None,
        {"a": 0, "c": 0},
        {"b": 0},
        ("a", "b"),
        "b may still",
    ),
    Case("one of the last quorum died", ("a", "c"), {"a": 0, "c": 0}, {"b": 5}, ("a", "b")),
    Case("a replica with a new uuid", ("a:1", "b:2"), {"a:1": 0, "b:2": 0}, {}, ("a:1", "b:1")),
    Case("no newcomers", ("a", "b"), {"a!": 0, "b": 0, "c": 0}, {}, ("a", "b")),
    Case("newcomers accept none", ("a", "b"), {"a": 0, "b": 0, "c!": 0}, {}, ("a", "b")),
    Case("no newcomers, one died", ("a",), {"a!": 0, "c": 0}, {}, ("a", "b")),
    Case("no newcomers to the first quorum", ("a", "b"), {"a!": 0, "b!": 0}),
    Case("no replica is admitted", None, {"c!": 0, "d": 0}, {}, ("a", "b"), "only members"),
    Case("ids are sorted as text", ("a10", "a9", "b"), {"b": 0, "a9": 0, "a10": 0}),
]


def _rules(case: Case) -> QuorumRules:
    rules = QuorumRules(SETTINGS)
    for text, age_s in case.asking.items():
        replica = Replica(text.rstrip("!"), shrink_only=text.endswith("!"))
        rules.waiting[replica.replica_id] = WaitingReplica(replica, NOW_S - age_s)
        rules.heartbeats[replica.replica_id] = NOW_S - min(age_s, 1)
    rules.heartbeats |= {one: NOW_S - age_s for one, age_s in case.silent.items()}
    if case.previous is not None:
        rules.quorum = Quorum(7, tuple(Replica(one) for one in case.previous))
    return rules


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_members_of_a_quorum(case: Case) -> None:
    rules = _rules(case)
    verdict = rules.evaluate(NOW_S)
    ids = None if verdict.members is None else tuple(one.replica_id for one in verdict.members)
    assert ids == case.expected
    assert case.reason in verdict.reason
    if case.changes_in_s is not None:
        assert verdict.until_s == NOW_S + case.changes_in_s


def _request(rules: QuorumRules, now_s: float, *replicas: str | Replica) -> Quorum | None:
    """Request a quorum for all, and return the one that forms."""
    for replica in replicas:
        rules.request_quorum(Replica(replica) if isinstance(replica, str) else replica, now_s)
    return rules.form_quorum(now_s)


def test_the_id_increases_when_the_members_change() -> None:
    rules = QuorumRules(SETTINGS)
    ids = []
    for second, asking in enumerate(["ab", "ab", "abc", "cba", "abcd"]):
        quorum = _request(rules, second, *asking)
        assert quorum is not None
        assert quorum.ids == tuple(sorted(asking))
        ids.append(quorum.quorum_id)
    assert ids == [1, 1, 2, 2, 3]


def test_the_id_increases_with_each_step_that_a_member_could_not_commit() -> None:
    rules = QuorumRules(SETTINGS)
    ids = []
    for second, failures in enumerate([0, 0, 1, 2, 0]):
        quorum = _request(rules, second, "a", Replica("b", commit_failures=failures))
        assert quorum is not None
        ids.append(quorum.quorum_id)
    assert ids == [1, 1, 2, 3, 3]


def test_failures_of_excluded_replicas_do_not_count() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, "a", "b")
    quorum = _request(
        rules, 1, Replica("c", commit_failures=1), Replica("a", shrink_only=True), "b"
    )
    assert quorum is not None
    assert (quorum.quorum_id, quorum.ids) == (1, ("a", "b"))


def test_requests_of_members_are_fulfilled_and_others_wait_again() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, "a", "b")
    assert _request(rules, 1, "c") is None
    assert _request(rules, 2, Replica("a", shrink_only=True), "b")
    assert {one: asking.since_s for one, asking in rules.waiting.items()} == {"c": 2}
    quorum = _request(rules, 3, "a", "b")
    assert quorum is not None
    assert (quorum.quorum_id, quorum.ids) == (2, ("a", "b", "c"))


def test_a_repeated_request_does_not_restart_the_wait() -> None:
    rules = QuorumRules(SETTINGS)
    rules.heartbeat("c", 0)
    assert _request(rules, 0, "a", "b") is None
    rules.cancel_request("a")
    rules.heartbeat("c", 2)
    assert _request(rules, 2, "a", "b") is None
    assert rules.form_quorum(2.9) is None
    assert rules.form_quorum(3)


def test_ids_of_an_earlier_lighthouse_are_not_reused() -> None:
    rules = QuorumRules(SETTINGS, first_id=1000)
    actual = _request(rules, 0, "a", "b")
    assert actual is not None and actual.quorum_id == 1001


def test_a_replica_that_withdraws_is_in_no_quorum() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, "a") is None
    rules.cancel_request("a")
    assert _request(rules, 1, "b") is None
    assert rules.is_healthy("a", 1)


@pytest.mark.parametrize("left_id", ["c:1", "c"])
def test_a_replica_that_has_left_is_not_waited_for(left_id: str) -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, "a:1", "b:1", "c:1")
    assert _request(rules, 1, "a:1", "b:1") is None
    assert rules.mark_left(left_id) == ["c:1"]
    quorum = rules.form_quorum(1)
    assert quorum is not None
    assert (quorum.quorum_id, quorum.ids) == (2, ("a:1", "b:1"))


def test_a_replica_that_has_left_is_not_a_participant() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, "a:1") is None
    assert rules.mark_left("a") == ["a:1"]
    assert _request(rules, 0, "b:1") is None
    assert rules.waiting.keys() == {"b:1"}


def test_late_messages_of_a_replica_that_has_left_are_ignored() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, "a:1", "b:1", "c:1")
    rules.mark_left("c")
    assert not rules.heartbeat("c:1", 1)
    assert not rules.request_quorum(Replica("c:1"), 1)
    quorum = _request(rules, 1, "a:1", "b:1")
    assert quorum is not None
    assert quorum.ids == ("a:1", "b:1")


def test_the_reasons_of_the_latest_departures_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_lite.fault_tolerance.lighthouse.rules._MAX_DEPARTURES", 2)
    rules = QuorumRules(SETTINGS)
    for replica_id in ("a:1", "b:1", "c:1"):
        rules.mark_left(replica_id)
    reasons = [rules.departure(one) for one in ("a:1", "b:1", "c:1")]
    assert reasons == [None, LEFT, LEFT]


def test_it_rejoins_with_another_uuid() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, "a:1", "b:1")
    assert rules.mark_left("b") == ["b:1"]
    quorum = _request(rules, 1, "a:1", "b:2")
    assert quorum is not None
    assert quorum.ids == ("a:1", "b:2")
    assert rules.mark_left("b") == ["b:2"]


def test_an_id_without_a_uuid_may_rejoin() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, "a", "b")
    assert rules.mark_left("b") == ["b"]
    assert rules.mark_left("b") == []
    assert _request(rules, 1, "a", "b")


def test_other_names_do_not_leave() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, "replica_1:x", "replica_10:x", "replica_1:y:z", "y:replica_1:x")
    assert rules.mark_left("replica_1") == ["replica_1:x", "replica_1:y:z"]
    assert rules.mark_left("x") == []


def test_the_last_quorum_of_a_replica_that_has_left_cannot_be_repeated() -> None:
    rules = QuorumRules(QuorumSettings(1, 3000, 5000))
    assert _request(rules, 0, "a:1")
    assert rules.mark_left("a") == ["a:1"]
    assert rules.form_quorum(0) is None
    quorum = _request(rules, 0, "b:1")
    assert quorum is not None
    assert (quorum.quorum_id, quorum.ids) == (2, ("b:1",))


def test_ids_that_only_send_heartbeats_stop_counting() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, "a", "b", "c")
    rules.mark_left("c")
    for tenth in range(100):
        for stranger in ("x", "y", "z"):
            rules.heartbeat(stranger, 10 + tenth / 10)
        quorum = _request(rules, 10 + tenth / 10, "a", "b")
        if tenth == 0:
            assert quorum is None
            verdict = rules.evaluate(10)
            assert (verdict.reason[:10], verdict.until_s) == ("2 of 5 liv", 13)
        assert (quorum is not None) == (tenth >= 30)


def test_an_id_that_has_requested_a_quorum_counts_as_long_as_it_lives() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, "a", "b", "c", "d")
    for second in range(1, 30):
        for one in "abcd":
            rules.heartbeat(one, second)
        assert _request(rules, second, "a", "b") is None
        assert "2 of 4 live" in rules.evaluate(second).reason


def test_a_newer_process_replaces_the_older_one() -> None:
    rules = QuorumRules(QuorumSettings(1, 3000, 5000))
    assert _request(rules, 0, "a:f:1", "b:f:1", "c:f:1")
    assert _request(rules, 1, "b:f:1") is None
    rules.heartbeat("b:f:2", 1)
    assert "b:f:1" in rules.waiting
    # The dead process of c is waited for until the new one asks.
    assert _request(rules, 1, "a:f:1", "b:f:2") is None
    quorum = _request(rules, 1, "c:f:2")
    assert quorum is not None
    assert quorum.ids == ("a:f:1", "b:f:2", "c:f:2")
    assert rules.departure("b:f:1") == "was replaced by a newer process of the same replica id"
    assert rules.departure("b:f:2") is None
    assert not rules.request_quorum(Replica("b:f:1"), 2)
    assert not rules.heartbeat("c:f:1", 2)
    assert rules.heartbeats.keys() == {"a:f:1", "b:f:2", "c:f:2"}


def test_other_replicas_are_not_replaced() -> None:
    rules = QuorumRules(SETTINGS)
    ids = ("a:f:1", "a:g:2", "a:3", "b:f:1", "a", "b")
    quorum = _request(rules, 0, *ids)
    assert quorum is not None
    assert quorum.ids == tuple(sorted(ids))


def test_long_silent_replicas_are_forgotten() -> None:
    rules = QuorumRules(SETTINGS)
    rules.heartbeat("old", 0)
    rules.report_links("old", {"a"})
    assert _request(rules, 604, "a", "b")
    assert "old" in rules.heartbeats
    assert _request(rules, 605, "a", "b")
    assert rules.heartbeats.keys() == {"a", "b"} and not rules._first_heartbeats
    # Its report is outdated when it returns.
    rules.heartbeat("old", 605)
    assert rules.broken_links(605) == []


def test_invalid_settings() -> None:
    least = {"min_replicas": 1, "join_timeout_ms": 0, "heartbeat_timeout_ms": 1}
    QuorumSettings(**least)
    for name, bound in least.items():
        message = f"^{name} = {bound - 1} is too small: it must be at least {bound}.$"
        with pytest.raises(LighthouseError, match=message):
            QuorumSettings(**{**least, name: bound - 1})


_AGES_S = st.floats(0, 8)


@given(
    asking=st.dictionaries(st.sampled_from(["a", "b!", "c", "d", "e!"]), _AGES_S),
    silent=st.dictionaries(st.sampled_from("abcdefgh"), _AGES_S),
    previous=st.none() | st.sets(st.sampled_from("abcd"), min_size=1).map(tuple),
    unreachable=st.dictionaries(st.sampled_from("abcde"), st.sets(st.sampled_from("abcdef"))),
    new=st.lists(st.floats(0, 4), max_size=4),
    part=st.floats(0, 1, exclude_max=True),
)
def test_nothing_changes_before_the_reported_time(
    asking: dict[str, float],
    silent: dict[str, float],
    previous: tuple[str, ...],
    unreachable: dict[str, set[str]],
    new: list[float],
    part: float,
) -> None:
    rules = _rules(Case("", None, asking, silent, previous))
    for reporter, others in unreachable.items():
        rules.report_links(reporter, others)
    for number, age_s in enumerate(new):
        rules.heartbeat(f"new_{number}", NOW_S - age_s)
    verdict = rules.evaluate(NOW_S)
    until_s = NOW_S + 1000 if verdict.until_s is None else verdict.until_s
    assert until_s > NOW_S
    between_s = NOW_S + part * (until_s - NOW_S)
    if between_s < until_s:
        assert rules.evaluate(between_s) == verdict
