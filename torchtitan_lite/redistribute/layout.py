"""Which holder has which boxes of a tensor: plain data, made without a process group.

Layer: above holder_mesh, placements, strided and cuts.

Invariant: a layout that exists is valid, and equal layouts whose dims are counted
from the front are written in one way.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute.box import Box
from torchtitan_lite.redistribute.cuts import Cut, intervals
from torchtitan_lite.redistribute.holder_mesh import Holder, HolderMesh
from torchtitan_lite.redistribute.placements import (
    check_order,
    check_placements,
    from_front,
    is_shard,
    joined_by,
    normalized,
    placement_text,
)
from torchtitan_lite.redistribute.strided import (
    ShardOrder,
    StridedReading,
    decode_strided,
    encode_strided,
)
from torchtitan_lite.torch_compat import (
    DTensorSpec,
    as_dtensor,
    is_strided_shard,
    shard_order_of,
    spec_of,
    split_factor,
)


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh of holders.

    `shard_order` tells, for a dim that several axes cut, in which order they do: the outermost
    first, by number. A dim that is not in it is cut in the order of the mesh. A strided shard
    among `placements` means what DTensor's documentation says, a stride; FSDP2 over TP means an
    order by it, see `from_dtensor`.

    Dims may be counted from the end; `plan` and `redistribute` count them from the front, as
    `with_num_dims` does.

    Raises LayoutError for placements that do not fit the mesh or each other.
    """

    mesh: HolderMesh
    placements: tuple[Placement, ...]
    shard_order: ShardOrder = ()

    def __init__(
        self,
        mesh: HolderMesh,
        placements: Sequence[Placement],
        shard_order: Mapping[int, Sequence[int]] | ShardOrder = (),
    ) -> None:
        order = dict(shard_order)
        check_placements(mesh, tuple(placements))
        written = tuple(map(normalized, placements, mesh.shape))
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "placements", written)
        check_order(written, order)
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
        # Another process has other hashes of strings.
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
        shard_order: Mapping[int, Sequence[int]] | ShardOrder = (),
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

    @staticmethod
    def alone(holder: Holder) -> "Layout":
        """One holder has all."""
        return Layout(HolderMesh((1,), (holder,)), [Replicate()])

    @staticmethod
    def cut_by_dims(shape: Sequence[int], holders: Sequence[Holder]) -> "Layout":
        """Axis k of an array of holders, of this shape, cuts dim k."""
        mesh = HolderMesh(tuple(shape), tuple(holders))
        return Layout(mesh, [Shard(dim) for dim in range(len(shape))])

    def held_by(self, holders: Sequence[Holder]) -> "Layout":
        """The same with other holders, each in the place of the one at its index."""
        return _held_by(self, tuple(holders))

    def with_num_dims(self, num_dims: int) -> "Layout":
        """The layout with all dims counted from the front of a tensor of `num_dims` dims. Raises
        LayoutError for a dim that it does not have."""
        placements = tuple(from_front(p, num_dims) for p in self.placements)
        if placements == self.placements:
            return self
        order = {dim % num_dims: axes for dim, axes in self.shard_order}
        return Layout(self.mesh, placements, order)

    def check(self, shape: Sequence[int]) -> None:
        """Raise LayoutError where a tensor of `shape` has too few dims to be cut so, or a dim is
        counted from the end."""
        for axis, placement in enumerate(self.placements):
            if is_shard(placement) and placement.dim < 0:
                raise LayoutError(
                    f"{self} counts dim {placement.dim} from the end. Use with_num_dims first."
                )
            if is_shard(placement) and placement.dim >= len(shape):
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
            if is_shard(placement) and size > 1:
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
                return joined_by(placement)
        return None

    def with_copies(self, ops: Collection[str]) -> "Layout":
        """The layout that has copies of the value where this one has contributions joined by one of
        `ops`; this one itself where there are none."""
        placements = tuple(
            Replicate() if isinstance(p, Partial) and p.reduce_op in ops else p
            for p in self.placements
        )
        if placements == self.placements:
            return self
        return Layout(self.mesh, placements, self.shard_order)

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
        """This rank's part as a DTensor of global `shape`, outside of autograd; another order of
        cuts is written as strided shards, as FSDP2 does. Raises LayoutError for a mesh of other
        ranks."""
        if HolderMesh.of(device_mesh) != self.mesh:
            raise LayoutError(f"{self} cannot be made a DTensor on {HolderMesh.of(device_mesh)}.")
        return as_dtensor(local, device_mesh, self.dtensor_placements, torch.Size(shape))

    @cached_property
    def dtensor_placements(self) -> tuple[Placement, ...]:
        """The placements by which a DTensor says the same."""
        return encode_strided(self.mesh, self.placements, self.shard_order)


@lru_cache(maxsize=65536)
def _read(
    mesh: HolderMesh,
    placements: tuple[Placement, ...],
    order: ShardOrder,
    shape: tuple[int, ...],
    strided: StridedReading | None,
) -> Layout:
    as_stride = Layout(mesh, placements).with_num_dims(len(shape))
    if not any(is_strided_shard(placement) for placement in as_stride.placements):
        return Layout(mesh, as_stride.placements, order)
    found = decode_strided(mesh, as_stride.placements)
    decoded = None if found is None else Layout(mesh, *found)
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


def _same_boxes(one: Layout, other: Layout, shape: tuple[int, ...]) -> bool:
    return all(one.boxes(shape, h) == other.boxes(shape, h) for h in one.mesh.holders)


@lru_cache(maxsize=1024)
def _held_by(layout: Layout, holders: tuple[Holder, ...]) -> Layout:
    mesh = HolderMesh(layout.mesh.shape, holders, layout.mesh.axes)
    return Layout(mesh, layout.placements, layout.shard_order)
