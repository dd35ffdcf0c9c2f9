"""Selection of the newest complete snapshot in shared memory, with copies on other machines."""

from dataclasses import replace
from typing import Any

import pytest

from torchtitan_lite.checkpoint.history.snapshot_index import (
    HeldPart,
    HeldRegion,
    Position,
    newest_common,
)


def region(starts: str, world_size: int, *steps: int, segment: int = 0) -> HeldRegion:
    """Return a region with these generations, one per letter of `starts`."""
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
    "a complete older generation and an incomplete newer one": (
        [
            machine(r0=region("s", 2, 4), r1=region("s", 2, 4)),
            machine(r0=region("t", 2, 9)),
        ],
        ("s", 4),
    ),
    "one that a later generation has adopted, unlike the other": (
        [machine(r0=region("ts", 2, 4, 5), r1=region("s", 2, 5, 6))],
        ("s", 5),
    ),
    "one that a later generation has adopted alone": (
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
    "an abandoned generation of higher steps": (
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
def test_the_newest_step_that_all_ranks_of_one_generation_have(case: str) -> None:
    seen, expected = _CASES[case]
    actual = newest_common(seen, range(len(seen)))
    assert (actual and (actual.generation_id, actual.position.step)) == expected


def test_a_region_is_opened_on_the_machine_of_its_generation() -> None:
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


def copied_in(seen: list[list[HeldRegion]]) -> tuple[str, int, str | None, int | None]:
    """Return generation and step of the newest snapshot, and of the newest copied one."""
    newest = newest_common(seen, range(len(seen)))
    assert newest is not None
    copied = newest.copied_position
    return (
        newest.generation_id, newest.position.step,
        newest.copied_generation_id, copied and copied.step,
    )  # fmt: skip


@pytest.mark.parametrize(("earlier", "later"), [("s", "t"), ("t", "s")])
def test_copies_count_after_a_resume_that_ended_before_its_first_copy(
    earlier: str, later: str
) -> None:
    both = later + earlier
    # No rank has received a copy.
    seen = [
        machine(r0=region(both, 2, 4, 9), c1=region(earlier, 2, 4)),
        machine(r1=region(both, 2, 4, 9), c0=region(earlier, 2, 4)),
    ]
    assert copied_in(seen) == (earlier, 9, earlier, 4)
    # One of two.
    seen[0] = machine(r0=region(both, 2, 4, 9), c1=region(both, 2, 4, 8))
    assert copied_in(seen) == (earlier, 9, earlier, 4)
    # Both: the earlier generation is not needed any more.
    seen = [
        machine(r0=region(later, 2, 8, 9), c1=region(both, 2, 4, 8)),
        machine(r1=region(later, 2, 8, 9), c0=region(both, 2, 4, 8)),
    ]
    assert copied_in(seen) == (later, 9, later, 8)


@pytest.mark.parametrize(("earlier", "later"), [("s", "t"), ("t", "s")])
def test_the_newest_snapshot_and_the_newest_copied_one_may_be_of_two_generations(
    earlier: str, later: str
) -> None:
    # A third machine took over from the second, which is back, and then was lost itself.
    seen = [
        machine(r0=region(later + earlier, 2, 4, 9), c1=region(later, 2, 9)),
        machine(r1=region(earlier, 2, 4), c0=region(earlier, 2, 4)),
        machine(c1=region(earlier, 2, 4)),
    ]
    assert copied_in(seen) == (later, 9, earlier, 4)


def test_nothing_is_copied_of_which_a_part_exists_once() -> None:
    seen = [
        machine(r0=region("s", 2, 4, 6), c1=region("s", 2, 4)),
        machine(r1=region("s", 2, 5, 6), c0=region("s", 2, 4)),
    ]
    assert copied_in(seen) == ("s", 6, None, None)
    # A copy of a generation whose regions are gone.
    seen = [machine(r0=region("s", 1, 4), c0=region("t", 1, 4))]
    assert copied_in(seen) == ("s", 4, None, None)


def test_only_usable_positions_count_as_copied() -> None:
    seen = [
        machine(r0=region("s", 2, 4, 6, 8), c1=region("s", 2, 4, 6)),
        machine(r1=region("s", 2, 4, 6, 8), c0=region("s", 2, 4, 6)),
    ]
    cases: list[tuple[dict[str, Any], tuple[int, int]]] = [
        ({}, (8, 6)),
        ({"at_most": 7}, (6, 6)),
        ({"at_most": 5}, (4, 4)),
        ({"before": Position(0, 6)}, (4, 4)),
        ({"permitted": {0: 4}}, (4, 4)),
    ]
    for changes, expected in cases:
        found = newest_common(seen, range(2), **changes)
        assert found is not None and found.copied_position is not None
        assert (found.position.step, found.copied_position.step) == expected, changes


def test_before_excludes_a_position_and_all_later_ones() -> None:
    seen = [
        machine(r0=region("s", 1, 3, 4, segment=1)),
        machine(r0=region("t", 1, 2, 3, segment=2)),
    ]
    for before, expected in (
        (None, (2, 3)),
        (Position(2, 3), (2, 2)),
        (Position(2, 2), (1, 4)),
        (Position(1, 4), (1, 3)),
        (Position(1, 3), None),
    ):
        found = newest_common(seen, range(2), before=before)
        assert (found and found.position) == expected, before


def test_a_damaged_part_is_replaced_by_its_other_holder() -> None:
    seen = [
        machine(r0=region("s", 2, 4, 6), c1=region("s", 2, 4, 6)),
        machine(r1=region("s", 2, 4, 6), c0=region("s", 2, 4, 6)),
    ]
    own, copy = (HeldPart(1, is_copy, Position(0, 6)) for is_copy in (False, True))
    for excluded, expected in (
        ([], (6, set(), 6)),
        ([own], (6, {1}, 4)),
        ([copy], (6, set(), 4)),
        ([own, copy], (4, set(), 4)),
    ):
        found = newest_common(seen, range(2), excluded=excluded)
        assert found is not None and found.copied_position is not None
        assert (found.position.step, found.copies, found.copied_position.step) == expected


@pytest.mark.parametrize(("at_most", "step"), [(6, 5), (5, 5), (4, 4), (3, None)])
def test_the_newest_step_up_to_a_given_one(at_most: int, step: int | None) -> None:
    found = newest_common([machine(r0=region("s", 1, 4, 5))], [0], at_most=at_most)
    assert (None if found is None else found.position.step) == step
