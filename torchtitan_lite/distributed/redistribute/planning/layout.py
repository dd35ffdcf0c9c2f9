"""Layouts: which holder has which boxes of a tensor. Plain data; needs no process group.

Invariant: every `Layout` is valid, and equal layouts whose dims are counted from the front have one
representation.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchtitan_lite.core.errors import LayoutError, MeshError
from torchtitan_lite.distributed.redistribute.planning.partition import Split, intervals, partition
from torchtitan_lite.distributed.redistribute.planning.placements import (
    Holder,
    HolderMesh,
    ShardOrder,
    StridedReading,
    check_order,
    check_placements,
    decode_strided,
    encode_strided,
    is_shard,
    normalize,
    placement_text,
    reduce_op_of,
    with_nonnegative_dim,
)
from torchtitan_lite.distributed.torch_compat import (
    DTensorSpec,
    contiguous_spec,
    dtensor_spec_of,
    is_strided_shard,
    shard_order_of,
    split_factor,
    strided_shard,
    with_spec,
)


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: offset and size per dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.size

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the slices of the box in the entire tensor."""
        return tuple(
            slice(start, start + length)
            for start, length in zip(self.offset, self.size, strict=True)
        )


@dataclass(frozen=True)
class Layout:
    """How a tensor is distributed over a mesh of holders.

    `shard_order` gives, for a dim that several axes shard, their order, outermost first, by number.
    A dim that is not in it is sharded in the order of the mesh. A strided shard among `placements`
    is a stride, as documented by DTensor; FSDP2 over TP uses it to encode an order, see
    `from_dtensor`. Dims may be counted from the end; `plan` and `redistribute` count them from the
    front, as `with_num_dims` does. Raises LayoutError for placements that do not fit the mesh or
    each other.
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
        written = tuple(map(normalize, placements, mesh.shape))
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
    def from_device_mesh(
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shard_order: Mapping[int, Sequence[int]] | ShardOrder = (),
    ) -> "Layout":
        """Return a layout on the ranks of a DeviceMesh."""
        return Layout(HolderMesh.from_device_mesh(mesh), placements, shard_order)

    @staticmethod
    def from_dtensor(tensor: DTensor, *, strided: StridedReading | None = None) -> "Layout":
        """Return the layout of a DTensor.

        A strided shard can encode a stride or an order: FSDP2 marks by it that it sharded what an
        inner axis had sharded before, which for uneven lengths gives other boxes than a stride.
        `strided` selects the interpretation; without it, a strided shard whose interpretations
        differ is an error. Raises LayoutError for that, and for a strided shard that is not an
        order if "order" is requested.
        """
        return Layout.from_spec(dtensor_spec_of(tensor), strided=strided)

    @staticmethod
    def from_spec(spec: DTensorSpec, *, strided: StridedReading | None = None) -> "Layout":
        """Return the layout of a DTensor with `spec`; see `from_dtensor`."""
        mesh, order = HolderMesh.from_device_mesh(spec.mesh), shard_order_of(spec)
        return _read(mesh, spec.placements, order, tuple(spec.shape), strided)

    @staticmethod
    def from_placements(
        mesh: HolderMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        *,
        strided: StridedReading | None = None,
    ) -> "Layout":
        """Return the layout of a DTensor of `shape` with these placements; see `from_dtensor`."""
        return _read(mesh, tuple(placements), (), tuple(shape), strided)

    @staticmethod
    def on_holder(holder: Holder) -> "Layout":
        """Return the layout of a tensor on a single holder."""
        return Layout(HolderMesh((1,), (holder,)), [Replicate()])

    @staticmethod
    def sharded_by_dims(shape: Sequence[int], holders: Sequence[Holder]) -> "Layout":
        """Return the layout in which axis k of an array of holders, of this shape, shards dim k."""
        mesh = HolderMesh(tuple(shape), tuple(holders))
        return Layout(mesh, [Shard(dim) for dim in range(len(shape))])

    def with_holders(self, holders: Sequence[Holder]) -> "Layout":
        """Return the same layout with other holders, each in place of the one at its index."""
        return _held_by(self, tuple(holders))

    def with_num_dims(self, num_dims: int) -> "Layout":
        """Return the layout with all dims counted from the front of a tensor of `num_dims` dims.
        Raises LayoutError for a dim out of range."""
        placements = tuple(with_nonnegative_dim(p, num_dims) for p in self.placements)
        if placements == self.placements:
            return self
        order = {dim % num_dims: axes for dim, axes in self.shard_order}
        return Layout(self.mesh, placements, order)

    def check(self, shape: Sequence[int]) -> None:
        """Raise LayoutError if a tensor of `shape` has too few dims, or a dim is counted from the
        end."""
        for axis, placement in enumerate(self.placements):
            if is_shard(placement) and placement.dim < 0:
                raise LayoutError(
                    f"{self} counts dim {placement.dim} from the end. Use with_num_dims first."
                )
            if is_shard(placement) and placement.dim >= len(shape):
                raise LayoutError(
                    f"{self} shards dim {placement.dim} over {self.mesh.axes[axis]}, but a tensor "
                    f"of shape {tuple(shape)} has {len(shape)} dims."
                )

    @cached_property
    def splits(self) -> dict[int, tuple[Split, ...]]:
        """Return, per dim, the axes that shard it, outermost first. Axes of size 1 are omitted."""
        by_dim: dict[int, list[Split]] = {}
        for axis, (size, placement) in enumerate(
            zip(self.mesh.shape, self.placements, strict=True)
        ):
            if is_shard(placement) and size > 1:
                factor = split_factor(placement) if is_strided_shard(placement) else 1
                by_dim.setdefault(placement.dim, []).append(Split(axis, size, factor))
        for dim, axes in self.shard_order:
            by_dim[dim] = sorted(
                by_dim.get(dim, []), key=lambda split, axes=axes: axes.index(split.axis)
            )
        return {dim: tuple(splits) for dim, splits in by_dim.items() if splits}

    @property
    def partial_axes(self) -> tuple[int, ...]:
        """Return the axes over which each holder has a partial value of every element."""
        return tuple(axis for axis, p in enumerate(self.placements) if isinstance(p, Partial))

    @property
    def reduce_op(self) -> str | None:
        """Return the reduction of partial values, "sum" also for averages; None without any."""
        for placement in self.placements:
            if isinstance(placement, Partial):
                return reduce_op_of(placement)
        return None

    def with_replicas(self, ops: Collection[str]) -> "Layout":
        """Return the layout with replicas in place of partial values reduced by one of `ops`; this
        layout itself if there are none."""
        placements = tuple(
            Replicate() if isinstance(p, Partial) and p.reduce_op in ops else p
            for p in self.placements
        )
        if placements == self.placements:
            return self
        return Layout(self.mesh, placements, self.shard_order)

    def boxes(self, shape: Sequence[int], holder: Holder) -> list[Box]:
        """Return a holder's boxes of a tensor of `shape`, in the order of its storage; none for one
        that is not in the mesh. Empty boxes are omitted. Raises LayoutError if the shape does not
        fit."""
        self.check(shape)
        coordinate = self.mesh.coordinate(holder)
        if coordinate is None:
            return []
        per_dim = [
            intervals(length, self.splits.get(dim, ()), self.shard_index(dim, coordinate))
            for dim, length in enumerate(shape)
        ]
        return [
            Box(tuple(start for start, _ in box), tuple(size for _, size in box))
            for box in itertools.product(*per_dim)
        ]

    def of_element(self, shape: Sequence[int], index: int) -> "tuple[Layout, int]":
        """Return the layout of element `index` of dim 0 of a tensor of `shape`, on the holders that
        have a part of it, and the element's index in their shards. So each matrix of a stack has a
        layout of its own. Raises LayoutError if the shape does not fit."""
        return _of_element(self, tuple(shape), index)

    def box(self, shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        """Return the box of the holder at `coordinate`, possibly empty. Raises LayoutError if it
        has several."""
        self.check(shape)
        offset, size = [], []
        for dim, length in enumerate(shape):
            splits = self.splits.get(dim, ())
            pieces = intervals(length, splits, self.shard_index(dim, coordinate))
            if len(pieces) > 1:
                raise LayoutError(
                    f"{self} of a tensor of shape {tuple(shape)} gives the holder at "
                    f"{tuple(coordinate)} {len(pieces)} boxes, not one."
                )
            start, length = pieces[0] if pieces else (length, 0)
            offset.append(start)
            size.append(length)
        return Box(tuple(offset), tuple(size))

    def local_shape(self, shape: Sequence[int], holder: Holder) -> tuple[int, ...]:
        """Return the shape of a holder's shard; (0,) for one that is not in the mesh."""
        self.check(shape)
        coordinate = self.mesh.coordinate(holder)
        if coordinate is None:
            return (0,)
        return tuple(
            sum(
                size
                for _, size in intervals(
                    length, self.splits.get(dim, ()), self.shard_index(dim, coordinate)
                )
            )
            for dim, length in enumerate(shape)
        )

    def shard_index(self, dim: int, coordinate: Sequence[int]) -> int:
        """Return the shard index in `dim` of the holder at `coordinate`."""
        index = 0
        for split in sorted(self.splits.get(dim, ())):
            index = index * split.size + coordinate[split.axis]
        return index

    def to_dtensor(
        self, local: torch.Tensor, device_mesh: DeviceMesh, shape: Sequence[int]
    ) -> DTensor:
        """Build a DTensor of global `shape` from this rank's shard, outside of autograd. Raises
        LayoutError for a mesh of other ranks."""
        return with_spec(local, self.dtensor_spec(device_mesh, shape, local.dtype))

    def dtensor_spec(
        self, device_mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype
    ) -> DTensorSpec:
        """Return the spec of a contiguous DTensor of global `shape` in this layout; another order
        of axes is encoded as strided shards, as FSDP2 does. Raises LayoutError for a mesh of other
        ranks."""
        if HolderMesh.from_device_mesh(device_mesh) != self.mesh:
            raise LayoutError(
                f"{self} cannot be made a DTensor on {HolderMesh.from_device_mesh(device_mesh)}."
            )
        return contiguous_spec(device_mesh, self.dtensor_placements, torch.Size(shape), dtype)

    @cached_property
    def dtensor_placements(self) -> tuple[Placement, ...]:
        """Return the equivalent placements of a DTensor."""
        return encode_strided(self.mesh, self.placements, self.shard_order)


@dataclass(frozen=True)
class TensorSpec:
    """Layout, shape and dtype of a tensor."""

    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def from_dtensor(tensor: DTensor, strided: StridedReading | None = None) -> "TensorSpec":
        """Return the spec of a DTensor."""
        return TensorSpec.from_dtensor_spec(dtensor_spec_of(tensor), strided)

    @staticmethod
    def from_dtensor_spec(spec: DTensorSpec, strided: StridedReading | None = None) -> "TensorSpec":
        """Return the spec of a DTensor with `spec`."""
        meta = spec.tensor_meta
        assert meta is not None
        return TensorSpec(Layout.from_spec(spec, strided=strided), tuple(meta.shape), meta.dtype)


def local_box(tensor: torch.Tensor) -> Box:
    """Return this rank's box: all of a plain tensor, its shard of a DTensor. Raises LayoutError if
    the shard is not a single box."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    layout, coordinate = _layout(tensor)
    if layout.reduce_op is not None:
        raise LayoutError(
            f"{layout} of a tensor of shape {tuple(tensor.shape)} has contributions, not a box."
        )
    return layout.box(tensor.shape, coordinate)


def covers_exactly(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether `boxes` cover every element of a tensor of `shape` exactly once, and nothing else.
    Compares all pairs; a few thousand boxes are fast enough."""
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
    decoded_order = decode_strided(mesh, as_stride.placements)
    decoded = None if decoded_order is None else Layout(mesh, *decoded_order)
    if strided == "stride" or (decoded is None and strided is None):
        return as_stride
    if decoded is None:
        raise LayoutError(
            f"{as_stride} does not define a split order: no place in an order has its split "
            'factors as the number of parts before it. Read it with strided="stride".'
        )
    if strided is None and not _same_boxes(as_stride, decoded, shape):
        raise LayoutError(
            f"{as_stride} of a tensor of shape {shape} holds other boxes when its strided shard is "
            f'read as a split order ({decoded}). Pass strided="order" if FSDP2 created it, or '
            '"stride".'
        )
    return decoded


def _same_boxes(first: Layout, second: Layout, shape: tuple[int, ...]) -> bool:
    return all(first.boxes(shape, h) == second.boxes(shape, h) for h in first.mesh.holders)


@lru_cache(maxsize=1024)
def _held_by(layout: Layout, holders: tuple[Holder, ...]) -> Layout:
    mesh = HolderMesh(layout.mesh.shape, holders, layout.mesh.axes)
    return Layout(mesh, layout.placements, layout.shard_order)


@lru_cache(maxsize=65536)
def _of_element(layout: Layout, shape: tuple[int, ...], index: int) -> tuple[Layout, int]:
    layout.check(shape)
    if not shape or not 0 <= index < shape[0]:
        raise LayoutError(f"A tensor of shape {shape} has no element {index} of dim 0.")
    mesh, splits = layout.mesh, layout.splits.get(0, ())
    shards = partition(shape[0], splits)
    at = int(np.searchsorted(shards.starts, index, side="right")) - 1
    shard, local_index = int(shards.part[at]), int(shards.local[at] + index - shards.starts[at])
    fixed: dict[int, int] = {}
    for split in sorted(splits, reverse=True):
        shard, fixed[split.axis] = divmod(shard, split.size)
    # Axes of size 1 may shard dim 0, too.
    axes = range(len(layout.placements))
    free = [axis for axis, p in enumerate(layout.placements) if not (is_shard(p) and p.dim == 0)]
    held_by = HolderMesh(
        tuple(mesh.shape[axis] for axis in free),
        tuple(mesh.group_along(free, [fixed.get(axis, 0) for axis in axes])),
        tuple(mesh.axes[axis] for axis in free),
    )
    order = {dim - 1: [free.index(a) for a in by] for dim, by in layout.shard_order if dim}
    kept = [_one_dim_less(layout.placements[axis]) for axis in free]
    return Layout(held_by, kept, order), local_index


def _one_dim_less(placement: Placement) -> Placement:
    """Return the placement for a tensor without dim 0, which it does not shard."""
    if not is_shard(placement):
        return placement
    if is_strided_shard(placement):
        return strided_shard(placement.dim - 1, split_factor(placement))
    return Shard(placement.dim - 1)


def _layout(tensor: DTensor) -> tuple[Layout, tuple[int, ...]]:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(
            f"This rank is not in {tensor.device_mesh} and holds no shard of the tensor."
        )
    return Layout.from_dtensor(tensor, strided="order"), coordinate
