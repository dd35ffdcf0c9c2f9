"""The `.metadata` of a torch DCP checkpoint, as plain data.

It is a pickle. Invariant: reading it makes objects of DCP's own plain classes only, and a file that
names anything else is refused before that is made; what it says lies within its files and tensors.
Layer: above redistribute.
"""

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint
from torchtitan_lite.redistribute.box import Box, make_up

METADATA = ".metadata"

_FILE = re.compile(r"[A-Za-z0-9_.\-]{1,200}\.distcp", re.ASCII)
_DTYPES = {str(value)[6:] for value in vars(torch).values() if isinstance(value, torch.dtype)}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def _path(*parts: str) -> str:
    """Stands in for a path, of which only the text is wanted."""
    return "/".join(parts)


_ALLOWED: Mapping[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "PurePosixPath"): _path,
    ("pathlib", "WindowsPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
    **{
        (kind.__module__, kind.__name__): kind
        for kind in (
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
            filesystem._StoragePrefix,
        )
    },
    **{("torch", name): getattr(torch, name) for name in _DTYPES},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None:
            raise CheckpointError(f"it names {module}.{name}, which is none of DCP's own classes")
        return found


@dataclass(frozen=True)
class Place:
    """Bytes of a file of the checkpoint."""

    file: str
    first: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the boxes that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, Place], ...]


@dataclass(frozen=True)
class DcpContents:
    """What a checkpoint holds, by name."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Place]
    """All that is no tensor."""


def read_contents(folder: Path) -> DcpContents:
    """Raises CheckpointError where `folder` is no DCP checkpoint or names what is not allowed, and
    DamagedCheckpoint where it contradicts itself or its files."""
    path = folder / METADATA
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder} is no torch DCP checkpoint, which holds a file {METADATA}: {error}"
        ) from None
    try:
        read = _Unpickler(io.BytesIO(raw)).load()
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is refused: {error}. Nothing of it was run. Take the checkpoint only from "
            "somebody you trust, and save it again by torch.distributed.checkpoint."
        ) from None
    except Exception as error:
        raise DamagedCheckpoint(f"{path} is damaged: {type(error).__name__}: {error}") from None
    try:
        return _checked(read, folder)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from None


def _checked(read: Any, folder: Path) -> DcpContents:
    if not isinstance(read, metadata.Metadata) or not isinstance(read.storage_data, dict):
        raise ValueError("it holds no metadata of files")
    sizes: dict[str, int] = {}
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Place] = {}
    for name, entry in read.state_dict_metadata.items():
        if isinstance(entry, metadata.BytesStorageMetadata):
            index = metadata.MetadataIndex(name)
            objects[name] = _place(read.storage_data[index], folder, sizes)
        else:
            tensors[name] = _tensor(name, entry, read.storage_data, folder, sizes)
    return DcpContents(tensors, objects)


def _tensor(
    name: str, entry: Any, places: Mapping[Any, Any], folder: Path, sizes: dict[str, int]
) -> StoredTensor:
    if not isinstance(entry, metadata.TensorStorageMetadata):
        raise ValueError(f"{name} is a {type(entry).__name__}")
    dtype, shape = entry.properties.dtype, _lengths(entry.size)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has dtype {dtype!r}")
    boxes: list[tuple[Box, Place]] = []
    for chunk in entry.chunks:
        box = Box(_lengths(chunk.offsets), _lengths(chunk.sizes))
        if box.is_empty:
            continue
        index = metadata.MetadataIndex(name, chunk.offsets)
        place = _place(places[index], folder, sizes)
        if place.length < prod(box.size) * dtype.itemsize:
            raise ValueError(f"{name} has {place.length} bytes for a box of size {box.size}")
        boxes.append((box, place))
    if not make_up(shape, [box for box, _ in boxes]):
        raise ValueError(f"the chunks of {name} do not make up its shape {list(shape)}")
    return StoredTensor(dtype, shape, tuple(boxes))


def _place(info: Any, folder: Path, sizes: dict[str, int]) -> Place:
    if not isinstance(info, filesystem._StorageInfo):
        raise ValueError(f"a place is a {type(info).__name__}")
    file, (first, length) = info.relative_path, _lengths((info.offset, info.length))
    # Such a name leads to no other folder.
    if not isinstance(file, str) or not _FILE.fullmatch(file):
        raise ValueError(f"{file!r} is no name of a data file")
    if info.transform_descriptors:
        raise ValueError(f"{file} is written through {info.transform_descriptors}")
    if file not in sizes:
        try:
            sizes[file] = (folder / file).stat().st_size
        except OSError as error:
            raise ValueError(f"it names {file}, which cannot be read: {error}") from None
    if first + length > sizes[file]:
        raise ValueError(f"{file} has {sizes[file]} bytes, not {first + length}")
    return Place(file, first, length)


def _lengths(values: Any) -> tuple[int, ...]:
    found = tuple(values)
    if any(type(value) is not int or not 0 <= value < 1 << 62 for value in found):
        raise ValueError(f"{found!r} are no lengths")
    return found
