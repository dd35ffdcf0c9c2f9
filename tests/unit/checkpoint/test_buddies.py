"""Which rank is whose buddy."""

import pytest

from torchtitan_lite.checkpoint.buddies import buddies_of


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ([7], None),
        ([7, 7, 7], None),
        ([7, 9], [1, 0]),
        ([7, 7, 9, 9], [2, 3, 0, 1]),
        ([7, 9, 4], [1, 2, 0]),
        ([7, 7, 9, 9, 4, 4], [2, 3, 4, 5, 0, 1]),
        ([7, 7, 7, 9], [3, 3, 3, 0]),
        ([7, 7, 9, 4, 4, 4], [2, 2, 3, 0, 1, 0]),
        ([7, 9, 7, 9], [1, 0, 3, 2]),
    ],
)
def test_the_buddy_is_on_the_next_machine(machines: list[int], expected: list[int] | None) -> None:
    found = buddies_of(machines)
    assert found == expected
    for rank, buddy in enumerate(found or []):
        assert machines[buddy] != machines[rank]
