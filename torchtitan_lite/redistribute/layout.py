"""Which holder has which boxes of a tensor: plain data, made without a process group.

A holder is a rank, or anything else that can hold a part of a tensor: a file, a snapshot, a peer.
Layer: above errors and torch_compat.

Invariant: a layout that exists is valid, and equal layouts are written in one way.
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute.box import Box
from torchtitan_lite.redistribute.cuts import Cut, intervals
from torchtitan_lite.torch_compat import (
    DTensorSpec,
    as_dtensor,
    is_strided_shard,
    shard_order_of,
    spec_of,
    split_factor,
    strided_shard,
)

Holder = Hashable
"""A rank's number, or the name of whatever else holds a part."""

StridedReading = Literal["stride", "order"]

LINEAR = ("sum", "avg")
_OPS = (*LINEAR, "product", "min", "max")


@dataclass(frozen=True)
class HolderMesh:
    """Holders in an array with named axes."""

    shape: tuple[int, ...]
    holders: tuple[Holder, ...]
    """In the array's order, the last axis varying fastest."""
    axes: tuple[str, ...] = ()
    """Their names; `axis0`, `axis1` and so on where none are given."""

    def __post_init__(self) -> None:
        if not self.axes:
            names = tuple(f"axis{number}" for number in range(len(self.shape)))
            object.__setattr__(self, "axes", names)
        if math.prod(self.shape) != len(self.holders) or min(self.shape, default=1) < 1:
            raise LayoutError(
                f"A mesh of shape {self.shape} needs {math.prod(self.shape)} holders, and "
                f"{len(self.holders)} were given."
            )
        if len(set(self.holders)) != len(self.holders):
            twice, _ = Counter(self.holders).most_common(1)[0]
            raise LayoutError(f"Holder {twice} is twice in the mesh {self}. List each once.")
        if len(set(self.axes)) != len(self.axes) or len(self.axes) != len(self.shape):
            raise LayoutError(
                f"A mesh of shape {self.shape} needs {len(self.shape)} different axis names, and "
                f"{self.axes} were given."
            )
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
    def of(mesh: DeviceMesh) -> "HolderMesh":
        """The ranks of a DeviceMesh."""
        return HolderMesh(
            tuple(mesh.mesh.shape),
            tuple(mesh.mesh.flatten().tolist()),
            tuple(mesh.mesh_dim_names or ()),
        )

    @staticmethod
    def ranks(*shape: int, first: int = 0) -> "HolderMesh":
        """Consecutive ranks from `first` on."""
        return HolderMesh(shape, tuple(range(first, first + math.prod(shape))))

    @cached_property
    def _places(self) -> dict[Holder, int]:
        return {holder: place for place, holder in enumerate(self.holders)}

    def place(self, holder: Holder) -> int | None:
        """A holder's index in `holders`; None where it is not among them."""
        return self._places.get(holder)

    def at(self, coordinate: Sequence[int]) -> Holder:
        """The holder at an index on each axis."""
        place = 0
        for size, index in zip(self.shape, coordinate, strict=True):
            place = place * size + index
        return self.holders[place]

    def along(self, axes: Sequence[int], coordinate: Sequence[int]) -> list[Holder]:
        """The holders that differ from the one at `coordinate` along `axes` only, itself included;
        the first of `axes` varies slowest."""
        found = []
        for moved in itertools.product(*(range(self.shape[axis]) for axis in axes)):
            index = dict(zip(axes, moved, strict=True))
            found.append(self.at([index.get(axis, at) for axis, at in enumerate(coordinate)]))
        return found

    def coordinate(self, holder: Holder) -> tuple[int, ...] | None:
        """A holder's index on each axis; None where it is not in the mesh."""
        place = self.place(holder)
        if place is None:
            return None
        coordinate = []
        for size in reversed(self.shape):
            place, index = divmod(place, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh of holders.

    `shard_order` tells, for a dim that several axes cut, in which order they do: the outermost
    first, by number. A dim that is not in it is cut in the order of the mesh. A strided shard
    among `placements` means what DTensor's documentation says, a stride; FSDP2 over TP means an
    order by it, see `from_dtensor`.

    Raises LayoutError for placements that do not fit the mesh or each other.
    """

    mesh: HolderMesh
    placements: tuple[Placement, ...]
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __init__(
        self,
        mesh: HolderMesh,
        placements: Sequence[Placement],
        shard_order: Mapping[int, Sequence[int]] | tuple[tuple[int, tuple[int, ...]], ...] = (),
    ) -> None:
        order = dict(shard_order)
        written = tuple(
            Shard(p.dim) if is_strided_shard(p) and split_factor(p) == 1 else p for p in placements
        )
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "placements", written)
        _check_placements(mesh, written)
        _check_order(self, order)
        kept = tuple(
            (dim, tuple(order[dim]))
            for dim in sorted(order)
            if list(order[dim]) != sorted(order[dim])
        )
        object.__setattr__(self, "shard_order", kept)
        object.__setattr__(self, "_hash", hash((mesh, written, kept)))

    def __hash__(self) -> int:
        return self._hash  # pyright: ignore[reportAttributeAccessIssue]

    def __reduce__(self) -> tuple[object, ...]:
        # As for HolderMesh.
        return Layout, (self.mesh, self.placements, self.shard_order)

    def __str__(self) -> str:
        shown = []
        orders = dict(self.shard_order)
        for axis, placement in enumerate(self.placements):
            text = placement_text(placement)
            if isinstance(placement, Shard) and placement.dim in orders:
                text += f"#{orders[placement.dim].index(axis)}"
            shown.append(text)
        return f"[{', '.join(shown)}] on {self.mesh}"

    @staticmethod
    def from_mesh(
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shard_order: Mapping[int, Sequence[int]] | tuple[tuple[int, tuple[int, ...]], ...] = (),
    ) -> "Layout":
        """A layout on the ranks of a DeviceMesh."""
        return Layout(HolderMesh.of(mesh), placements, shard_order)

    @staticmethod
    def from_dtensor(tensor: DTensor, *, strided: StridedReading | None = None) -> "Layout":
        """The layout of a DTensor.

        A strided shard can be meant as a stride or as an order of cuts: FSDP2 marks by it that it
        cut what an inner axis had cut before, which for uneven lengths gives other boxes than a
        stride. `strided` says which; without it, one whose readings differ is refused.

        Raises LayoutError for that, and for a strided shard that is no order where "order" is
        asked for.
        """
        return Layout.from_spec(spec_of(tensor), strided=strided)

    @staticmethod
    def from_spec(spec: DTensorSpec, *, strided: StridedReading | None = None) -> "Layout":
        """The layout of a DTensor that `spec` describes; see `from_dtensor`."""
        mesh, order = HolderMesh.of(spec.mesh), shard_order_of(spec)
        return _read(mesh, spec.placements, order, tuple(spec.shape), strided)

    @staticmethod
    def from_placements(
        mesh: HolderMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        *,
        strided: StridedReading | None = None,
    ) -> "Layout":
        """The layout of a DTensor of `shape` that has these placements; see `from_dtensor`."""
        return _read(mesh, tuple(placements), (), tuple(shape), strided)

    def check(self, shape: Sequence[int]) -> None:
        """Raise LayoutError where a tensor of `shape` has too few dims to be cut so."""
        for axis, placement in enumerate(self.placements):
            if _is_shard(placement) and placement.dim >= len(shape):
                raise LayoutError(
                    f"{self} cuts dim {placement.dim} over {self.mesh.axes[axis]}, and a tensor of "
                    f"shape {tuple(shape)} has {len(shape)} dims."
                )

    @cached_property
    def cuts(self) -> dict[int, tuple[Cut, ...]]:
        """By dim, the axes that cut it, the outermost first. Axes of size 1 cut nothing."""
        found: dict[int, list[Cut]] = {}
        for axis, (size, placement) in enumerate(
            zip(self.mesh.shape, self.placements, strict=True)
        ):
            if _is_shard(placement) and size > 1:
                split = split_factor(placement) if is_strided_shard(placement) else 1
                found.setdefault(placement.dim, []).append(Cut(axis, size, split))
        for dim, axes in self.shard_order:
            found[dim] = sorted(found.get(dim, []), key=lambda cut, axes=axes: axes.index(cut.axis))
        return {dim: tuple(cuts) for dim, cuts in found.items() if cuts}

    @property
    def partial_axes(self) -> tuple[int, ...]:
        """Axes over which each holder has a contribution to every element."""
        return tuple(axis for axis, p in enumerate(self.placements) if isinstance(p, Partial))

    @property
    def reduce_op(self) -> str | None:
        """What contributions are joined by, "sum" also for averages; None without any."""
        for placement in self.placements:
            if isinstance(placement, Partial):
                return _joined_by(placement)
        return None

    def boxes(self, shape: Sequence[int], holder: Holder) -> list[Box]:
        """What a holder has of a tensor of `shape`, in the order of its storage; nothing for one
        that is not in the mesh. The box of an empty part is left out.

        Raises LayoutError where the shape does not fit.
        """
        self.check(shape)
        coordinate = self.mesh.coordinate(holder)
        if coordinate is None:
            return []
        per_dim = [
            intervals(length, self.cuts.get(dim, ()), self.part(dim, coordinate))
            for dim, length in enumerate(shape)
        ]
        return [
            Box(tuple(start for start, _ in box), tuple(size for _, size in box))
            for box in itertools.product(*per_dim)
        ]

    def box(self, shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        """What the holder at `coordinate` has, where that is one box, empty or not.

        Raises LayoutError where it is several.
        """
        self.check(shape)
        offset, size = [], []
        for dim, length in enumerate(shape):
            cuts = self.cuts.get(dim, ())
            found = intervals(length, cuts, self.part(dim, coordinate))
            if len(found) > 1:
                raise LayoutError(
                    f"{self} of a tensor of shape {tuple(shape)} gives the holder at "
                    f"{tuple(coordinate)} {len(found)} boxes, not one."
                )
            start, length = found[0] if found else (length, 0)
            offset.append(start)
            size.append(length)
        return Box(tuple(offset), tuple(size))

    def local_shape(self, shape: Sequence[int], holder: Holder) -> tuple[int, ...]:
        """The shape of a holder's part; (0,) for one that is not in the mesh."""
        self.check(shape)
        coordinate = self.mesh.coordinate(holder)
        if coordinate is None:
            return (0,)
        return tuple(
            sum(
                size
                for _, size in intervals(length, self.cuts.get(dim, ()), self.part(dim, coordinate))
            )
            for dim, length in enumerate(shape)
        )

    def largest_part(self, shape: Sequence[int]) -> int:
        """Elements of the largest part, which is that of the first holder."""
        return math.prod(self.local_shape(shape, self.mesh.holders[0]))

    def part(self, dim: int, coordinate: Sequence[int]) -> int:
        """The number of the part of `dim` that the holder at `coordinate` has."""
        number = 0
        for cut in sorted(self.cuts.get(dim, ())):
            number = number * cut.size + coordinate[cut.axis]
        return number

    def to_dtensor(
        self, local: torch.Tensor, device_mesh: DeviceMesh, shape: Sequence[int]
    ) -> DTensor:
        """This rank's part as a DTensor of global `shape`; another order of cuts is written as
        strided shards, as FSDP2 does. Raises LayoutError for a mesh of other ranks."""
        if HolderMesh.of(device_mesh) != self.mesh:
            raise LayoutError(f"{self} cannot be made a DTensor on {HolderMesh.of(device_mesh)}.")
        size = torch.Size(shape)
        if not local.requires_grad:
            return as_dtensor(local, device_mesh, self.dtensor_placements, size)
        stride = torch.empty(size, device="meta").stride()
        return DTensor.from_local(
            local, device_mesh, self.dtensor_placements, run_check=False, shape=size, stride=stride
        )

    @cached_property
    def dtensor_placements(self) -> tuple[Placement, ...]:
        """The placements by which a DTensor says the same."""
        placements = list(self.placements)
        for dim, axes in self.shard_order:
            for place, axis in enumerate(axes):
                factor = math.prod(
                    self.mesh.shape[before] for before in axes[:place] if before > axis
                )
                if factor > 1:
                    placements[axis] = strided_shard(dim, factor)
        return tuple(placements)


def _is_shard(placement: Placement) -> TypeGuard[Shard]:
    return isinstance(placement, Shard) or is_strided_shard(placement)


def _joined_by(placement: Partial) -> str:
    return "sum" if placement.reduce_op in LINEAR else placement.reduce_op


def placement_text(placement: Placement) -> str:
    """`R`, `S0`, `S0/2` for a strided shard of split factor 2, or `P(sum)`."""
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    if is_strided_shard(placement):
        return f"S{placement.dim}/{split_factor(placement)}"
    return f"S{placement.dim}" if isinstance(placement, Shard) else "R"


def _check_placements(mesh: HolderMesh, placements: tuple[Placement, ...]) -> None:
    if len(placements) != len(mesh.shape):
        raise LayoutError(
            f"{len(placements)} placements {placements} were given for the {len(mesh.shape)} axes "
            f"of {mesh}. Give one an axis."
        )
    ops = []
    for placement in placements:
        if type(placement) is Partial:
            if placement.reduce_op not in _OPS:
                raise LayoutError(
                    f"{placement} is joined by {placement.reduce_op!r}; one of {', '.join(_OPS)} "
                    "is needed."
                )
            ops.append(_joined_by(placement))
        elif _is_shard(placement):
            if placement.dim < 0:
                raise LayoutError(f"{placement} counts its dim from the end. Count from the front.")
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


def _check_order(layout: Layout, order: Mapping[int, Sequence[int]]) -> None:
    for dim, axes in order.items():
        cutting = [
            axis
            for axis, placement in enumerate(layout.placements)
            if _is_shard(placement) and placement.dim == dim
        ]
        if sorted(axes) != cutting:
            raise LayoutError(
                f"The order {tuple(axes)} of the cuts of dim {dim} must name the axes that cut it, "
                f"{tuple(cutting)} of {layout.placements}, once each."
            )
        strided = [axis for axis in axes if is_strided_shard(layout.placements[axis])]
        if strided:
            raise LayoutError(
                f"Dim {dim} has both an order of cuts, {tuple(axes)}, and "
                f"{layout.placements[strided[0]]}. Use Shard with the order, or no order."
            )


@lru_cache(maxsize=65536)
def _read(
    mesh: HolderMesh,
    placements: tuple[Placement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...],
    shape: tuple[int, ...],
    strided: StridedReading | None,
) -> Layout:
    if not any(is_strided_shard(placement) for placement in placements):
        return Layout(mesh, placements, order)
    as_stride = Layout(mesh, placements)
    decoded = decode_strided(mesh, placements)
    if strided == "stride" or (decoded is None and strided is None):
        return as_stride
    if decoded is None:
        raise LayoutError(
            f"{as_stride} does not say an order of cuts: no place in an order has its split "
            'factors as the number of parts before it. Read it with strided="stride".'
        )
    if strided is None and not _same_boxes(as_stride, decoded, shape):
        raise LayoutError(
            f"{as_stride} of a tensor of shape {shape} holds other boxes when its strided shard is "
            f'read as an order of cuts ({decoded}). Say strided="order" where FSDP2 made it, or '
            '"stride".'
        )
    return decoded


def decode_strided(mesh: HolderMesh, placements: Sequence[Placement]) -> Layout | None:
    """The layout in which strided shards are an order of cuts; None where they are none.

    From the last axis to the first, each is put where the parts before it are as many as its split
    factor: that is how DTensor writes an order.
    """
    orders: dict[int, list[int]] = {}
    plain = list(placements)
    for axis in reversed(range(len(plain))):
        placement = plain[axis]
        if not _is_shard(placement):
            continue
        factor = split_factor(placement) if is_strided_shard(placement) else 1
        order = orders.setdefault(placement.dim, [])
        before = [math.prod(mesh.shape[a] for a in order[:at]) for at in range(len(order) + 1)]
        if factor not in before:
            return None
        order.insert(before.index(factor), axis)
        plain[axis] = Shard(placement.dim)
    return Layout(mesh, plain, {dim: tuple(order) for dim, order in orders.items()})


def _same_boxes(one: Layout, other: Layout, shape: tuple[int, ...]) -> bool:
    return all(one.boxes(shape, h) == other.boxes(shape, h) for h in one.mesh.holders)
