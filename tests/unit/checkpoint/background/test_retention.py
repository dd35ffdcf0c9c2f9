"""Retention of checkpoints."""

import pytest

from torchtitan_lite.checkpoint.background.save import steps_to_delete


@pytest.mark.parametrize(
    ("steps", "saved", "keep", "every", "wanted"),
    [
        ([1, 2, 3, 4], 4, 2, 0, [1, 2]),
        ([1, 2, 3, 4], 4, 0, 0, []),
        ([4], 4, 1, 0, []),
        ([10, 11, 12, 20, 21, 22], 22, 2, 10, [11, 12]),
        ([10, 20, 30], 30, 1, 10, []),
        ([5, 10], 10, 1, 10, []),
        ([3, 5, 10], 10, 1, 10, [3]),
        ([1, 2, 9], 2, 1, 0, [1]),
    ],
)
def test_to_delete(steps: list[int], saved: int, keep: int, every: int, wanted: list[int]) -> None:
    assert steps_to_delete(steps, saved, keep_latest_k=keep, keep_every=every) == wanted
