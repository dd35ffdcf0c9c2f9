"""Who sends what of a multicast: both sides agree, every receiver gets everything once, and the
sources are balanced."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest

from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.redistribute.planning.transfers import (
    SMALLEST,
    Delivery,
    Multicast,
    NodeReceivers,
    deliveries_from,
    deliveries_to,
    node_deliveries_from,
    node_deliveries_to,
    stripes,
)

# Three sources divide 768 elements, and no fewer.
SIZES = [1, 2, 767, 768, 5000]
SOURCES: list[list[Holder]] = [[5], [5, 0], [1, 0, 2]]
RECEIVERS: list[list[Holder]] = [[9], [9, 8], [8, 0, 9, 6, 7], [*range(16)]]
CASES = [
    Multicast(sources, receivers, start, start + size, rotation)
    for size in SIZES
    for sources in SOURCES
    for receivers in RECEIVERS
    for start, rotation in ((0, 0), (7, 1), (14, 5))
]


def _needers(case: Multicast) -> list[Holder]:
    return [receiver for receiver in case.receivers if receiver not in case.sources]


def _check_complete(case: Multicast, deliveries: Iterable[Delivery]) -> None:
    """Every receiver gets all elements once, in order."""
    got: dict[Holder, list[tuple[int, int]]] = defaultdict(list)
    for one in deliveries:
        got[one.receiver].append((one.start, one.stop))
    assert set(got) == set(_needers(case))
    for parts in got.values():
        assert [start for start, _ in sorted(parts)] == [
            case.start,
            *(stop for _, stop in sorted(parts)[:-1]),
        ]
        assert max(parts)[1] == case.stop and all(start < stop for start, stop in parts)


@pytest.mark.parametrize("row", [1, 7, 100])
def test_sources_and_receivers_agree_on_balanced_deliveries(row: int) -> None:
    for case in CASES:
        needers, count, size = _needers(case), len(case.sources), case.stop - case.start
        received = {r: deliveries_to(case, r, row) for r in needers}
        sent = [one for source in case.sources for one in deliveries_from(case, source, row)]
        assert sorted(sent) == sorted(itertools.chain(*received.values()))
        assert all(one.receiver == r for r, some in received.items() for one in some)
        _check_complete(case, sent)
        # In turn, while there is one for each source; the rest is divided if it is large.
        in_turn = len(needers) // count * count if size >= SMALLEST * count else len(needers)
        for index, receiver in enumerate(needers):
            sources = [one.source for one in received[receiver]]
            if index < in_turn:
                assert sources == [case.sources[(index + case.rotation) % count]]
            else:
                assert sources == list(case.sources)
        amounts = Counter(dict.fromkeys(case.sources, 0))
        for one in sent:
            amounts[one.source] += one.stop - one.start
        uneven = max(amounts.values()) - min(amounts.values())
        assert uneven <= max(max(amounts.values()) // 20, SMALLEST * count)


@pytest.mark.parametrize(("size", "is_of_rows"), [(61 * 7, True), (20 * 3 * 7 - 10, False)])
@pytest.mark.parametrize("start", [0, 14, 15])
def test_stripes_have_whole_rows_if_there_are_many(start: int, size: int, is_of_rows: bool) -> None:
    parts = stripes(start, start + size, 3, 7)
    assert [*itertools.chain(*parts)][1:-1:2] == [begin for begin, _ in parts[1:]]
    assert (parts[0][0], parts[-1][1]) == (start, start + size)
    lengths = [end - begin for begin, end in parts]
    if is_of_rows and start % 7 == 0:
        assert lengths == [140, 140, 147]
    else:
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("elements", [0, 1])
def test_the_last_row_may_be_incomplete(elements: int) -> None:
    parts = stripes(0, 7 * 80 + elements, 4, 7)
    assert parts == [(0, 140), (140, 280), (280, 420), (420, 560 + elements)]


def _nodes(case: Multicast, shard_elements: int) -> NodeReceivers:
    """Four holders per node."""

    def by_node(holders: Sequence[Holder]) -> dict[Hashable, list[Holder]]:
        found: dict[Hashable, list[Holder]] = defaultdict(list)
        for holder in holders:
            found[_node(holder)].append(holder)
        return dict(found)

    return NodeReceivers(_node, by_node(case.sources), by_node(case.receivers), shard_elements)


def _node(holder: Holder) -> int:
    assert isinstance(holder, int)
    return holder // 4


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("shards", [1, 8, 16])
def test_data_enters_a_node_at_most_once_with_relays(shards: int, relay: bool) -> None:
    """`shards`: how many multicasts of the size a receiver needs."""
    for case in CASES:
        size = case.stop - case.start
        nodes = _nodes(case, shards * size)
        sent = [
            one
            for source in case.sources
            for one in node_deliveries_from(case, source, 1, nodes, relay)
        ]
        received, forwards, forwarded = [], [], []
        for receiver in _needers(case):
            first, second = node_deliveries_to(case, receiver, 1, nodes, relay)
            assert all(one.receiver == receiver for one in first)
            received += first
            forwarded += [one for one in second if one.receiver == receiver]
            forwards += [one for one in second if one.source == receiver]
            assert len(second) == sum(receiver in (one.source, one.receiver) for one in second)
        assert sorted(sent) == sorted(received)
        assert sorted(forwards) == sorted(forwarded)
        _check_complete(case, [*received, *forwarded])
        assert all(_node(one.source) == _node(one.receiver) for one in forwards)
        for node, receivers in nodes.receivers.items():
            entering = [one for one in sent if _node(one.receiver) == node]
            if node in nodes.sources:
                assert all(_node(one.source) == node for one in entering)
                continue
            times = 1 if relay else len(receivers)
            assert sum(one.stop - one.start for one in entering) == times * size
            if relay:
                # Each carries a stripe, or whole multicasts in turn if a shard has four for each.
                is_whole = 4 * len(receivers) <= shards
                carriers = 1 if is_whole else min(len(receivers), size)
                assert len({one.receiver for one in entering}) == carriers


def test_carriers_and_sources_take_turns() -> None:
    receivers: list[Holder] = [4, 5, 8, 9]
    entering = []
    for rotation in range(6):
        case = Multicast([0, 1, 2], receivers, 0, 10, rotation)
        nodes = _nodes(case, 80)
        for source in case.sources:
            entering += node_deliveries_from(case, source, 1, nodes, True)
    pairs = [(_node(one.receiver), one.source) for one in entering]
    assert Counter(pairs) == dict.fromkeys(itertools.product((1, 2), (0, 1, 2)), 2)
    assert Counter(one.receiver for one in entering) == dict.fromkeys(receivers, 3)
    # Nodes begin at different sources.
    assert len({one.source for one in entering[:2]}) == 2


def test_stripes_for_carriers_come_from_different_sources() -> None:
    case = Multicast([0, 1, 2], [4, 5, 6], 0, 9, 1)
    nodes = _nodes(case, 9)
    sent = [node_deliveries_from(case, source, 1, nodes, True) for source in case.sources]
    # From source 1 on, and one more for node 1.
    assert [[one.receiver for one in some] for some in sent] == [[5], [6], [4]]
