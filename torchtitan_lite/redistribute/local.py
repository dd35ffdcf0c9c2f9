"""What this rank holds of a live tensor. Layer: above layout."""

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.errors import LayoutError, MeshError
from torchtitan_lite.redistribute.box import Box
from torchtitan_lite.redistribute.layout import Layout


def local_box(tensor: torch.Tensor) -> Box:
    """The box that this rank holds: all of a plain tensor, a part of a DTensor.

    Raises LayoutError where that is no single box.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    layout, coordinate = _layout(tensor)
    if layout.reduce_op is not None:
        raise LayoutError(
            f"{layout} of a tensor of shape {tuple(tensor.shape)} has contributions, not a box."
        )
    return layout.box(tensor.shape, coordinate)


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


def _layout(tensor: DTensor) -> tuple[Layout, tuple[int, ...]]:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(
            f"This rank is not in {tensor.device_mesh} and holds no part of the tensor."
        )
    return Layout.from_dtensor(tensor, strided="order"), coordinate
