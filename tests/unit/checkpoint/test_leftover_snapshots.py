"""Selection of the newest complete snapshot in shared memory."""

from typing import Any

import pytest

from torchtitan_lite.checkpoint.leftover_snapshots import newest_common


def region(starts: str, world_size: int, *steps: int) -> dict[str, Any]:
    """Return a region with these sessions, one per letter of `starts`."""
    return {"sessions": list(starts), "world_size": world_size, "steps": list(steps)}


def machine(**regions: dict[str, Any]) -> dict[str, Any]:
    """Return what the first rank of a machine reports."""
    return {key[1:]: value for key, value in regions.items()}


_CASES = {
    "all have it": ([machine(r0=region("s", 2, 4, 5), r1=region("s", 2, 5, 6))], ("s", 5)),
    "one is missing": ([machine(r0=region("s", 2, 4, 5))], None),
    "no step in common": ([machine(r0=region("s", 2, 4), r1=region("s", 2, 5))], None),
    "two machines": (
        [machine(r0=region("s", 2, 4, 5)), machine(r1=region("s", 2, 4))],
        ("s", 4),
    ),
    "swapped machines": (
        [
            machine(r0=region("s", 2, 4), r1=region("t", 2, 7, 8)),
            machine(r0=region("t", 2, 7, 9), r1=region("s", 2, 4)),
        ],
        ("t", 7),
    ),
    "a complete older session and an incomplete newer one": (
        [
            machine(r0=region("s", 2, 4), r1=region("s", 2, 4)),
            machine(r0=region("t", 2, 9)),
        ],
        ("s", 4),
    ),
    "one that a later session has adopted, unlike the other": (
        [machine(r0=region("ts", 2, 4, 5), r1=region("s", 2, 5, 6))],
        ("s", 5),
    ),
    "one that a later session has adopted alone": (
        [machine(r0=region("t", 2, 5), r1=region("ts", 2, 5, 6))],
        ("t", 5),
    ),
    "nothing": ([machine(), machine()], None),
}  # fmt: skip


@pytest.mark.parametrize("case", _CASES)
def test_the_newest_step_that_all_ranks_of_one_session_have(case: str) -> None:
    seen, expected = _CASES[case]
    actual = newest_common(seen, range(len(seen)))
    assert (actual and (actual.session, actual.step)) == expected


def test_a_region_is_opened_on_the_machine_of_its_session() -> None:
    seen = _CASES["swapped machines"][0]
    actual = newest_common(seen, range(2))
    assert actual is not None
    assert actual.reach == {0: [1], 1: [0]}
    assert [actual.reporter(0), actual.reporter(1)] == [1, 0]


def test_one_rank_reports_for_its_machine() -> None:
    regions = {f"r{rank}": region("s", 4, 3) for rank in range(4)}
    seen = [
        machine(r0=regions["r0"], r1=regions["r1"]),
        {},
        machine(r2=regions["r2"], r3=regions["r3"]),
        {},
    ]
    actual = newest_common(seen, [7, 7, 9, 9])
    assert actual is not None
    assert actual.reach == {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    assert [actual.reporter(saver) for saver in range(4)] == [0, 1, 2, 3]
