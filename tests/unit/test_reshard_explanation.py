"""The explanation of a plan, compared with the plan itself."""

import pytest
import torch

from scripts.layout_syntax import parse_layout
from scripts.reshard_explanation import (
    explain,
    format_bytes,
    lower_bound_bytes,
    temporary_bytes,
    traffic,
)
from torchtitan_lite.distributed.redistribute import Plan, plan

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
def test_the_explained_bytes_are_those_of_the_plan_and_minimal(src: str, dst: str) -> None:
    actual = _plan(src, dst)
    costs = traffic(actual).values()
    assert sum(cost.sent for cost in costs) == actual.moved_bytes
    assert sum(cost.received for cost in costs) == actual.moved_bytes
    least = lower_bound_bytes(actual)
    assert least == (None if "P" in dst else actual.moved_bytes)


@pytest.mark.parametrize(("src", "dst"), _WAYS)
def test_the_numbers_in_the_text_are_those_of_the_plan(src: str, dst: str) -> None:
    actual = _plan(src, dst)
    output = explain(actual)
    assert f"From: {actual.src}\nTo: {actual.dst}\n" in output
    assert f"Total moved: {actual.moved_bytes:,} bytes" in output
    assert output.count("\nRound ") == (0 if actual.is_noop else len(actual.rounds))
    assert ("for the averages" in output) == ("avg" in src)
    costs = traffic(actual)
    if actual.moved_bytes:
        assert f"{max(cost.sent for cost in costs.values()):,} bytes" in output
        assert f"{max(cost.received for cost in costs.values()):,} bytes" in output
    rows = [line.split() for line in output.splitlines() if line.startswith("  ")]
    if len(costs) > 16:
        assert not rows and "Median of 32 holders" in output
        return
    assert [[cell.replace(",", "") for cell in row] for row in rows[1:]] == [
        [str(number) for number in (holder, c.sent, c.received, c.stays, c.result)]
        for holder, c in costs.items()
    ]


def test_a_bound_does_not_depend_on_the_plan() -> None:
    # 4 holders with a row block each, of which they keep a quarter: 3/4 of the tensor moves.
    actual = plan(
        parse_layout("mesh=a:4 placements=S0", "src"),
        parse_layout("mesh=a:4 placements=S1", "dst"),
        (8, 16),
        torch.float32,
    )
    assert lower_bound_bytes(actual) == 8 * 16 * 4 * 3 // 4
    # 2 partial sums and 3 other holders: both are sent to the first, which sends 2 copies.
    actual = _plan("mesh=a:2 placements=P", "mesh=a:3 placements=R ranks=2-4")
    assert lower_bound_bytes(actual) == 37 * 50 * 2 * 4


def test_temporary_memory_is_at_most_two_buckets() -> None:
    actual = _plan("mesh=a:2 placements=S0", "mesh=a:2 placements=R")
    busiest = max(cost.sent + cost.received for cost in traffic(actual).values())
    assert temporary_bytes(actual, 1 << 20) == busiest
    assert temporary_bytes(actual, 1000) == 2000
    assert "two buckets of 1000 B" in explain(actual, bucket_bytes=1000)
    assert "all-to-all collectives of a" in explain(actual, transport="collective")


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
