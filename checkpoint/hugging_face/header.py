"""The header of a safetensors file that somebody else wrote, checked against the file's length.

Layer: above storage.
"""

import json
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from torchtitan_lite.checkpoint.dtypes import BY_NAME
from torchtitan_lite.checkpoint.storage.storage import Storage
from torchtitan_lite.errors import DamagedCheckpoint

_MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library accepts."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, and the bytes of the file that hold it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    end: int


def read_header(storage: Storage, path: str) -> dict[str, StoredTensor]:
    """The tensors of the file by name. Raises DamagedCheckpoint, naming the file, where it is no
    safetensors file, or is shorter or longer than its header says."""
    where = f"{storage.root}/{path}"
    try:
        length = storage.size(path)
        start = bytes(storage.read(path, 0, 8)) if length >= 8 else b""
        size = int.from_bytes(start, "little")
        if len(start) != 8 or size > min(length - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"its {length} bytes hold no header")
        table = json.loads(bytes(storage.read(path, 8, 8 + size)))
        if not isinstance(table, dict):
            raise ValueError("its header is no table")
        table.pop("__metadata__", None)
        tensors = {name: _tensor(name, entry, 8 + size) for name, entry in table.items()}
    except OSError as error:
        raise DamagedCheckpoint(f"{where} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where} is damaged: {error}.") from None
    position = 8 + size
    for name, tensor in sorted(tensors.items(), key=lambda one: (one[1].first, one[1].end)):
        if tensor.first != position:
            raise DamagedCheckpoint(
                f"{where} is damaged: {name} begins at byte {tensor.first}, and what lies before "
                f"it ends at {position}."
            )
        position = tensor.end
    if position != length:
        raise DamagedCheckpoint(
            f"{where} is damaged: by its header it has {position} bytes, but there are {length}. "
            "Download it again."
        )
    return tensors


def _tensor(name: str, entry: Any, start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise ValueError(f"{name!a:.200} is described by {entry!r:.100}")
    dtype = BY_NAME.get(str(entry.get("dtype")))
    shape, offsets = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if dtype is None or shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{name!a:.200} is described by {entry!r:.200}")
    first, end = offsets
    if end - first != prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!a:.200} of {shape} and {dtype} has {end - first} bytes")
    return StoredTensor(dtype, shape, start + first, start + end)


def _sizes(values: Any) -> tuple[int, ...] | None:
    """None for what are no lengths."""
    if not isinstance(values, list):
        return None
    if any(type(value) is not int or not 0 <= value < 1 << 62 for value in values):
        return None
    return tuple(values)
