"""Strided shards as the order in which axes cut a dim. Layer: above placements.

DTensor has no public word for an order of cuts. It writes one as strided shards: the split factor
of an axis is the number of parts into which later axes of the mesh had cut the dim before it.
"""

import math
from collections.abc import Sequence
from typing import Literal

from torch.distributed.tensor import Placement, Shard

from torchtitan_lite.redistribute.holder_mesh import HolderMesh
from torchtitan_lite.redistribute.placements import is_shard
from torchtitan_lite.torch_compat import is_strided_shard, split_factor, strided_shard

StridedReading = Literal["stride", "order"]
"""What is meant by strided shards."""

ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]
"""(dim, the axes that cut it, the outermost first) of each dim."""


def encode_strided(
    mesh: HolderMesh, placements: Sequence[Placement], order: ShardOrder
) -> tuple[Placement, ...]:
    """Placements that say by strided shards in which order axes cut."""
    written = list(placements)
    for dim, axes in order:
        for place, axis in enumerate(axes):
            factor = math.prod(mesh.shape[before] for before in axes[:place] if before > axis)
            if factor > 1:
                written[axis] = strided_shard(dim, factor)
    return tuple(written)


def decode_strided(
    mesh: HolderMesh, placements: Sequence[Placement]
) -> tuple[tuple[Placement, ...], ShardOrder] | None:
    """The placements and the order of cuts that strided shards mean; None where they mean none.

    From the last axis to the first, each is put where the parts before it are as many as its split
    factor: that is how DTensor writes an order.
    """
    if len(placements) != len(mesh.shape):
        return None
    orders: dict[int, list[int]] = {}
    plain = list(placements)
    for axis in reversed(range(len(plain))):
        placement = plain[axis]
        if not is_shard(placement):
            continue
        factor = split_factor(placement) if is_strided_shard(placement) else 1
        order = orders.setdefault(placement.dim, [])
        before = [math.prod(mesh.shape[a] for a in order[:at]) for at in range(len(order) + 1)]
        if factor not in before:
            return None
        order.insert(before.index(factor), axis)
        plain[axis] = Shard(placement.dim)
    return tuple(plain), tuple((dim, tuple(order)) for dim, order in orders.items())
