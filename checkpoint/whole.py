"""Whole tensors: read out of any snapshot, and written into files of their own.

Layer: above snapshots.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchtitan_lite.checkpoint.snapshots import Snapshot
from torchtitan_lite.checkpoint.storage.manifest_json import box_entry
from torchtitan_lite.checkpoint.storage.part_file import PartBox, Written
from torchtitan_lite.checkpoint.tensor_bytes import bytes_of, overflows
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.redistribute import Layout, layout_to_json
from torchtitan_lite.redistribute.acting import Taking, take

_HERE = Layout.alone(0)
_PIECE_BYTES = 8 << 20
_taking = threading.Lock()


def whole(source: Snapshot, name: str) -> torch.Tensor:
    """All of a tensor, put together from what its holders have. By any thread."""
    placed = source.tensors[name]
    holders = placed.layout.mesh.holders
    tensor = torch.empty(placed.shape, dtype=placed.dtype)
    if len(holders) == 1:
        source.read_part(name, holders[0], tensor)
        return tensor
    parts = {}
    for holder in holders:
        # Not mapped: what is mapped stays in memory as long as its file.
        shape = placed.layout.local_shape(placed.shape, holder)
        parts[holder] = torch.empty(shape, dtype=placed.dtype)
        source.read_part(name, holder, parts[holder])
    taking = Taking(placed.layout, _HERE, placed.shape, placed.dtype, dict.fromkeys(holders, 0))
    with _taking:
        take([taking], [parts], [tensor])
    return tensor


def cast_pieces(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor in another dtype, piece by piece. A piece is a copy, so that
    the tensor can go while the last one is being written. Raises as `cast` does."""
    elements = tensor.reshape(-1)
    step = _PIECE_BYTES // dtype.itemsize
    for first in range(0, len(elements), step):
        yield bytes_of(cast(name, elements[first : first + step], dtype, copy=True))


def cast(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, *, copy: bool = False
) -> torch.Tensor:
    """`tensor` in another dtype. Raises CheckpointError, which names it, where a number that is
    finite is too large for that (65,504 in float16)."""
    found = tensor.to(dtype, copy=copy)
    if overflows(tensor, found):
        raise CheckpointError(
            f"{name} has numbers that float16 cannot hold. Give --dtype bf16, or leave it out."
        )
    return found


def part_of_whole(
    step: int, number: int, file: str, boxes: Sequence[PartBox], written: Sequence[Written]
) -> dict[str, Any]:
    """What a manifest says of a file that holds tensors as a whole, the `number`-th of its step."""
    layout = layout_to_json(Layout.alone(file))
    tensors = {}
    for box, place in zip(boxes, written, strict=True):
        stored = box_entry([0] * len(box.size), box.size, file, place)
        tensors[box.name] = {
            "dtype": box.dtype,
            "shape": list(box.size),
            "layout": 0,
            "boxes": [stored] if math.prod(box.size) else [],
        }
    return {"rank": number, "step": step, "layouts": [layout], "tensors": tensors, "rng": {}}
