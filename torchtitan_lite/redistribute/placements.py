"""What an axis of a mesh does with a tensor: which placements there are, and which fit each other.

Layer: above holder_mesh.
"""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute.holder_mesh import HolderMesh
from torchtitan_lite.torch_compat import is_strided_shard, split_factor, strided_shard

LINEAR = ("sum", "avg")
"""Joins whose contributions each have a gradient."""

_OPS = (*LINEAR, "product", "min", "max")
_SAME_OP = {"prod": "product"}


def is_shard(placement: Placement) -> TypeGuard[Shard]:
    """Whether an axis cuts a dim, be it in strides."""
    return isinstance(placement, Shard) or is_strided_shard(placement)


def joined_by(placement: Partial) -> str:
    """What contributions are joined by, "sum" also for averages."""
    op = str(placement.reduce_op)
    return "sum" if op in LINEAR else _SAME_OP.get(op, op)


def normalized(placement: Placement, axis_size: int) -> Placement:
    """The one way in which a placement on an axis of this size is written: a strided shard whose
    stride changes nothing is a plain one, and "prod" is "product"."""
    if is_strided_shard(placement) and (split_factor(placement) == 1 or axis_size == 1):
        return Shard(placement.dim)
    if type(placement) is Partial and placement.reduce_op in _SAME_OP:
        return Partial(_SAME_OP[placement.reduce_op])
    return placement


def from_front(placement: Placement, num_dims: int) -> Placement:
    """The placement with its dim counted from the front of a tensor of `num_dims` dims."""
    if not is_shard(placement) or placement.dim >= 0:
        return placement
    if placement.dim < -num_dims:
        raise LayoutError(
            f"{placement} is not a dim of a tensor of {num_dims} dims. Use {-num_dims} to "
            f"{num_dims - 1}."
        )
    dim = placement.dim + num_dims
    if is_strided_shard(placement):
        return strided_shard(dim, split_factor(placement))
    return Shard(dim)


def placement_text(placement: Placement) -> str:
    """`R`, `S0`, `S0/2` for a strided shard of split factor 2, or `P(sum)`."""
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    if is_strided_shard(placement):
        return f"S{placement.dim}/{split_factor(placement)}"
    return f"S{placement.dim}" if isinstance(placement, Shard) else "R"


def check_placements(mesh: HolderMesh, placements: tuple[Placement, ...]) -> None:
    """Raise LayoutError for placements that do not fit the mesh or each other."""
    if len(placements) != len(mesh.shape):
        raise LayoutError(
            f"{len(placements)} placements {placements} were given for the {len(mesh.shape)} axes "
            f"of {mesh}. Give one an axis."
        )
    ops = []
    for placement in placements:
        if type(placement) is Partial:
            if joined_by(placement) not in _OPS:
                raise LayoutError(
                    f"{placement} is joined by {placement.reduce_op!r}; one of {', '.join(_OPS)} "
                    "is needed."
                )
            ops.append(joined_by(placement))
        elif is_shard(placement):
            if is_strided_shard(placement) and split_factor(placement) < 1:
                raise LayoutError(f"{placement} needs a split factor of at least 1.")
        elif not isinstance(placement, Replicate):
            raise LayoutError(
                f"{placement!r} is no layout of whole numbers of elements. Replicate, Shard, "
                "strided shards and Partial are."
            )
    if len(set(ops)) > 1:
        raise LayoutError(
            f"Contributions joined by {ops[0]} and by {next(op for op in ops if op != ops[0])} in "
            f"one layout have no order in which to join them: {placements} on {mesh}. Reduce the "
            "one before the other comes about."
        )


def check_order(placements: Sequence[Placement], order: Mapping[int, Sequence[int]]) -> None:
    """Raise LayoutError for an order of cuts that does not name the axes that cut a dim."""
    for dim, axes in order.items():
        cutting = [
            axis
            for axis, placement in enumerate(placements)
            if is_shard(placement) and placement.dim == dim
        ]
        if sorted(axes) != cutting:
            raise LayoutError(
                f"The order {tuple(axes)} of the cuts of dim {dim} must name the axes that cut it, "
                f"{tuple(cutting)} of {placements}, once each."
            )
        strided = [axis for axis in axes if is_strided_shard(placements[axis])]
        if strided:
            raise LayoutError(
                f"Dim {dim} has both an order of cuts, {tuple(axes)}, and "
                f"{placements[strided[0]]}. Use Shard with the order, or no order."
            )
