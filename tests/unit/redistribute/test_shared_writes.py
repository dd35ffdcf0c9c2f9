"""Rectangles that a rank writes into shared memory for others."""

from torchtitan_lite.redistribute.shared_memory_transport import _joined_writes, _SlotCopy


def write(columns: tuple[int, int], *, tensor: int = 0, offset: int = 0) -> _SlotCopy:
    """All 4 rows and some columns of a shard of 4 x 12 elements, which begins at column 100."""
    rows, inside = slice(0, 4), slice(*columns)
    region = slice(columns[0] + 100, columns[1] + 100)
    return _SlotCopy(0, tensor, (rows, region), offset, (4, 12), (rows, inside))


def test_what_several_ranks_read_of_each_row_is_written_at_once() -> None:
    assert _joined_writes([write((0, 3)), write((6, 9)), write((9, 12))]) == [write((0, 12))]


def test_few_elements_of_a_run_and_other_runs_are_written_apart() -> None:
    sparse = [write((0, 2)), write((10, 12))]
    assert _joined_writes(sparse) == sparse
    apart = [write((0, 6)), write((0, 6), tensor=1), write((0, 6), offset=48)]
    assert _joined_writes(apart) == apart
