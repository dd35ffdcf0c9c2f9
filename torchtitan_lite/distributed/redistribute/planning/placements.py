"""Meshes of holders, and the placements of a tensor on their axes.

A holder is a rank, or anything else that holds a shard of a tensor: a file, a snapshot, a peer
replica. DTensor has no public notation for the order in which mesh axes shard one dim. It encodes
the order as strided shards: the split factor of an axis is the number of shards into which later
axes of the mesh split the dim before it.
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, TypeGuard

import numpy as np
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_lite.core.errors import LayoutError
from torchtitan_lite.distributed.torch_compat import is_strided_shard, split_factor, strided_shard

Holder = Hashable
"""A rank, or the name of another holder."""


@dataclass(frozen=True)
class HolderMesh:
    """Holders in an array with named axes."""

    shape: tuple[int, ...]
    holders: tuple[Holder, ...]
    """Holders in array order, the last axis varying fastest."""
    axes: tuple[str, ...] = ()
    """Axis names; by default `axis0`, `axis1` and so on."""

    def __post_init__(self) -> None:
        if not self.axes:
            names = tuple(f"axis{axis}" for axis in range(len(self.shape)))
            object.__setattr__(self, "axes", names)
        if math.prod(self.shape) != len(self.holders) or any(size < 1 for size in self.shape):
            raise LayoutError(
                f"A mesh of shape {self.shape} needs {math.prod(self.shape)} holders, and "
                f"{len(self.holders)} were given."
            )
        if len(set(self.axes)) != len(self.axes) or len(self.axes) != len(self.shape):
            raise LayoutError(
                f"A mesh of shape {self.shape} needs {len(self.shape)} different axis names, and "
                f"{self.axes} were given."
            )
        counts = Counter(self.holders)
        if len(counts) != len(self.holders):
            twice = max(counts, key=counts.__getitem__)
            raise LayoutError(f"Holder {twice} is twice in the mesh {self}. List each once.")
        object.__setattr__(self, "_hash", hash((self.shape, self.holders, self.axes)))

    def __hash__(self) -> int:
        return self._hash  # pyright: ignore[reportAttributeAccessIssue]

    def __reduce__(self) -> tuple[object, ...]:
        # Another process has other hashes of strings.
        return HolderMesh, (self.shape, self.holders, self.axes)

    def __str__(self) -> str:
        sizes = " x ".join(f"{a} {n}" for a, n in zip(self.axes, self.shape, strict=True))
        if self.holders == tuple(range(len(self.holders))):
            return f"({sizes or 'one holder'})"
        shown = ", ".join(map(str, self.holders[:8])) + (", …" if len(self.holders) > 8 else "")
        return f"({sizes or 'one holder'} of {shown})"

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_device_mesh(mesh: DeviceMesh) -> "HolderMesh":
        """Return the ranks of a DeviceMesh."""
        return HolderMesh(
            tuple(mesh.mesh.shape),
            tuple(mesh.mesh.flatten().tolist()),
            tuple(mesh.mesh_dim_names or ()),
        )

    @staticmethod
    def ranks(*shape: int, first: int = 0) -> "HolderMesh":
        """Return a mesh of consecutive ranks from `first`."""
        return HolderMesh(shape, tuple(range(first, first + math.prod(shape))))

    @cached_property
    def _positions(self) -> dict[Holder, int]:
        return {holder: position for position, holder in enumerate(self.holders)}

    @cached_property
    def ranks_array(self) -> np.ndarray | None:
        """The holders as int64; None if some are not ranks."""
        if set(map(type, self.holders)) != {int}:
            return None
        return np.array(self.holders, np.int64)

    def position(self, holder: Holder) -> int | None:
        """Return a holder's index in `holders`; None if it is not among them."""
        return self._positions.get(holder)

    def at(self, coordinate: Sequence[int]) -> Holder:
        """Return the holder at the given index per axis."""
        position = 0
        for size, index in zip(self.shape, coordinate, strict=True):
            position = position * size + index
        return self.holders[position]

    def group_along(self, axes: Sequence[int], coordinate: Sequence[int]) -> list[Holder]:
        """Return the holders that differ from the one at `coordinate` along `axes` only, itself
        included; the first of `axes` varies slowest."""
        holders = []
        for moved in itertools.product(*(range(self.shape[axis]) for axis in axes)):
            index = dict(zip(axes, moved, strict=True))
            holders.append(self.at([index.get(axis, at) for axis, at in enumerate(coordinate)]))
        return holders

    def coordinate(self, holder: Holder) -> tuple[int, ...] | None:
        """Return a holder's index per axis; None if it is not in the mesh."""
        position = self.position(holder)
        if position is None:
            return None
        coordinate = []
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))


@dataclass(frozen=True)
class Nodes:
    """Assignment of ranks to nodes: equally many consecutive ranks per node."""

    ranks_per_node: int
    relay: bool = False
    """Send data that several holders of a node need to the node once."""

    def of(self, holder: Holder) -> Hashable:
        """Return the node of a holder; a holder that is not a rank is a node of its own."""
        return holder // self.ranks_per_node if isinstance(holder, int) else holder

    def node_indices(self, src: HolderMesh, dst: HolderMesh) -> tuple[np.ndarray, np.ndarray]:
        """Return the node of each holder of two meshes as nonnegative integers, int64."""
        if src.ranks_array is not None and dst.ranks_array is not None:
            return src.ranks_array // self.ranks_per_node, dst.ranks_array // self.ranks_per_node
        known: dict[Hashable, int] = {}

        def of(mesh: HolderMesh) -> np.ndarray:
            return np.array([known.setdefault(self.of(h), len(known)) for h in mesh.holders])

        first = of(src)
        return first, first if src == dst else of(dst)


_SUMS = ("sum", "avg")
_OPS = (*_SUMS, "product", "min", "max")
_SAME_OP = {"prod": "product"}


def is_shard(placement: Placement) -> TypeGuard[Shard]:
    """Whether an axis shards a dim, possibly strided."""
    return isinstance(placement, Shard) or is_strided_shard(placement)


def reduce_op_of(placement: Partial) -> str:
    """Return the reduction of contributions, "sum" also for averages."""
    op = str(placement.reduce_op)
    return "sum" if op in _SUMS else _SAME_OP.get(op, op)


def normalize(placement: Placement, axis_size: int) -> Placement:
    """Return the canonical form of a placement on an axis of this size: a strided shard without
    effect is a plain one, and "prod" is "product"."""
    if is_strided_shard(placement) and (split_factor(placement) == 1 or axis_size == 1):
        return Shard(placement.dim)
    if type(placement) is Partial and placement.reduce_op in _SAME_OP:
        return Partial(_SAME_OP[placement.reduce_op])
    return placement


def with_nonnegative_dim(placement: Placement, num_dims: int) -> Placement:
    """Return the placement with its dim counted from the front of a tensor of `num_dims` dims."""
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
    """Format as `R`, `S0`, `S0/2` for a strided shard of split factor 2, or `P(sum)`."""
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
            if reduce_op_of(placement) not in _OPS:
                raise LayoutError(
                    f"{placement} is joined by {placement.reduce_op!r}; one of {', '.join(_OPS)} "
                    "is needed."
                )
            ops.append(reduce_op_of(placement))
        elif is_shard(placement):
            if is_strided_shard(placement) and split_factor(placement) < 1:
                raise LayoutError(f"{placement} needs a split factor of at least 1.")
        elif not isinstance(placement, Replicate):
            raise LayoutError(
                f"{placement!r} does not place whole elements. Replicate, Shard, "
                "strided shards and Partial are."
            )
    if len(set(ops)) > 1:
        raise LayoutError(
            f"{placements} on {mesh} mixes partial values of two reductions, {ops[0]} and "
            f"{next(op for op in ops if op != ops[0])}, without an order. Reduce the one before "
            "the other arises."
        )


def check_order(placements: Sequence[Placement], order: Mapping[int, Sequence[int]]) -> None:
    """Raise LayoutError for an order that does not name exactly the axes that shard a dim."""
    for dim, axes in order.items():
        cutting = [
            axis
            for axis, placement in enumerate(placements)
            if is_shard(placement) and placement.dim == dim
        ]
        if sorted(axes) != cutting:
            raise LayoutError(
                f"The split order {tuple(axes)} of dim {dim} must name the axes that shard it, "
                f"{tuple(cutting)} of {placements}, once each."
            )
        strided = [axis for axis in axes if is_strided_shard(placements[axis])]
        if strided:
            raise LayoutError(
                f"Dim {dim} has both a split order, {tuple(axes)}, and "
                f"{placements[strided[0]]}. Use Shard with the order, or no order."
            )


StridedReading = Literal["stride", "order"]
"""How to interpret strided shards."""

ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]
"""(dim, the axes that shard it, outermost first) per dim."""


def encode_strided(
    mesh: HolderMesh, placements: Sequence[Placement], order: ShardOrder
) -> tuple[Placement, ...]:
    """Return placements that encode the order of axes as strided shards."""
    written = list(placements)
    for dim, axes in order:
        for position, axis in enumerate(axes):
            factor = math.prod(mesh.shape[before] for before in axes[:position] if before > axis)
            if factor > 1:
                written[axis] = strided_shard(dim, factor)
    return tuple(written)


def decode_strided(
    mesh: HolderMesh, placements: Sequence[Placement]
) -> tuple[tuple[Placement, ...], ShardOrder] | None:
    """Return the placements and the order that strided shards encode; None if they encode none.

    From the last axis to the first, each is inserted where the number of preceding shards equals
    its split factor, as DTensor encodes an order.
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
