"""The state of a run as one rank holds it: one safetensors file that lies in memory in pieces.
Layer: above checkpoint."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchtitan_lite import rng
from torchtitan_lite.checkpoint.dtypes import NAME_OF
from torchtitan_lite.checkpoint.inventory import local_parts
from torchtitan_lite.checkpoint.state import State
from torchtitan_lite.checkpoint.storage.part_file import PartBox, header_of
from torchtitan_lite.checkpoint.tensor_bytes import bytes_of
from torchtitan_lite.errors import ReplicaError


class Run(State, Protocol):
    """All that a restart needs, and how far it is."""

    cursor: int
    """Place in the global order of samples at which the next step begins."""


@dataclass(frozen=True)
class LiveState:
    """What a rank of one replica gives to its peer in another."""

    header: bytes
    parts: Sequence[torch.Tensor]
    """Contiguous, in the order of the file."""

    @staticmethod
    def of(run: Run) -> "LiveState":
        """The state as it is: its memory, which must not change while it is given."""
        tensors = run.tensors()
        parts = local_parts(tensors)
        boxes = [
            PartBox(name, NAME_OF[part.dtype], tuple(part.shape), 0, part.nbytes)
            for name, part in parts.items()
        ]
        about = {
            "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
            "values": run.values(),
            "rng": rng.capture(),
        }
        header = header_of(list(parts), boxes, {"state": json.dumps(about)})
        return LiveState(header, list(parts.values()))

    @property
    def length(self) -> int:
        return len(self.header) + sum(part.nbytes for part in self.parts)

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes from `start` to `stop`; from a device a copy of them."""
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
        return bytes_of(piece)[first:last]
    # Only what is asked for: a whole tensor may be large.
    return bytes_of(piece.reshape(-1).view(torch.uint8)[first:last])


def parse_header(content: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors' entries, and what else the state holds. Raises ReplicaError."""
    try:
        entries = json.loads(content)
        about = json.loads(entries.pop("__metadata__")["state"])
        shapes, values, states = about["shapes"], about["values"], about["rng"]
        if not all(isinstance(one, dict) for one in (entries, shapes, values, states)):
            raise TypeError("a part is no object")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ReplicaError(f"What another replica gives is no state: {error!r:.200}") from None
    return entries, about


def places(
    entries: Mapping[str, Any], parts: Mapping[str, torch.Tensor]
) -> list[tuple[str, int, int]]:
    """(name, first byte, end) of each tensor in the data, in order. Raises ValueError where they
    are not those of `parts`, byte by byte and without a gap."""
    found = []
    position = 0
    for name, entry in entries.items():
        if name not in parts or not isinstance(entry, dict):
            raise ValueError(f"{name} has no place here.")
        part = parts[name]
        given = (entry.get("dtype"), entry.get("shape"), entry.get("data_offsets"))
        end = position + part.nbytes
        wanted = (NAME_OF[part.dtype], list(part.shape), [position, end])
        if given != wanted:
            raise ValueError(f"{name} is {given}, and {wanted} is wanted.")
        found.append((name, position, end))
        position = end
    if missing := parts.keys() - entries.keys():
        raise ValueError(f"{min(missing)} is not there.")
    return found
