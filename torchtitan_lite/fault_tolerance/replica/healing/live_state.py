"""State of a run on one rank, as a safetensors file whose data are the live tensors."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchtitan_lite.checkpoint import DTYPE_NAMES, Checkpointable, local_tensors, tensor_bytes
from torchtitan_lite.checkpoint.storage import PartBox, safetensors_header
from torchtitan_lite.core import rng
from torchtitan_lite.core.errors import ReplicaError


class HealableState(Checkpointable, Protocol):
    """State that can be healed: all that a restart needs, with its position in the data."""

    cursor: int
    """Position in the global order of samples at which the next step starts."""


@dataclass(frozen=True)
class LiveState:
    """State that a rank serves to the same rank of another replica."""

    header: bytes
    parts: Sequence[torch.Tensor]
    """Contiguous tensors, in the order of the file."""

    @staticmethod
    def of(run: HealableState) -> "LiveState":
        """Return the current state without copying it: the tensors must not change while it is
        served."""
        tensors = run.tensors()
        parts = local_tensors(tensors)
        boxes = [
            PartBox(name, DTYPE_NAMES[part.dtype], tuple(part.shape), 0, part.nbytes)
            for name, part in parts.items()
        ]
        about = {
            "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
            "values": run.values(),
            "rng": rng.capture(),
        }
        header = safetensors_header(list(parts), boxes, {"state": json.dumps(about)})
        return LiveState(header, list(parts.values()))

    @property
    def length(self) -> int:
        return len(self.header) + sum(part.nbytes for part in self.parts)

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes from `start` to `stop`; tensors on a device are copied."""
        position = 0
        for piece in (self.header, *self.parts):
            length = len(piece) if isinstance(piece, bytes) else piece.nbytes
            first, last = max(start - position, 0), min(stop - position, length)
            if first < last:
                yield _bytes(piece, first, last)
            position += length


def _bytes(piece: bytes | torch.Tensor, first: int, last: int) -> memoryview:
    if isinstance(piece, bytes):
        return memoryview(piece)[first:last]
    if piece.device.type == "cpu":
        return tensor_bytes(piece)[first:last]
    # Copy only the requested bytes: the tensor may be large.
    return tensor_bytes(piece.reshape(-1).view(torch.uint8)[first:last])


def parse_header(content: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse the entries of the tensors and the remaining state. Raises ReplicaError."""
    try:
        entries = json.loads(content)
        about = json.loads(entries.pop("__metadata__")["state"])
        shapes, values, states = about["shapes"], about["values"], about["rng"]
        if not all(isinstance(table, dict) for table in (entries, shapes, values, states)):
            raise TypeError("a part is not an object")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ReplicaError(f"Another replica sent an invalid state: {error!r:.200}") from None
    return entries, about


def tensor_ranges(
    entries: Mapping[str, Any], parts: Mapping[str, torch.Tensor]
) -> list[tuple[str, int, int]]:
    """Return (name, start, stop) of each tensor in the data, in order. Raises ValueError if names,
    dtypes, shapes or offsets differ from those of `parts`."""
    ranges = []
    position = 0
    for name, entry in entries.items():
        if name not in parts or not isinstance(entry, dict):
            raise ValueError(f"{name} is not in the state of this replica.")
        part = parts[name]
        sent = (entry.get("dtype"), entry.get("shape"), entry.get("data_offsets"))
        end = position + part.nbytes
        wanted = (DTYPE_NAMES[part.dtype], list(part.shape), [position, end])
        if sent != wanted:
            raise ValueError(f"{name} is {sent}, but must be {wanted}.")
        ranges.append((name, position, end))
        position = end
    if missing := parts.keys() - entries.keys():
        raise ValueError(f"{min(missing)} is missing.")
    return ranges
