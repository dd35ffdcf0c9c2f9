"""A torch DCP checkpoint, read one tensor at a time.

Invariant: torch's safe loader unpickles only tensors and plain values. The pickled `.metadata` may
create only DCP's own plain classes: a file that names anything else is rejected before it is
created, and its contents must lie within its files and tensors.
"""

import io
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from torchtitan_lite.core.errors import CheckpointError, DamagedCheckpoint
from torchtitan_lite.distributed.redistribute.planning.layout import Box, covers_exactly
from torchtitan_lite.distributed.torch_compat import private_dcp_classes

MODEL = "torchtitan_lite_model.json"
"""File beside the metadata with the exported model. torch ignores it."""
_MOST_MODEL_BYTES = 1 << 20
METADATA = ".metadata"
_FILE = re.compile(r"[A-Za-z0-9_.\-]{1,200}\.distcp", re.ASCII)
_DTYPES = {str(value)[6:] for value in vars(torch).values() if isinstance(value, torch.dtype)}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


@dataclass(frozen=True)
class DcpLocation:
    """Byte range in a file of the checkpoint."""

    file: str
    first: int
    length: int


@dataclass(frozen=True)
class DcpTensor:
    """A tensor and the boxes that cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, DcpLocation], ...]


@dataclass(frozen=True)
class DcpContents:
    """Contents of a checkpoint by name."""

    tensors: Mapping[str, DcpTensor]
    objects: Mapping[str, DcpLocation]
    """Everything that is not a tensor."""


class DcpFolder:
    """A DCP checkpoint. Raises as `read_contents` does."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.contents = read_contents(folder)

    def exported_model(self) -> Mapping[str, Any]:
        """Return family, flavor and dimensions of the model if this project wrote the folder, else
        an empty mapping: DCP records only shapes. Raises DamagedCheckpoint if they cannot be
        read."""
        path = self.path / MODEL
        try:
            with path.open("rb") as file:
                values = json.loads(file.read(_MOST_MODEL_BYTES))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise DamagedCheckpoint(f"{path} is not a JSON object.")
        return values

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor, assembled from its chunks: contiguous, on the CPU. Raises
        DamagedCheckpoint, with file and tensor, if a chunk contradicts the metadata."""
        about = self.contents.tensors[name]
        whole = torch.empty(about.shape, dtype=about.dtype)
        for box, place in about.boxes:
            part = self._load(name, place)
            fits = isinstance(part, torch.Tensor) and (
                part.dtype == about.dtype and tuple(part.shape) == box.size
            )
            if not fits:
                raise DamagedCheckpoint(
                    f"{self.path / place.file} is damaged: the part of {name} at {box.offset} is "
                    f"not a tensor of shape {list(box.size)} and {about.dtype}."
                )
            whole[box.slices] = part.detach()
        return whole

    def value(self, name: str) -> Any:
        """Return a plain non-tensor value. Raises DamagedCheckpoint if it is not plain."""
        return self._load(name, self.contents.objects[name])

    def _load(self, name: str, place: DcpLocation) -> Any:
        path = self.path / place.file
        try:
            with path.open("rb") as file:
                file.seek(place.first)
                raw = file.read(place.length)
            return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except Exception as error:
            # torch raises many types for bytes that are not a zip file, or hold disallowed objects.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DamagedCheckpoint(f"{path} is damaged at {name}: {reason}") from None


def _path(*parts: str) -> str:
    """Return a path as text, in place of the path object."""
    return "/".join(parts)


_PRIVATE = private_dcp_classes()
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
            *_PRIVATE.values(),
        )
    },
    **{("torch", name): getattr(torch, name) for name in _DTYPES},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module, name))
        if allowed is None:
            raise CheckpointError(f"it names {module}.{name}, which is not a class of DCP")
        return allowed


def read_contents(folder: Path) -> DcpContents:
    """Read and validate the metadata. Raises CheckpointError if `folder` is not a DCP checkpoint or
    names disallowed objects, and DamagedCheckpoint if it contradicts itself or its files."""
    path = folder / METADATA
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a torch DCP checkpoint, which has a file {METADATA}: {error}"
        ) from None
    try:
        read = _Unpickler(io.BytesIO(raw)).load()
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is rejected: {error}. None of it was run. Use checkpoints from trusted "
            "sources only, and save this one again with torch.distributed.checkpoint."
        ) from None
    except Exception as error:
        raise DamagedCheckpoint(f"{path} is damaged: {type(error).__name__}: {error}") from None
    try:
        return _checked(read, folder)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from None


def _checked(read: Any, folder: Path) -> DcpContents:
    if not isinstance(read, metadata.Metadata) or not isinstance(read.storage_data, dict):
        raise ValueError("it holds no file metadata")
    sizes: dict[str, int] = {}
    tensors: dict[str, DcpTensor] = {}
    objects: dict[str, DcpLocation] = {}
    for name, entry in read.state_dict_metadata.items():
        if isinstance(entry, metadata.BytesStorageMetadata):
            index = metadata.MetadataIndex(name)
            objects[name] = _place(read.storage_data[index], folder, sizes)
        else:
            tensors[name] = _tensor(name, entry, read.storage_data, folder, sizes)
    return DcpContents(tensors, objects)


def _tensor(
    name: str, entry: Any, places: Mapping[Any, Any], folder: Path, sizes: dict[str, int]
) -> DcpTensor:
    if not isinstance(entry, metadata.TensorStorageMetadata):
        raise ValueError(f"{name} is a {type(entry).__name__}")
    dtype, shape = entry.properties.dtype, _lengths(entry.size)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has dtype {dtype!r}")
    boxes: list[tuple[Box, DcpLocation]] = []
    for chunk in entry.chunks:
        box = Box(_lengths(chunk.offsets), _lengths(chunk.sizes))
        if box.is_empty:
            continue
        index = metadata.MetadataIndex(name, chunk.offsets)
        place = _place(places[index], folder, sizes)
        if place.length < prod(box.size) * dtype.itemsize:
            raise ValueError(f"{name} has {place.length} bytes for a box of size {box.size}")
        boxes.append((box, place))
    if not covers_exactly(shape, [box for box, _ in boxes]):
        raise ValueError(f"the chunks of {name} do not cover its shape {list(shape)}")
    return DcpTensor(dtype, shape, tuple(boxes))


def _place(info: Any, folder: Path, sizes: dict[str, int]) -> DcpLocation:
    if not isinstance(info, _PRIVATE["_StorageInfo"]):
        raise ValueError(f"a location is a {type(info).__name__}")
    file, (first, length) = info.relative_path, _lengths((info.offset, info.length))
    # Such a name cannot lead to another folder.
    if not isinstance(file, str) or not _FILE.fullmatch(file):
        raise ValueError(f"{file!r} is not the name of a data file")
    if info.transform_descriptors:
        raise ValueError(f"{file} is written through {info.transform_descriptors}")
    if file not in sizes:
        try:
            sizes[file] = (folder / file).stat().st_size
        except OSError as error:
            raise ValueError(f"it names {file}, which cannot be read: {error}") from None
    if first + length > sizes[file]:
        raise ValueError(f"{file} has {sizes[file]} bytes, not {first + length}")
    return DcpLocation(file, first, length)


def _lengths(values: Any) -> tuple[int, ...]:
    lengths = tuple(values)
    if any(type(value) is not int or not 0 <= value < 1 << 62 for value in lengths):
        raise ValueError(f"{lengths!r} are not sizes")
    return lengths
