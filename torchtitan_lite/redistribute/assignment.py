"""Which ranks shall hold a destination, where that is open.

Layer: above common_parts.

What a rank already has of what a place of the destination needs must not be sent; to choose a rank
for each place so that most stays is an assignment problem, which scipy solves.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.extras import require
from torchtitan_lite.redistribute.common_parts import CommonParts
from torchtitan_lite.redistribute.holder_mesh import Holder, HolderMesh
from torchtitan_lite.redistribute.layout import Layout


class Move(NamedTuple):
    """A tensor that is to move."""

    src: Layout
    dst: Layout
    """On a mesh whose holders are to be chosen; those that it has do not matter."""
    shape: tuple[int, ...]
    dtype: torch.dtype


def choose_holders(moves: Iterable[Move], candidates: Sequence[Holder]) -> HolderMesh:
    """The mesh of the destinations, which all have the same, with the candidates as holders that
    make the fewest bytes move. Of equally good ones the first in the order of `candidates`.

    Raises LayoutError where the destinations' meshes differ, or the candidates are too few.
    """
    require("scipy", "choose_holders")
    from scipy.optimize import linear_sum_assignment

    moves = list(moves)
    meshes = {move.dst.mesh for move in moves}
    if len(meshes) != 1:
        raise LayoutError(
            f"The destinations lie on {len(meshes)} meshes; one is needed to choose its holders."
        )
    (mesh,) = meshes
    if len(candidates) < len(mesh.holders):
        raise LayoutError(
            f"{mesh} needs {len(mesh.holders)} holders, and {len(candidates)} can be chosen."
        )
    kept_bytes = np.zeros((len(candidates), len(mesh.holders)))
    for move in moves:
        kept_bytes += _kept(move, candidates) * move.dtype.itemsize
    chosen, places = linear_sum_assignment(kept_bytes, maximize=True)
    by_place = dict(zip(places.tolist(), chosen.tolist(), strict=True))
    holders = tuple(candidates[by_place[place]] for place in range(len(mesh.holders)))
    return HolderMesh(mesh.shape, holders, mesh.axes)


def _kept(move: Move, candidates: Sequence[Holder]) -> np.ndarray:
    """Elements [candidate, place] that a candidate has of what a place needs."""
    src, dst = (layout.with_num_dims(len(move.shape)) for layout in (move.src, move.dst))
    parts = CommonParts(src, dst, move.shape)
    places = [parts.src.place(holder) for holder in candidates]
    holding = [number for number, place in enumerate(places) if place is not None]
    one = parts.src.part_of[np.array([places[number] for number in holding], np.int64)]
    other = parts.dst.part_of
    shape = len(one), len(other)
    pairs = [np.broadcast_to(a, shape).ravel() for a in (one[:, None], other[None, :])]
    kept = np.zeros((len(candidates), len(other)))
    kept[holding] = parts.elements(*pairs).reshape(shape)
    return kept
