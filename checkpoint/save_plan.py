"""The save plan of a rank: the tensors that it holds, their offsets in a slot, and the boxes that
it writes.

Replicated bytes are written by exactly one of the ranks that hold them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from torchtitan_lite.checkpoint.format import tensor_file_name
from torchtitan_lite.checkpoint.shared_memory.description import FileBox, HeldTensor
from torchtitan_lite.checkpoint.tensors import DTYPE_NAMES
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.redistribute import Layout, TensorSpec, layout_to_json
from torchtitan_lite.distributed.redistribute.execution.read_plan import deduplicate, element_range
from torchtitan_lite.distributed.redistribute.planning.placements import Holder

_LARGE_BYTES = 1 << 16
_LARGE_MULTIPLE = 8
"""Size granularity of large tensors, which keeps any tensor placed after one aligned."""


@dataclass(frozen=True)
class SavePlan:
    """Local tensors in the order of the slot and the file: large tensors first, then small ones,
    packed."""

    rank: int
    placed: Mapping[str, TensorSpec]
    """Global tensors on the ranks of the pipeline stage."""
    local_shapes: Mapping[str, tuple[int, ...]]
    starts: Mapping[str, int]
    """Byte offset of each local tensor in a slot."""
    slot_bytes: int
    layouts: Sequence[Layout]
    file_layouts: Sequence[Layout]
    boxes: Sequence[FileBox]
    """Boxes that this rank writes, in slot order."""

    @property
    def tensor_file_name(self) -> str:
        return tensor_file_name(self.rank)

    def held_tensors(self) -> tuple[HeldTensor, ...]:
        """Return the tensors as a region describes them."""
        return tuple(
            HeldTensor(
                name=name,
                dtype=DTYPE_NAMES[placed.dtype],
                shape=placed.shape,
                layout=self.layouts.index(placed.layout),
                local_shape=self.local_shapes[name],
                offset=self.starts[name],
                bytes=prod(self.local_shapes[name]) * placed.dtype.itemsize,
            )
            for name, placed in self.placed.items()
        )


def plan_save(
    tensors: Mapping[str, torch.Tensor], mesh: Mesh, dtype: torch.dtype | None = None
) -> SavePlan:
    """Plan the save of `tensors`, of floating-point ones as `dtype` if given. All ranks of a stage
    must pass the same names in the same order.

    Raises CheckpointError for a dtype that safetensors does not support.
    """
    placed = {
        name: TensorSpec.from_dtensor(mesh.to_dtensor(tensor), "order")
        for name, tensor in tensors.items()
    }
    if dtype is not None:
        placed = {
            name: replace(spec, dtype=dtype) if spec.dtype.is_floating_point else spec
            for name, spec in placed.items()
        }
    shapes = {name: p.layout.local_shape(p.shape, mesh.rank) for name, p in placed.items()}
    for name, spec in placed.items():
        if spec.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name}: safetensors does not support {spec.dtype}.")
    starts: dict[str, int] = {}
    position = 0
    for name in sorted(placed, key=lambda name: _place(placed[name], shapes[name])):
        starts[name] = position
        position += prod(shapes[name]) * placed[name].dtype.itemsize
    boxes, file_layouts = _boxes(placed, starts, mesh.rank)
    return SavePlan(
        rank=mesh.rank,
        placed=placed,
        local_shapes=shapes,
        starts=starts,
        slot_bytes=position,
        layouts=list(dict.fromkeys(p.layout for p in placed.values())),
        file_layouts=file_layouts,
        boxes=sorted(boxes, key=lambda box: (box.start, box.tensor)),
    )


def _is_large(placed: TensorSpec, shape: tuple[int, ...]) -> bool:
    size = prod(shape) * placed.dtype.itemsize
    return size >= _LARGE_BYTES and size % _LARGE_MULTIPLE == 0


def _place(placed: TensorSpec, shape: tuple[int, ...]) -> tuple[bool, int]:
    """Sort key: large tensors first, then by descending element width, which aligns all of them."""
    return not _is_large(placed, shape), -placed.dtype.itemsize


def _boxes(
    placed: Mapping[str, TensorSpec], starts: Mapping[str, int], rank: int
) -> tuple[list[FileBox], list[Layout]]:
    """Return the boxes that this rank writes, and the layouts over all files."""
    boxes: list[FileBox] = []
    numbers: dict[Layout, int] = {}
    for number, (name, spec) in enumerate(placed.items()):
        once = deduplicate(spec.layout, spec.shape, number)
        in_files = once.with_holders([_file_of(rank) for rank in once.mesh.holders])
        place = numbers.setdefault(in_files, len(numbers))
        coordinate = once.mesh.coordinate(rank)
        if coordinate is None:
            continue
        box = once.box(spec.shape, coordinate)
        start, stop = element_range(spec.layout, once, spec.shape, rank)
        width = spec.dtype.itemsize
        boxes.append(
            FileBox(
                tensor=name,
                dtype=DTYPE_NAMES[spec.dtype],
                shape=spec.shape,
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
    return tensor_file_name(rank)


def layouts_json(layouts: Sequence[Layout]) -> tuple[dict[str, object], ...]:
    """Return layouts as JSON, for a region's description."""
    return tuple(layout_to_json(layout) for layout in layouts)
