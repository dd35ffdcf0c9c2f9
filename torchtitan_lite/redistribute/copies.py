"""Which of several holders of the same elements answers for them, as when each byte is written
once. Layer: above layout.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch.distributed.tensor import Replicate, Shard

from torchtitan_lite.redistribute.holder_mesh import Holder, HolderMesh
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.plan import plan
from torchtitan_lite.torch_compat import is_strided_shard

_ROWS_TO_SHARE = 8
"""Rows that each holder should have at least of a part that they share, so that shares differ
little."""


def without_copies(layout: Layout, shape: Sequence[int], number: int) -> Layout:
    """A layout in which every element has one holder, and each holder a run of what it has in
    `layout`: the holders of a part share its rows, or, of a part of few rows, one of them has it
    all; for each `number` of a tensor another one.

    Raises LayoutError where the layout does not fit the shape.
    """
    layout.check(shape)
    mesh = layout.mesh
    copied = [
        axis
        for axis, (size, placement) in enumerate(zip(mesh.shape, layout.placements, strict=True))
        if isinstance(placement, Replicate) and size > 1
    ]
    if not copied:
        return layout
    copies = prod(mesh.shape[axis] for axis in copied)
    first, *_ = mesh.holders
    rows = layout.local_shape(shape, first)[0] if len(shape) else 0
    if rows >= copies * _ROWS_TO_SHARE and not any(map(is_strided_shard, layout.placements)):
        before = dict(layout.shard_order).get(0) or tuple(
            axis for axis, p in enumerate(layout.placements) if isinstance(p, Shard) and p.dim == 0
        )
        placements = [Shard(0) if a in copied else p for a, p in enumerate(layout.placements)]
        return Layout(mesh, placements, {**dict(layout.shard_order), 0: (*before, *copied)})
    return _of_one_copy(layout, copied, number % copies)


def _of_one_copy(layout: Layout, copied: Sequence[int], number: int) -> Layout:
    """The layout on the holders of one copy only."""
    mesh, left = layout.mesh, number
    at = {}
    for axis in reversed(copied):
        left, at[axis] = divmod(left, mesh.shape[axis])
    kept = [axis for axis in range(len(mesh.shape)) if axis not in at]
    coordinate = [at.get(axis, 0) for axis in range(len(mesh.shape))]
    renumbered = {axis: place for place, axis in enumerate(kept)}
    return Layout(
        HolderMesh(
            tuple(mesh.shape[axis] for axis in kept),
            tuple(mesh.along(kept, coordinate)),
            tuple(mesh.axes[axis] for axis in kept),
        ),
        [layout.placements[axis] for axis in kept],
        {dim: tuple(renumbered[axis] for axis in axes) for dim, axes in layout.shard_order},
    )


def run_of(layout: Layout, once: Layout, shape: Sequence[int], holder: Holder) -> tuple[int, int]:
    """The elements of a holder's part in `layout`, as they follow each other in memory, that it has
    in `once`, which `without_copies` made of it: [start, stop)."""
    if once.mesh.place(holder) is None:
        return 0, 0
    (part,) = plan(layout, once, tuple(shape), torch.uint8).part(holder)
    for piece in part.copies:
        row = prod(layout.local_shape(shape, holder)[1:])
        start = piece.segments[0][0][0] * row if piece.segments else 0
        return start, start + piece.stop - piece.start
    return 0, 0
