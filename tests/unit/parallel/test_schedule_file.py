"""Pipeline schedules from a file: what is parsed, and the error for each mistake."""

from pathlib import Path

import pytest

from tests.unit.parallel.test_step_order import plan_of
from torchtitan_lite.core.errors import MeshError
from torchtitan_lite.parallel.pipeline_order import parse_order, read_order
from torchtitan_lite.parallel.pipeline_stages import step_order

TWO_RANKS = "0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


def test_cells_rows_and_ranks() -> None:
    order = parse_order(" 0F0 ,0F1,,0B0,0B1\r\n,1F0,1I0,1F1,1I1,1W0,1W1\r\n\r\n", 2)
    assert order.cells() == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"],
    ]
    assert order.ranks == (0, 1)
    assert order.num_microbatches == 2


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_torch_schedules_survive_a_round_trip(schedule: str) -> None:
    order = step_order(plan_of(schedule.lower(), 2), schedule, 8)
    assert parse_order("\n".join(map(",".join, order.cells())), 2) == order


def test_two_actions_in_a_cell_run_one_after_the_other() -> None:
    overlapped = parse_order("0F0,(0F1;0B0)OVERLAP_F_B,0B1", 1)
    assert overlapped == parse_order("0F0,0F1,0B0,0B1", 1)


def _microbatches(first: int, end: int) -> str:
    """Return a file that runs microbatches [first, end) through two stages."""
    return "\n".join(
        ",".join(f"{stage}F{m},{stage}B{m}" for m in range(first, end)) for stage in (0, 1)
    )


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("0F0,0B0", "1 row, needed one for each rank of pipeline_parallel_degree = 2."),
        (TWO_RANKS + "2F0", "3 rows, needed one for each rank"),
        ("0F0,0B0\n1F0,1X0", 'row 2, column 2: "1X0" is not an action. Needed: stage, one of'),
        ("0F0,0B0\n1F0,1REDUCE_GRAD", 'row 2, column 2: "1REDUCE_GRAD" is not an action.'),
        ("0F0,0B0\n1F0,(1B0)OVERLAP_F_B", 'row 2, column 2: "(1B0)OVERLAP_F_B" is not'),
        ("0F0,0B0\n1F0,-1B0", 'row 2, column 2: "-1B0" is not'),
        ('0F0,0B0\n"1F0,1B0', "is not a table with commas"),
        ("0F0,0B0,1F0,1B0\n,", "row 2 has no action"),
        ("0F0,0B0,1F0\n1B0", "stage 1 is in row 1 and, as 1B0, in row 2"),
        ("0F0,0B0\n2F0,2B0", "stages must be 0 to n-1, and there is 0, 2, but not 1."),
        ("0F1,0B1\n1F1,1B1", "microbatches must be 0 to m-1, and there is 1, but not 0."),
        ("0F0,0B0,0F2,0B2\n1F0,1B0", "and there is 0, 2, but not 1."),
        (_microbatches(1, 11), "there is 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, but not 0."),
        (_microbatches(1, 12), "there is 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ..., but not 0."),
        ("0F0,0B0\n1B0", "stage 1, microbatch 0: 1F0 stands there 0 times, needed once."),
        ("0F0,0B0,0F0\n1F0,1B0", "stage 0, microbatch 0: 0F0 stands there 2 times"),
        ("0F0\n1F0,1B0", "0B0 0 times, 0I0 0 times, 0W0 0 times. Needed: B once, or I and W once"),
        ("0F0,0B0,0I0,0W0\n1F0,1B0", "stage 0, microbatch 0: 0B0 1 times, 0I0 1 times"),
        ("0F0,0I0\n1F0,1B0", "0I0 1 times, 0W0 0 times"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0", "stage 1, microbatch 1: 1F1 stands there 0 times"),
        ("0B0,0F0\n1F0,1B0", "row 1: 0B0 stands before 0F0, which it needs."),
        ("0F0,0W0,0I0\n1F0,1B0", "row 1: 0W0 stands before 0I0, which it needs."),
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1", "row 2: 1F1 stands where 1F0 is needed"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "rank 0 stops before 0B0, because it needs the backward of microbatch 0 through stage "
            "1; rank 1 stops before 1F1, because it needs the forward of microbatch 1 through "
            "stage 0.",
        ),
    ],
)
def test_each_mistake_is_named(text: str, needed: str) -> None:
    with pytest.raises(MeshError) as error:
        parse_order(text, 2)
    assert needed in str(error.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeshError) as error:
        read_order("no/order.csv", 2)
    key = "parallelism.pipeline_parallel_schedule_csv"
    assert str(error.value) == f'{key} = "no/order.csv": does not exist below {Path.cwd()}.'
    with pytest.raises(MeshError, match="cannot be read"):
        read_order(str(tmp_path), 2)
    file = tmp_path / "order.csv"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(MeshError, match="is not a text file in UTF-8"):
        read_order(str(file), 2)
    file.write_text("0F0")
    with pytest.raises(MeshError, match=r'order\.csv": 1 row, needed one for each rank'):
        read_order(str(file), 2)
    file.write_bytes(b"\xef\xbb\xbf" + TWO_RANKS.encode())
    assert read_order(str(file), 2) == parse_order(TWO_RANKS, 2)
