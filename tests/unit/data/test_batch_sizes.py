"""The global batch size as a function of the position in the sample order."""

from itertools import accumulate

import pytest
from pydantic import ValidationError

from torchtitan_lite.config.tables.data import DataConfig
from torchtitan_lite.data import BatchSizes, batch_sizes


def test_a_stage_has_the_steps_that_begin_within_its_samples() -> None:
    config = DataConfig(batch_size_warmup=[[5, 2], [8, 4]], global_batch_size=8)
    sizes = batch_sizes(config, num_batch_ranks=2)
    assert sizes == BatchSizes(stages=((5, 2), (13, 4)), final=8)
    assert [sizes.at(cursor) for cursor in (0, 4, 5, 12, 13, 10**12)] == [2, 2, 4, 4, 8, 8]
    cursors = [0]
    while cursors[-1] < 30:
        cursors.append(cursors[-1] + sizes.at(cursors[-1]))
    assert cursors == list(accumulate([0, 2, 2, 2, 4, 4, 8, 8]))


def test_without_a_warmup_every_step_is_the_same() -> None:
    config = DataConfig(local_batch_size=3)
    assert {batch_sizes(config, num_batch_ranks=4).at(cursor) for cursor in range(100)} == {12}
    config = DataConfig(global_batch_size=6)
    assert {batch_sizes(config, num_batch_ranks=4).at(cursor) for cursor in range(100)} == {6}


@pytest.mark.parametrize("stage", [[100, 0], [100], [0, 4]])
def test_each_stage_of_a_warmup_is_a_pair_of_positive_integers(stage: list[int]) -> None:
    with pytest.raises(ValidationError, match="each stage must be a pair of positive integers"):
        DataConfig(global_batch_size=8, batch_size_warmup=[[100, 4], stage])
