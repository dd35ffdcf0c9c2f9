"""Rounds of a validation."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.data.held_out import ValidationData


@pytest.mark.parametrize(
    ("steps", "num_batch_ranks", "rounds"), [(-1, 2, 3), (2, 2, 2), (9, 2, 3), (-1, 1, 5)]
)
def test_all_blocks_are_read_or_those_of_the_steps(
    steps: int, num_batch_ranks: int, rounds: int
) -> None:
    data: Any = SimpleNamespace(num_blocks=10, _local_batch_size=2, _steps=steps)
    assert ValidationData.num_rounds(data, num_batch_ranks) == rounds
