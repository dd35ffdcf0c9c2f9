"""Which snapshot in shared memory is the newest that is whole."""

from typing import Any

import pytest

from torchtitan_lite.checkpoint.remembered import newest_of


def region(start: str, world_size: int, *steps: int) -> dict[str, Any]:
    told = {str(step): {"of": start} for step in steps}
    return {"start": start, "world_size": world_size, "steps": told}


def machine(name: str, **regions: dict[str, Any]) -> dict[str, Any]:
    return {"machine": name, "regions": {key[1:]: value for key, value in regions.items()}}


_CASES = {
    "all have it": ([machine("a", r0=region("s", 2, 4, 5), r1=region("s", 2, 5, 6))], ("s", 5)),
    "one is missing": ([machine("a", r0=region("s", 2, 4, 5))], None),
    "no step in common": ([machine("a", r0=region("s", 2, 4), r1=region("s", 2, 5))], None),
    "two machines": (
        [machine("a", r0=region("s", 2, 4, 5)), machine("b", r1=region("s", 2, 4))],
        ("s", 4),
    ),
    "machines that have changed places": (
        [
            machine("a", r0=region("s", 2, 4), r1=region("t", 2, 7, 8)),
            machine("b", r0=region("t", 2, 7, 9), r1=region("s", 2, 4)),
        ],
        ("t", 7),
    ),
    "an older start that is whole beside a newer one that is not": (
        [
            machine("a", r0=region("s", 2, 4), r1=region("s", 2, 4)),
            machine("b", r0=region("t", 2, 9)),
        ],
        ("s", 4),
    ),
    "nothing": ([machine("a"), machine("b")], None),
}  # fmt: skip


@pytest.mark.parametrize("case", _CASES)
def test_the_newest_step_that_all_ranks_of_one_start_have(case: str) -> None:
    told, wanted = _CASES[case]
    found = newest_of(told)
    assert (found and (found.start, found.step)) == wanted
    if found is not None:
        assert [one["of"] for one in found.told] == [found.start] * len(found.told)


def test_a_region_is_opened_on_the_machine_where_that_start_left_it() -> None:
    told = [*_CASES["machines that have changed places"][0]]
    found = newest_of(told)
    assert found is not None
    assert dict(found.reach) == {"memory of rank 0": [1], "memory of rank 1": [0]}
