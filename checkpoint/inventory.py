"""What a rank holds of a training state, where it lies in a slot, and which of it this rank writes.

Under replication several ranks hold the same bytes; each byte is written by one of them.
Layer: above redistribute, mesh and dtypes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.dtypes import NAME_OF
from torchtitan_lite.checkpoint.file_names import file_name
from torchtitan_lite.checkpoint.memory.description import FileBox, HeldTensor
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.redistribute import Layout, Placed, layout_to_json
from torchtitan_lite.redistribute.copies import run_of, without_copies
from torchtitan_lite.redistribute.holder_mesh import Holder

_LARGE_BYTES = 1 << 16
_LARGE_MULTIPLE = 8
"""Any element may follow a large tensor, aligned as it must be."""


@dataclass(frozen=True)
class Inventory:
    """What this rank holds, in the order in which it lies in a slot and in its file: first the
    pool of large tensors, then that of small ones, packed together."""

    rank: int
    placed: Mapping[str, Placed]
    """On the ranks of the stage."""
    local_shapes: Mapping[str, tuple[int, ...]]
    starts: Mapping[str, int]
    """First byte of each part in a slot."""
    slot_bytes: int
    layouts: Sequence[Layout]
    file_layouts: Sequence[Layout]
    boxes: Sequence[FileBox]
    """That this rank writes, in the order of the slot."""

    @property
    def file_name(self) -> str:
        return file_name(self.rank)

    def held(self) -> tuple[HeldTensor, ...]:
        """As a region describes it."""
        return tuple(
            HeldTensor(
                name=name,
                dtype=NAME_OF[placed.dtype],
                shape=placed.shape,
                layout=self.layouts.index(placed.layout),
                local_shape=self.local_shapes[name],
                offset=self.starts[name],
                bytes=prod(self.local_shapes[name]) * placed.dtype.itemsize,
            )
            for name, placed in self.placed.items()
        )


def local_parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's parts of `tensors`, contiguous: its memory, where that is contiguous itself."""
    with torch.no_grad():
        return {name: _local(tensor).detach().contiguous() for name, tensor in tensors.items()}


def put_back(tensors: Mapping[str, torch.Tensor], parts: Mapping[str, torch.Tensor]) -> None:
    """Give `tensors` what was written into their `parts`, where those are not their memory."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            own = _local(tensor)
            if own.data_ptr() != parts[name].data_ptr():
                own.copy_(parts[name])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def take_inventory(tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> Inventory:
    """Of what this rank holds. Every rank of a stage has the same names in the same order.

    Raises CheckpointError for a dtype that safetensors does not know.
    """
    placed = {name: Placed.of(mesh.placed(tensor), "order") for name, tensor in tensors.items()}
    shapes = {name: p.layout.local_shape(p.shape, mesh.rank) for name, p in placed.items()}
    for name, found in placed.items():
        if found.dtype not in NAME_OF:
            raise CheckpointError(f"{name} is of {found.dtype}, which safetensors cannot hold.")
    starts: dict[str, int] = {}
    position = 0
    for name in sorted(placed, key=lambda name: _place(placed[name], shapes[name])):
        starts[name] = position
        position += prod(shapes[name]) * placed[name].dtype.itemsize
    boxes, file_layouts = _boxes(placed, starts, mesh.rank)
    return Inventory(
        rank=mesh.rank,
        placed=placed,
        local_shapes=shapes,
        starts=starts,
        slot_bytes=position,
        layouts=list(dict.fromkeys(p.layout for p in placed.values())),
        file_layouts=file_layouts,
        boxes=sorted(boxes, key=lambda box: (box.start, box.tensor)),
    )


def _is_large(placed: Placed, shape: tuple[int, ...]) -> bool:
    size = prod(shape) * placed.dtype.itemsize
    return size >= _LARGE_BYTES and size % _LARGE_MULTIPLE == 0


def _place(placed: Placed, shape: tuple[int, ...]) -> tuple[bool, int]:
    """Large ones first, then by the width of an element, so that all are aligned."""
    return not _is_large(placed, shape), -placed.dtype.itemsize


def _boxes(
    placed: Mapping[str, Placed], starts: Mapping[str, int], rank: int
) -> tuple[list[FileBox], list[Layout]]:
    """What this rank writes of each tensor, and how the files hold it together."""
    boxes: list[FileBox] = []
    numbers: dict[Layout, int] = {}
    for number, (name, found) in enumerate(placed.items()):
        once = without_copies(found.layout, found.shape, number)
        in_files = once.held_by([_file_of(rank) for rank in once.mesh.holders])
        place = numbers.setdefault(in_files, len(numbers))
        coordinate = once.mesh.coordinate(rank)
        if coordinate is None:
            continue
        box = once.box(found.shape, coordinate)
        start, stop = run_of(found.layout, once, found.shape, rank)
        width = found.dtype.itemsize
        boxes.append(
            FileBox(
                tensor=name,
                dtype=NAME_OF[found.dtype],
                shape=found.shape,
                layout=place,
                offset=box.offset,
                size=box.size,
                start=starts[name] + start * width,
                bytes=(stop - start) * width,
            )
        )
    return [box for box in boxes if box.bytes], list(numbers)


def _file_of(rank: Holder) -> Holder:
    assert isinstance(rank, int)
    return file_name(rank)


def layouts_json(layouts: Sequence[Layout]) -> tuple[dict[str, object], ...]:
    """For a description."""
    return tuple(layout_to_json(layout) for layout in layouts)
