"""What is told of a plan, against the plan itself."""

import pytest
import torch

from scripts.layout_syntax import parse_layout
from torchtitan_lite.redistribute import Plan, plan
from torchtitan_lite.redistribute.explain import (
    explain,
    format_bytes,
    lower_bound_bytes,
    temporary_bytes,
    traffic,
)

_WAYS = [
    ("mesh=a:2,b:2 placements=S0,R", "mesh=c:4 placements=S0"),
    ("mesh=a:2,b:2 placements=S0#1,S0#0", "mesh=c:3 placements=S1 ranks=2-4"),
    ("mesh=a:2,b:3 placements=S0/3,S1", "mesh=c:6 placements=R"),
    ("mesh=a:4 placements=P", "mesh=a:2,b:2 placements=S0,R"),
    ("mesh=a:2,b:2 placements=P(max),S1", "mesh=c:4 placements=R ranks=4-7"),
    ("mesh=a:2,b:2 placements=P(avg),R", "mesh=c:5 placements=R"),
    ("mesh=a:4 placements=R", "mesh=a:4 placements=P"),
    ("mesh=a:32 placements=S0", "mesh=a:32 placements=S1"),
    ("mesh=a:2 placements=S1", "mesh=a:2 placements=S1"),
]


def _plan(src: str, dst: str) -> Plan:
    return plan(parse_layout(src, "src"), parse_layout(dst, "dst"), (37, 50), torch.bfloat16)


@pytest.mark.parametrize(("src", "dst"), _WAYS)
def test_the_holders_move_what_the_plan_moves_and_no_more_than_needed(src: str, dst: str) -> None:
    found = _plan(src, dst)
    costs = traffic(found).values()
    assert sum(cost.sent for cost in costs) == found.moved_bytes
    assert sum(cost.received for cost in costs) == found.moved_bytes
    least = lower_bound_bytes(found)
    assert least == (None if "P" in dst else found.moved_bytes)


@pytest.mark.parametrize(("src", "dst"), _WAYS)
def test_the_numbers_in_the_text_are_those_of_the_plan(src: str, dst: str) -> None:
    found = _plan(src, dst)
    said = explain(found)
    assert f"From: {found.src}\nTo: {found.dst}\n" in said
    assert f"Moved in all: {found.moved_bytes:,} bytes" in said
    assert said.count("\nRound ") == (0 if found.is_noop else len(found.rounds))
    assert ("for the averages" in said) == ("avg" in src)
    costs = traffic(found)
    if found.moved_bytes:
        assert f"{max(cost.sent for cost in costs.values()):,} bytes" in said
        assert f"{max(cost.received for cost in costs.values()):,} bytes" in said
    rows = [line.split() for line in said.splitlines() if line.startswith("  ")]
    if len(costs) > 16:
        assert not rows and "Median of 32 holders" in said
        return
    assert [[cell.replace(",", "") for cell in row] for row in rows[1:]] == [
        [str(number) for number in (holder, c.sent, c.received, c.stays, c.result)]
        for holder, c in costs.items()
    ]


def test_a_bound_does_not_depend_on_the_plan() -> None:
    # 4 holders with a row block each, of which a quarter is theirs already: 3/4 of it all moves.
    found = plan(
        parse_layout("mesh=a:4 placements=S0", "src"),
        parse_layout("mesh=a:4 placements=S1", "dst"),
        (8, 16),
        torch.float32,
    )
    assert lower_bound_bytes(found) == 8 * 16 * 4 * 3 // 4
    # 2 contributions and 3 other holders: both go to the first, which sends 2 copies.
    found = _plan("mesh=a:2 placements=P", "mesh=a:3 placements=R ranks=2-4")
    assert lower_bound_bytes(found) == 37 * 50 * 2 * 4


def test_temporary_memory_is_two_buckets_or_less() -> None:
    found = _plan("mesh=a:2 placements=S0", "mesh=a:2 placements=R")
    busiest = max(cost.sent + cost.received for cost in traffic(found).values())
    assert temporary_bytes(found, 1 << 20) == busiest
    assert temporary_bytes(found, 1000) == 2000
    assert "two buckets of 1000 B" in explain(found, bucket_bytes=1000)
    assert "all-to-all collectives of a" in explain(found, transport="collective")


def test_bytes_have_three_digits() -> None:
    numbers = (0, 1023, 1500, 1 << 20, 1023 << 10, 5 << 40)
    assert [format_bytes(n) for n in numbers] == [
        "0 B",
        "1023 B",
        "1.46 KiB",
        "1 MiB",
        "1023 KiB",
        "5 TiB",
    ]
