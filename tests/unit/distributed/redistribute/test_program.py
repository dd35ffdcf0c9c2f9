"""Rectangles of parts of a transfer, compared with lists of elements."""

import itertools
from math import prod

import pytest

from torchtitan_lite.distributed.redistribute.execution.program import (
    intersect_span,
    rectangles,
    spans,
)


@pytest.mark.parametrize("lengths", [(), (5,), (3, 4), (2, 1, 3)])
def test_spans_are_consecutive_elements(lengths: tuple[int, ...]) -> None:
    elements = list(itertools.product(*map(range, lengths)))
    for start, stop in itertools.combinations_with_replacement(range(prod(lengths) + 1), 2):
        found = spans(lengths, start, stop)
        inside = [list(itertools.product(*(range(*dim) for dim in span))) for span in found]
        assert all(inside) and list(itertools.chain(*inside)) == elements[start:stop]


def test_rectangles_are_the_elements_of_a_part() -> None:
    ranges = (((4, 0, 2), (9, 2, 1)), ((0, 7, 1), (5, 3, 3)))
    per_dim = [
        [(src + n, dst + n) for src, dst, size in dim for n in range(size)] for dim in ranges
    ]
    elements = list(itertools.product(*per_dim))
    for start, stop in itertools.combinations(range(len(elements) + 1), 2):
        found = []
        for block in rectangles(ranges, start, stop):
            assert prod(block.shape) > 0
            for index in itertools.product(*map(range, block.shape)):
                places = zip(block.src, block.dst, index, strict=True)
                found.append(tuple((src + n, dst + n) for src, dst, n in places))
        assert sorted(found) == sorted(elements[start:stop])


def test_rectangles_that_only_touch_do_not_intersect() -> None:
    assert intersect_span((0, 2), (4, 3), ((1, 9), (0, 3))) == ([1, 2], [3, 1])
    assert intersect_span((0, 2), (4, 3), ((4, 9), (0, 3))) is None
    assert intersect_span((0, 2), (4, 3), ((1, 9), (0, 2))) is None
