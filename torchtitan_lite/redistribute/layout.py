"""Which rank holds which box of a tensor, by arithmetic. Layer: above errors and torch_compat.

Invariant: the boxes of the ranks that hold different parts of a tensor cover it exactly once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement, Shard

from torchtitan_lite.errors import MeshError
from torchtitan_lite.torch_compat import is_strided_shard


@dataclass(frozen=True)
class Box:
    """A block of a tensor: where it starts and how large it is, per dim."""

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


def box_of(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> Box:
    """The box of a tensor of `shape` that the rank at `coordinate` of the mesh holds.

    Plain shards are applied from the outermost axis in; each cuts what is left of its dim into
    equal parts of ceil(length / axis size), so that the last parts may be shorter or empty
    (`torch.chunk`). A strided shard is how FSDP marks that it cut what an inner axis (tp) had cut
    before, so those follow, from the innermost out.
    Raises MeshError for placements that are neither replicated nor shards.
    """
    offset, size = [0] * len(shape), list(shape)
    cuts = list(zip(mesh_shape, placements, coordinate, strict=True))
    plain = [cut for cut in cuts if not is_strided_shard(cut[1])]
    strided = [cut for cut in reversed(cuts) if is_strided_shard(cut[1])]
    for axis_size, placement, index in plain + strided:
        if placement.is_replicate():
            continue
        if not isinstance(placement, Shard) and not is_strided_shard(placement):
            raise MeshError(f"{placement} of a tensor of shape {tuple(shape)} has no plain box.")
        dim = placement.dim
        part = -(-size[dim] // axis_size)
        start = min(index * part, size[dim])
        offset[dim] += start
        size[dim] = min(part, size[dim] - start)
    return Box(tuple(offset), tuple(size))


def local_box(tensor: torch.Tensor) -> Box:
    """The box that this rank holds: all of a plain tensor, a part of a DTensor."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(f"This rank is not in {mesh} and holds no part of the tensor.")
    return box_of(tensor.shape, mesh.shape, tensor.placements, coordinate)


def is_first_holder(tensor: torch.Tensor, is_first_of_stage: bool) -> bool:
    """Whether this rank is the first of all ranks that hold the same box of `tensor`.

    A plain tensor is held whole by every rank of its stage of the pipeline, and the first of those
    is its first holder.
    """
    if not isinstance(tensor, DTensor):
        return is_first_of_stage
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and all(
        index == 0
        for index, placement in zip(coordinate, tensor.placements, strict=True)
        if placement.is_replicate()
    )
