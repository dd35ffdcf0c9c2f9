"""A block of a tensor. Layer: imports nothing of the project."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Box:
    """Where a block starts and how large it is, per dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.size

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indices of the box in the whole tensor."""
        return tuple(
            slice(start, start + length)
            for start, length in zip(self.offset, self.size, strict=True)
        )


def make_up(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether every element of a tensor of `shape` is in exactly one of `boxes`, and these have
    nothing else. All pairs at once: a few thousand boxes are no trouble."""
    boxes = [box for box in boxes if not box.is_empty]
    if any(len(box.offset) != len(shape) or len(box.size) != len(shape) for box in boxes):
        return False
    if sum(math.prod(box.size) for box in boxes) != math.prod(shape):
        return False
    if not boxes or not shape:
        return True
    first = np.array([box.offset for box in boxes])
    end = first + np.array([box.size for box in boxes])
    if (end > np.array(shape)).any():
        return False
    pairs = (first[:, None] < end[None]) & (first[None] < end[:, None])
    return not np.triu(pairs.all(-1), k=1).any()
