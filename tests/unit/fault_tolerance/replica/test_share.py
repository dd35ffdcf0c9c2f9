"""Division of the samples of a step over replicas."""

from itertools import chain
from random import Random

import pytest

from torchtitan_lite.fault_tolerance.replica import Share


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_each_sample_of_a_step_is_used_once(count: int, rounds: int) -> None:
    batch, cursor = rounds * 4, 100
    shares = [Share(index=index, count=count) for index in range(count)]
    taken = [share.samples(cursor, batch, 4) for share in shares]
    assert list(chain(*taken)) == list(range(cursor, cursor + batch))
    lengths = [len(samples) for samples in taken]
    assert max(lengths) - min(lengths) <= 4 and all(length % 4 == 0 for length in lengths)
    assert {share.step_size(batch) for share in shares} == {batch}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_pipeline_gets_as_many_rounds_as_it_needs_or_none(count: int) -> None:
    shares = [Share(index=index, count=count) for index in range(count)]
    taken = [share.samples(10, 22, 2, fewest=3) for share in shares]
    assert list(chain(*taken)) == list(range(10, 32))
    assert all(len(samples) == 0 or len(samples) >= 6 for samples in taken)


def test_a_standby_replica_gets_no_samples() -> None:
    assert len(Share(index=-1, count=2).samples(0, 16, 4)) == 0


def test_a_batch_per_replica() -> None:
    shares = [Share(index=index, count=3, one_batch_per_replica=True) for index in range(3)]
    taken = [share.samples(8, 4, 2) for share in shares]
    assert taken == [range(8, 12), range(12, 16), range(16, 20)]
    assert shares[0].step_size(4) == 12


def _kept_shares(owners: list[int], count: int) -> list[Share]:
    return [Share(index=index, count=count, owners=tuple(owners)) for index in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_each_lost_round_is_computed_once_and_all_compute_equally_much(seed: int) -> None:
    random = Random(seed)
    count, rounds, fewest = random.randrange(1, 6), random.randrange(1, 40), random.randrange(1, 4)
    owners = [random.randrange(-1, count) for _ in range(rounds)]
    shares = _kept_shares(owners, count)
    num_lost = owners.count(-1)
    taken = [share.parts(100, rounds * 4, 4, fewest) for share in shares]
    computed = [[*chain(*parts)] for parts in taken]
    if 0 < num_lost < fewest:
        assert not any(share.reuses_work(fewest) for share in shares)
        assert sorted(chain(*computed)) == [*range(100, 100 + rounds * 4)]
        return
    assert all(share.reuses_work(fewest) for share in shares)
    lost = [
        100 + place * 4 + n for place, owner in enumerate(owners) if owner < 0 for n in range(4)
    ]
    assert sorted(chain(*computed)) == lost
    assert all(not samples or len(samples) >= 4 * fewest for samples in computed)
    # At most one unit more than another that has computed anything new.
    totals = [owners.count(p) + len(samples) // 4 for p, samples in enumerate(computed)]
    with_new = [total for total, samples in zip(totals, computed, strict=True) if samples]
    if with_new:
        assert max(with_new) - min(totals) < 2 * fewest


def test_two_survivors_of_three_divide_the_lost_share() -> None:
    before = [Share(index=index, count=3) for index in range(3)]
    owners = [-1] * 12
    for survivor, former in enumerate((before[0], before[2])):
        for sample in former.samples(24, 24, 2)[::2]:
            owners[(sample - 24) // 2] = survivor
    parts = [share.parts(24, 24, 2) for share in _kept_shares(owners, 2)]
    assert [[*part] for parts_of in parts for part in parts_of] == [
        [32, 33],
        [34, 35],
        [36, 37],
        [38, 39],
    ]
    assert [*map(len, parts)] == [2, 2]


def test_without_kept_work_the_parts_are_the_share() -> None:
    for index in (-1, 0, 1):
        share = Share(index=index, count=2)
        assert list(share.parts(8, 16, 4)) == [share.samples(8, 16, 4)]
    # All work is kept: nothing is computed.
    shares = _kept_shares([0, 0, 1, 1], 2)
    assert all(share.reuses_work(3) and not share.parts(8, 16, 4, 3) for share in shares)
