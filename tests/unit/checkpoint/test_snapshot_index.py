"""Selection of the newest complete snapshot in shared memory, with copies on other machines."""

from dataclasses import replace

import pytest

from torchtitan_lite.checkpoint.snapshot_index import HeldRegion, Position, newest_common


def region(starts: str, world_size: int, *steps: int, segment: int = 0) -> HeldRegion:
    """Return a region with these sessions, one per letter of `starts`."""
    positions = [Position(segment, step) for step in steps]
    return HeldRegion(-1, False, list(starts), world_size, positions)


def machine(**regions: HeldRegion) -> list[HeldRegion]:
    """Return what the first rank of a machine reports: `r0` is rank 0's own region, `c0` a copy."""
    return [
        replace(value, saver=int(key[1:]), is_copy=key[0] == "c") for key, value in regions.items()
    ]


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
    "a lost machine": (
        [machine(r0=region("s", 2, 6, 8, 9), c1=region("s", 2, 6, 8)), machine()],
        ("s", 8),
    ),
    "a lost machine, copied while a newer copy was in flight": (
        [machine(r0=region("s", 2, 6, 9), c1=region("s", 2, 6)), machine()],
        ("s", 6),
    ),
    "one of three lost": (
        [
            machine(r0=region("s", 3, 4, 6), c2=region("s", 3, 4, 5)),
            machine(r1=region("s", 3, 4, 6), c0=region("s", 3, 4)),
        ],
        ("s", 4),
    ),
    "two neighbors of three lost": (
        [machine(r0=region("s", 3, 4, 6), c2=region("s", 3, 4, 5))],
        None,
    ),
    "abandoned copies of higher steps": (
        [
            machine(r0=region("s", 2, 4, segment=2), c1=region("s", 2, 9, segment=1)),
            machine(r1=region("s", 2, 4, segment=2), c0=region("s", 2, 9, segment=1)),
        ],
        ("s", 4),
    ),
    "an abandoned session of higher steps": (
        [
            machine(r0=region("t", 2, 4, segment=2), c1=region("s", 2, 9, segment=1)),
            machine(r1=region("t", 2, 4, segment=2), c0=region("s", 2, 9, segment=1)),
        ],
        ("t", 4),
    ),
    "another world size": (
        [machine(r0=region("s", 3, 4), c1=region("s", 2, 4)), machine(r1=region("s", 3, 4))],
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", _CASES)
def test_the_newest_step_that_all_ranks_of_one_session_have(case: str) -> None:
    seen, expected = _CASES[case]
    actual = newest_common(seen, range(len(seen)))
    assert (actual and (actual.session, actual.position.step)) == expected


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
        [],
        machine(r2=regions["r2"], r3=regions["r3"]),
        [],
    ]
    actual = newest_common(seen, [7, 7, 9, 9])
    assert actual is not None
    assert actual.reach == {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    assert [actual.reporter(saver) for saver in range(4)] == [0, 1, 2, 3]


def test_only_steps_of_the_history_count() -> None:
    held = [
        machine(r0=region("s", 1, 7, 9, segment=3)),
        machine(r0=region("t", 1, 12, segment=4)),
    ]
    chosen = {
        "nothing recorded": (None, (4, 12)),
        "both": ({3: 7, 4: None}, (4, 12)),
        "the later one abandoned": ({3: None}, (3, 9)),
        "its later steps abandoned": ({3: 7}, (3, 7)),
        "everything abandoned": ({5: None}, None),
    }
    for case, (permitted, expected) in chosen.items():
        actual = newest_common(held, [7, 9], permitted=permitted)
        assert (actual and actual.position) == expected, case


def test_a_part_is_read_from_the_rank_itself_or_from_its_copy() -> None:
    seen = [
        machine(r0=region("s", 2, 5, 6), c1=region("s", 2, 5)),
        machine(r1=region("s", 2, 5, 6), c0=region("s", 2, 5)),
    ]
    actual = newest_common(seen, [7, 9])
    assert actual is not None
    assert (actual.position.step, actual.copies, actual.reach) == (6, set(), {0: [0], 1: [1]})
    # Machine 9 was replaced by an empty one.
    actual = newest_common([seen[0], []], [7, 11])
    assert actual is not None
    assert (actual.position.step, actual.copies, actual.reach) == (5, {1}, {0: [0], 1: [0]})
    # Machine 7 was.
    actual = newest_common([[], seen[1]], [11, 9])
    assert actual is not None
    assert (actual.position.step, actual.copies, actual.reach) == (5, {0}, {0: [1], 1: [1]})
