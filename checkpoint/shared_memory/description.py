"""The description of a region by its trainer: enough to write the rank's part without torch.

Invariant: all offsets in a description lie within the slot.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.checkpoint.format import BYTES_PER_ELEMENT, FILE_NAME
from torchtitan_lite.core.errors import DamagedSnapshot

_TOKEN = re.compile(r"[0-9a-zA-Z]{1,64}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class FileBox:
    """One box of a tensor that a rank writes, and its location in the rank's slot."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    """Global shape of the tensor."""
    layout: int
    """Index into `file_layouts`."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    """First byte in the slot."""
    bytes: int


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """A tensor of which a rank holds a part, or all."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: int
    """Index into `layouts`."""
    local_shape: tuple[int, ...]
    offset: int
    """First byte of the local part in the slot."""
    bytes: int


@dataclass(frozen=True, kw_only=True)
class RegionDescription:
    """Contents of one rank's region."""

    run_id: str
    generation_id: str
    """Id of the generation that the rank belongs to; the token of the writer group for its share
    of the writes of several replicas."""
    rank: int
    world_size: int
    root: str
    is_leader: bool
    mesh: Mapping[str, int]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    layouts: tuple[Any, ...]
    tensors: tuple[HeldTensor, ...]
    file_layouts: tuple[Any, ...]
    file_name: str
    boxes: tuple[FileBox, ...]
    """In file order."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, slot_bytes: int) -> "RegionDescription":
        """Parse the form of `to_dict`.

        Raises DamagedSnapshot, with the field, if something is missing, has a wrong type, or lies
        outside of a slot of `slot_bytes`.
        """
        try:
            read = cls(
                run_id=_token(values["run_id"]),
                generation_id=_token(values["generation_id"]),
                rank=_size(values["rank"]),
                world_size=_size(values["world_size"]),
                root=_text(values["root"]),
                is_leader=bool(values["is_leader"]),
                mesh=dict(values["mesh"]),
                config=dict(values["config"]),
                versions=dict(values["versions"]),
                layouts=tuple(values["layouts"]),
                tensors=tuple(map(_tensor, values["tensors"])),
                file_layouts=tuple(values["file_layouts"]),
                file_name=_text(values["file"]["name"]),
                boxes=tuple(map(_box, values["file"]["boxes"])),
            )
            read._check(slot_bytes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedSnapshot(f"The description of a snapshot is invalid: {error!r}") from None
        return read

    def to_dict(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        return {
            "run_id": self.run_id,
            "generation_id": self.generation_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "root": self.root,
            "is_leader": self.is_leader,
            "mesh": dict(self.mesh),
            "config": dict(self.config),
            "versions": dict(self.versions),
            "layouts": list(self.layouts),
            "tensors": [_plain(tensor) for tensor in self.tensors],
            "file_layouts": list(self.file_layouts),
            "file": {"name": self.file_name, "boxes": [_plain(box) for box in self.boxes]},
        }

    def _check(self, slot_bytes: int) -> None:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")
        if not FILE_NAME.fullmatch(self.file_name):
            raise ValueError(f"file name {self.file_name!r}")
        for box in self.boxes:
            wanted = math.prod(box.size) * BYTES_PER_ELEMENT[box.dtype]
            inside = len(box.offset) == len(box.size) == len(box.shape) and all(
                first + size <= length
                for first, size, length in zip(box.offset, box.size, box.shape, strict=True)
            )
            if not inside or box.bytes != wanted or box.start + box.bytes > slot_bytes:
                raise ValueError(f"{box} in a slot of {slot_bytes} bytes")
            if box.layout >= len(self.file_layouts):
                raise ValueError(f"{box} with {len(self.file_layouts)} file layouts")
        for tensor in self.tensors:
            if tensor.offset + tensor.bytes > slot_bytes or tensor.layout >= len(self.layouts):
                raise ValueError(f"{tensor} in a slot of {slot_bytes} bytes")


def _tensor(values: Mapping[str, Any]) -> HeldTensor:
    return HeldTensor(
        name=_text(values["name"]),
        dtype=_text(values["dtype"]),
        shape=_sizes(values["shape"]),
        layout=_size(values["layout"]),
        local_shape=_sizes(values["local_shape"]),
        offset=_size(values["offset"]),
        bytes=_size(values["bytes"]),
    )


def _box(values: Mapping[str, Any]) -> FileBox:
    return FileBox(
        tensor=_text(values["tensor"]),
        dtype=_text(values["dtype"]),
        shape=_sizes(values["shape"]),
        layout=_size(values["layout"]),
        offset=_sizes(values["offset"]),
        size=_sizes(values["size"]),
        start=_size(values["start"]),
        bytes=_size(values["bytes"]),
    )


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a size")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    return tuple(map(_size, values))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value


def _token(value: Any) -> str:
    if not _TOKEN.fullmatch(_text(value)):
        raise ValueError(f"{value!r} is not an alphanumeric id")
    return value


def _plain(entry: HeldTensor | FileBox) -> dict[str, Any]:
    return {key: list(v) if isinstance(v, tuple) else v for key, v in vars(entry).items()}
