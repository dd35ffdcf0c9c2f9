"""Division of the samples of a step over replicas."""

from itertools import chain

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
