"""Broken links: the smallest set of replicas to leave out, and quorums without it."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fault_tolerance.lighthouse.test_rules import Replica
from torchtitan_lite.fault_tolerance.lighthouse.links import (
    Link,
    LinkReports,
    replicas_to_leave_out,
)
from torchtitan_lite.fault_tolerance.lighthouse.rules import Quorum, QuorumRules, QuorumSettings

SETTINGS = QuorumSettings(min_replicas=1, join_timeout_ms=3000, heartbeat_timeout_ms=5000)


def _links(*pairs: str) -> frozenset[Link]:
    return frozenset(frozenset(pair) for pair in pairs)


def _steps(steps: dict[str, int], ids: str = "abcdefgh") -> tuple[tuple[str, int], ...]:
    return tuple((one, steps.get(one, 0)) for one in ids)


@pytest.mark.parametrize(
    ("pairs", "steps", "expected"),
    [
        (["ab"], {}, "b"),
        (["ab"], {"b": 1}, "a"),
        (["ab", "ac"], {"a": 9}, "a"),
        (["ab", "bc", "ca"], {"c": 1}, "ab"),
        (["ab", "cd"], {"b": 2, "c": 1}, "ad"),
        (["ab", "bc", "cd"], {"b": 5, "d": 6}, "ac"),
        (["ab", "bc", "cd"], {"a": 7, "c": 6}, "bd"),
        (["ab", "bc", "cd"], {"a": 7, "d": 6}, "bc"),
        ([], {}, ""),
    ],
)
def test_the_smallest_set_with_the_longest_history_remaining(
    pairs: list[str], steps: dict[str, int], expected: str
) -> None:
    assert replicas_to_leave_out(_links(*pairs), _steps(steps)) == set(expected)


_PAIRS = [frozenset(pair) for pair in itertools.combinations("abcdefgh", 2)]


def _is_cover(ids: frozenset[str], broken: frozenset[Link]) -> bool:
    return all(link & ids for link in broken)


@given(
    broken=st.frozensets(st.sampled_from(_PAIRS)),
    steps=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 3)),
)
def test_it_is_the_best_of_all_sets(broken: frozenset[Link], steps: dict[str, int]) -> None:
    actual = replicas_to_leave_out(broken, _steps(steps))
    ends = sorted(frozenset[str]().union(*broken))
    assert _is_cover(actual, broken)
    assert actual <= set(ends)
    for size in range(len(actual) + 1):
        for other in map(frozenset, itertools.combinations(ends, size)):
            if _is_cover(other, broken):
                assert size == len(actual)
                assert _history(actual, ends, steps) <= _history(other, ends, steps)


def _history(
    cover: frozenset[str], ends: list[str], steps: dict[str, int]
) -> list[tuple[int, str]]:
    return sorted((-steps.get(one, 0), one) for one in ends if one not in cover)


@given(
    st.frozensets(
        st.frozensets(st.integers(0, 39), min_size=2, max_size=2), min_size=20, max_size=200
    )
)
def test_many_replicas(links: frozenset[frozenset[int]]) -> None:
    broken = frozenset(frozenset(f"{one:02d}" for one in link) for link in links)
    steps = tuple((f"{one:02d}", one % 3) for one in range(40))
    cover = replicas_to_leave_out(broken, steps)
    assert _is_cover(cover, broken)
    assert not any(_is_cover(cover - {one}, broken) for one in cover)


def test_the_replica_with_the_most_broken_links_of_many_is_left_out_first() -> None:
    pairs = [("hub", f"{one:02d}") for one in range(17)] + [("00", "01"), ("01", "02")]
    ids = sorted(set(itertools.chain(*pairs)))
    broken = frozenset(map(frozenset, pairs))
    assert replicas_to_leave_out(broken, tuple((one, 0) for one in ids)) == {"hub", "01"}


@pytest.mark.parametrize(
    "pairs",
    [
        [frozenset((one, one + 1)) for one in range(15)],
        [frozenset((one, one + 1)) for one in range(0, 16, 2)],
        [frozenset(pair) for pair in itertools.combinations(range(16), 2)],
        [frozenset((one, other)) for one in range(8) for other in range(8, 16)],
    ],
    ids=["path", "pairs", "all", "two halves"],
)
def test_sixteen_replicas_are_decided_in_time(pairs: list[frozenset[int]]) -> None:
    broken = frozenset(frozenset(f"{one:02d}" for one in link) for link in pairs)
    started_s = time.monotonic()
    cover = replicas_to_leave_out(broken, tuple((f"{one:02d}", 0) for one in range(16)))
    assert time.monotonic() - started_s < 2
    assert len(cover) == {15: 8, 8: 8, 120: 15, 64: 8}[len(pairs)]


def test_either_end_reports_a_broken_link() -> None:
    reports = LinkReports()
    reports.replace("a", ["b", "a", "x"])
    reports.replace("b", {"a", "c"})
    assert reports.broken("abc") == _links("ab", "bc")
    assert reports.broken("bc") == _links("bc")
    reports.replace("b", [])
    assert reports.broken("abc") == _links("ab")
    reports.forget("b")
    assert reports.broken("abc") == frozenset()
    assert reports.broken("ax") == _links("ax")


def _request(rules: QuorumRules, now_s: float, **steps: int) -> Quorum | None:
    """Request a quorum for each replica, which is at this step."""
    for one, step in steps.items():
        rules.request_quorum(Replica(one, step=step), now_s)
    return rules.form_quorum(now_s)


def test_one_of_three_is_left_out_and_comes_back() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, a=0, b=0, c=0)
    rules.report_links("b", {"c"})
    quorum = _request(rules, 1, a=5, b=5, c=5)
    assert quorum is not None
    assert quorum.ids == ("a", "b")
    assert rules.waiting.keys() == {"c"}
    verdict = rules.evaluate(1)
    assert verdict.members is None
    # It keeps waiting, and the others do not wait for it.
    for second in range(2, 20):
        quorum = _request(rules, second, a=5 + second, b=5 + second)
        assert quorum is not None
        assert quorum.ids == ("a", "b")
        rules.heartbeat("c", second)
    rules.report_links("b", ())
    quorum = _request(rules, 20, a=25, b=25)
    assert quorum is not None
    assert quorum.ids == ("a", "b", "c")


def test_the_reason_names_the_replica_and_its_links() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, a=0, b=0, c=0)
    rules.report_links("a", {"c"})
    rules.report_links("c", {"b"})
    for one in "abc":
        rules.request_quorum(Replica(one), 1)
    verdict = rules.evaluate(1)
    assert verdict.reason == "all live replicas wait; c is left out, no link to a, b"
    assert verdict.left_out == ("c",)
    assert rules.broken_links(1) == [("a", "c"), ("b", "c")]


def test_of_two_the_longest_history_remains() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, a=0, b=0)
    rules.report_links("a", {"b"})
    quorum = _request(rules, 1, a=4, b=5)
    assert quorum is not None
    assert quorum.ids == ("b",)
    assert "1 of 2 live" in rules.evaluate(1).reason


def test_of_two_equal_ones_the_first_remains() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, a=0, b=0)
    rules.report_links("b", {"a"})
    quorum = _request(rules, 1, a=5, b=5)
    assert quorum is not None
    assert quorum.ids == ("a",)


def test_a_minority_does_not_continue() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, a=0, b=0, c=0)
    for one, others in {"a": "bc", "b": "ac"}.items():
        rules.report_links(one, others)
    assert _request(rules, 1, a=5, b=5, c=5) is None
    reason = rules.evaluate(1).reason
    assert reason.startswith("1 of 3 live replicas wait, more than half are required; ")
    assert "b is left out, no link to a, c" in reason


def test_the_first_half_with_the_longest_history_continues() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, a=0, b=0, c=0, d=0)
    for one in "ab":
        rules.report_links(one, "cd")
    quorum = _request(rules, 1, a=5, b=5, c=6, d=5)
    assert quorum is not None
    assert quorum.ids == ("c", "d")


def test_a_half_without_the_longest_history_does_not_continue() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, a=0, b=0, c=0, d=0)
    rules.report_links("a", "bc")
    assert _request(rules, 1, a=9, b=5, c=5) is None
    assert "2 of 4 live" in rules.evaluate(1).reason
    # With the fourth it is the majority.
    quorum = _request(rules, 1, d=5)
    assert quorum is not None
    assert quorum.ids == ("b", "c", "d")


def test_the_minimum_number_of_replicas_holds_for_those_that_remain() -> None:
    rules = QuorumRules(QuorumSettings(2, 3000, 5000))
    assert _request(rules, 0, a=0, b=0)
    rules.report_links("a", "b")
    assert _request(rules, 1, a=1, b=1) is None
    assert rules.evaluate(1).reason.startswith("1 replicas wait, 2 are required; b is left out")


def test_a_replica_that_would_be_left_out_is_not_waited_for() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, a=0, b=0, c=0)
    rules.report_links("c", "b")
    quorum = _request(rules, 1, a=5, b=5)
    assert quorum is not None
    assert quorum.ids == ("a", "b")


def test_reports_of_dead_and_left_replicas_are_forgotten() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, **{"a:1": 0, "b:1": 0, "c": 0})
    rules.report_links("b:1", {"a:1"})
    rules.report_links("c", {"a:1"})
    assert rules.broken_links(0) == [("a:1", "b:1"), ("a:1", "c")]
    rules.mark_left("b:1")
    rules.report_links("b:1", {"a:1"})
    assert rules.broken_links(0) == [("a:1", "c")]
    # The heartbeat of c expires.
    rules.heartbeat("a:1", 6)
    assert rules.broken_links(6) == []
    rules.heartbeat("c", 7)
    assert rules.broken_links(7) == []


def test_a_newcomer_is_left_out_at_once() -> None:
    rules = QuorumRules(SETTINGS)
    assert _request(rules, 0, a=7, b=7)
    rules.report_links("c", {"a"})
    quorum = _request(rules, 1, a=8, b=8, c=0)
    assert quorum is not None
    assert quorum.ids == ("a", "b")


def test_a_replica_that_returns_has_reported_no_link() -> None:
    rules = QuorumRules(QuorumSettings(2, 3000, 5000))
    now_s = 1000.0
    for replica_id in "ab":
        rules.heartbeat(replica_id, now_s)
    rules.report_links("a", ["b"])
    assert rules.broken_links(now_s) == [("a", "b")]
    rules.mark_left("a")
    rules.heartbeat("a", now_s)
    assert rules.broken_links(now_s) == []
