"""Which snapshot in shared memory is the newest that is whole."""

from typing import Any

import pytest

from torchtitan_lite.checkpoint.leftover_snapshots import newest_common


def region(starts: str, world_size: int, *steps: int) -> dict[str, Any]:
    """`starts`: a letter each."""
    return {"sessions": list(starts), "world_size": world_size, "steps": list(steps)}


def machine(**regions: dict[str, Any]) -> dict[str, Any]:
    """What its first rank tells of it."""
    return {key[1:]: value for key, value in regions.items()}


_CASES = {
    "all have it": ([machine(r0=region("s", 2, 4, 5), r1=region("s", 2, 5, 6))], ("s", 5)),
    "one is missing": ([machine(r0=region("s", 2, 4, 5))], None),
    "no step in common": ([machine(r0=region("s", 2, 4), r1=region("s", 2, 5))], None),
    "two machines": (
        [machine(r0=region("s", 2, 4, 5)), machine(r1=region("s", 2, 4))],
        ("s", 4),
    ),
    "machines that have changed places": (
        [
            machine(r0=region("s", 2, 4), r1=region("t", 2, 7, 8)),
            machine(r0=region("t", 2, 7, 9), r1=region("s", 2, 4)),
        ],
        ("t", 7),
    ),
    "an older start that is whole beside a newer one that is not": (
        [
            machine(r0=region("s", 2, 4), r1=region("s", 2, 4)),
            machine(r0=region("t", 2, 9)),
        ],
        ("s", 4),
    ),
    "one that a later start has taken over, as the other has not": (
        [machine(r0=region("ts", 2, 4, 5), r1=region("s", 2, 5, 6))],
        ("s", 5),
    ),
    "one that a later start has alone already": (
        [machine(r0=region("t", 2, 5), r1=region("ts", 2, 5, 6))],
        ("t", 5),
    ),
    "nothing": ([machine(), machine()], None),
}  # fmt: skip


@pytest.mark.parametrize("case", _CASES)
def test_the_newest_step_that_all_ranks_of_one_start_have(case: str) -> None:
    seen, wanted = _CASES[case]
    found = newest_common(seen, range(len(seen)))
    assert (found and (found.session, found.step)) == wanted


def test_a_region_is_opened_on_the_machine_where_that_start_left_it() -> None:
    seen = _CASES["machines that have changed places"][0]
    found = newest_common(seen, range(2))
    assert found is not None
    assert found.reach == {0: [1], 1: [0]}
    assert [found.reporter(0), found.reporter(1)] == [1, 0]


def test_one_rank_speaks_for_all_of_its_machine() -> None:
    regions = {f"r{rank}": region("s", 4, 3) for rank in range(4)}
    seen = [
        machine(r0=regions["r0"], r1=regions["r1"]),
        {},
        machine(r2=regions["r2"], r3=regions["r3"]),
        {},
    ]
    found = newest_common(seen, [7, 7, 9, 9])
    assert found is not None
    assert found.reach == {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    assert [found.reporter(saver) for saver in range(4)] == [0, 1, 2, 3]
