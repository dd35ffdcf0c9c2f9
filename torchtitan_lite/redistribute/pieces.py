"""What holders do in a round of an exchange: pieces that they send, receive and copy.

Layer: above holder_mesh and cuts.
"""

from math import prod
from typing import Literal, NamedTuple

from torchtitan_lite.redistribute.cuts import Segments
from torchtitan_lite.redistribute.holder_mesh import Holder

RoundKind = Literal["move", "reduce", "spread"]


class Piece(NamedTuple):
    """Elements that one holder sends to another, or copies for itself.

    The segments of all dims make up a block, whose elements are counted in row-major order; the
    piece is [start, stop) of them.
    """

    peer: Holder
    segments: tuple[Segments, ...]
    """Per dim: (start in the source's part, start in the destination's part, length)."""
    start: int
    stop: int


class Part(NamedTuple):
    """What one holder does in a round. Between two holders there is at most one piece a round and
    unit; pieces of one pair follow each other in the same order on both sides."""

    sends: list[Piece]
    receives: list[Piece]
    copies: list[Piece]
    """From this holder's source to its own destination."""
    fills: list[Piece]
    """What is only received in a "reduce" round: it begins as nothing."""


def block_size(block: tuple[Segments, ...]) -> int:
    """Elements of a block."""
    size = 1
    for segments in block:
        size *= segments[0][2] if len(segments) == 1 else sum(s[2] for s in segments)
    return size


def row_size(block: tuple[Segments, ...]) -> int:
    """Elements of a row: all dims but the first that is longer than one."""
    lengths = [sum(s[2] for s in segments) for segments in block]
    while len(lengths) > 1 and lengths[0] == 1:
        lengths = lengths[1:]
    return prod(lengths[1:])
