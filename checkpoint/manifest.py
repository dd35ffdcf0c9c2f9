"""The manifest of a checkpoint: its contents and their locations, as validated plain data.

A checkpoint is a folder `step-N` with one safetensors file per rank (in an object store below its
attempt's token) and `manifest.json`, which is written last: without it the checkpoint does not
exist. No entry can name a path outside of the folder, and validation takes time and memory linear
in its length.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from torchtitan_lite.checkpoint.format import (
    ATTEMPT_TOKEN,
    BYTES_PER_ELEMENT,
    FILE_NAME,
    FORMAT,
    MANIFEST,
    READ_VERSIONS,
    parse_step_name,
)
from torchtitan_lite.checkpoint.storage.attempts import checksum_matches, checksum_matches_v2
from torchtitan_lite.checkpoint.storage.base import Storage, read_error
from torchtitan_lite.core.errors import CheckpointError, DamagedCheckpoint, LayoutError
from torchtitan_lite.distributed.redistribute import Layout, layout_from_json

_MAX_AXES = 64
"""Maximum number of mesh axes and tensor dims."""
_LENGTH_BYTES = 8
"""Length field at the start of a safetensors file."""
_Size = Annotated[int, Field(ge=0, lt=1 << 62)]
_Sizes = Annotated[list[_Size], Field(max_length=_MAX_AXES)]
_FileName = Annotated[str, Field(pattern=rf"^{FILE_NAME.pattern}$")]
_DataName = Annotated[str, Field(pattern=rf"^{ATTEMPT_TOKEN.pattern}$")]


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"{name!a:.100} is not a printable name")
    return name


_Name = Annotated[str, AfterValidator(_printable)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class BoxEntry(_Entry):
    """One box of a tensor, and the bytes that hold it."""

    offset: _Sizes
    size: _Sizes
    file: _FileName
    bytes: tuple[_Size, _Size] = Field(strict=False)
    """First byte in the file, and one past the last."""
    xxh3: str


class TensorEntry(_Entry):
    """A tensor and the boxes that cover it."""

    dtype: str
    """Safetensors name: F32, BF16, ..."""
    shape: _Sizes
    layout: _Size
    """Index into the manifest's `layouts`."""
    boxes: list[BoxEntry]


class Manifest(_Entry):
    """A whole checkpoint."""

    format: Literal["torchtitan_lite.checkpoint"]
    version: int
    step: _Size
    model_only: bool
    mesh: dict[str, int]
    """Axis -> degree."""
    layouts: list[dict[str, Any]]
    """Layouts over files, without duplicates."""
    tensors: dict[_Name, TensorEntry]
    data: _DataName | None = None
    """Subfolder of the step's folder that holds the files; None if they are in the step's folder
    itself."""
    values: dict[str, Any]
    """Non-tensor state by part: train_state, lr_scheduler, dataloader."""
    rng: dict[str, dict[str, Any]]
    """Rank -> its RNG states."""
    config: dict[str, Any]
    versions: dict[str, str]
    xxh3: str
    """Checksum of everything before it."""

    @cached_property
    def boxes_by_file(self) -> dict[str, list[tuple[str, BoxEntry]]]:
        """File -> (tensor, box) of each box in it, in byte order."""
        by_file: dict[str, list[tuple[str, BoxEntry]]] = {}
        for name, tensor in self.tensors.items():
            for box in tensor.boxes:
                by_file.setdefault(box.file, []).append((name, box))
        return {
            file: sorted(boxes, key=lambda entry: (entry[1].bytes, entry[0]))
            for file, boxes in by_file.items()
        }

    def path(self, folder: str, file: str) -> str:
        """Return the path of `file` in the storage, for a manifest in `folder`."""
        return "/".join(part for part in (folder, self.data, file) if part is not None)


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Read the manifest of the checkpoint in `folder`.

    Raises DamagedCheckpoint if it is missing, invalid or inconsistent with the lengths of the
    files, and CheckpointError for another format version.
    """
    manifest = read_manifest_alone(storage, folder)
    for file, boxes in manifest.boxes_by_file.items():
        check_file(storage, manifest.path(folder, file), boxes)
    return manifest


def read_manifest_alone(storage: Storage, folder: str) -> Manifest:
    """Read the manifest without checking the files."""
    where = f"{storage.root}/{folder}"
    _check_inside(storage, f"{folder}/{MANIFEST}")
    try:
        text = bytes(storage.read(f"{folder}/{MANIFEST}"))
        raw = json.loads(text)
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{where} holds no {MANIFEST}, so it is not a complete checkpoint."
        ) from None
    except OSError as error:
        raise read_error(f"{where}/{MANIFEST} cannot be read", error) from None
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where}/{MANIFEST} is damaged: {error}") from None
    is_ours = isinstance(raw, dict) and raw.get("format") == FORMAT
    if is_ours and raw.get("version") not in READ_VERSIONS:
        raise CheckpointError(
            f"{where}/{MANIFEST} has format version {raw.get('version')}; this version of "
            f"torchtitan_lite reads {' and '.join(map(str, READ_VERSIONS))}. Load it with "
            "the version that wrote it."
        )
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"])).encode(errors="backslashreplace").decode()
        raise DamagedCheckpoint(f"{where}/{MANIFEST} is damaged at {at}: {first['msg']}") from None
    if manifest.version == 2 and "data" in raw:
        raise DamagedCheckpoint(f"{where}/{MANIFEST} is damaged: version 2 has no field data.")
    if not (checksum_matches(text) if manifest.version != 2 else checksum_matches_v2(raw)):
        raise DamagedCheckpoint(f"{where}/{MANIFEST} is damaged: its own checksum does not match.")
    if parse_step_name(folder) not in (None, manifest.step):
        raise DamagedCheckpoint(f"{where}/{MANIFEST} is of step {manifest.step}.")
    _check_boxes(manifest, where)
    try:
        _check_layouts(manifest)
    except LayoutError as error:
        raise DamagedCheckpoint(f"{where}/{MANIFEST} is damaged: {error}") from None
    return manifest


def layouts_of(manifest: Manifest) -> list[Layout]:
    """Return the layouts over files. Raises LayoutError for an invalid one."""
    return [_layout(number, layout) for number, layout in enumerate(manifest.layouts)]


def _layout(number: int, values: dict[str, Any]) -> Layout:
    axes = values.get("placements")
    if isinstance(axes, list) and len(axes) > _MAX_AXES:
        raise LayoutError(f"layout {number} has {len(axes)} axes, and at most {_MAX_AXES} may be.")
    try:
        layout = layout_from_json(values)
    except LayoutError as error:
        raise LayoutError(f"layout {number}: {error!s:.500}") from None
    for holder in layout.mesh.holders:
        # A tensor without elements is in no file, and its layout may name ranks.
        if isinstance(holder, str) and not FILE_NAME.fullmatch(holder):
            raise LayoutError(f"layout {number} names {holder!r:.100}, not a tensor file.")
    if any(split.factor > 1 for splits in layout.splits.values() for split in splits):
        raise LayoutError(f"layout {number} has strided shards, and a file holds one box.")
    return layout


def _check_boxes(manifest: Manifest, where: str) -> None:
    """Check that every box lies within its tensor and has its bytes, and that the boxes cover the
    tensor."""
    for name, tensor in manifest.tensors.items():
        for box in tensor.boxes:
            width = BYTES_PER_ELEMENT.get(tensor.dtype)
            inside = len(box.offset) == len(box.size) == len(tensor.shape) and all(
                offset + size <= length
                for offset, size, length in zip(box.offset, box.size, tensor.shape, strict=True)
            )
            first, end = box.bytes
            if width is None or not inside or end - first != math.prod(box.size) * width:
                raise DamagedCheckpoint(
                    f"{where}/{MANIFEST} is damaged: the box of {name} at {box.offset} of size "
                    f"{box.size} does not fit shape {tensor.shape}, {tensor.dtype} and its bytes."
                )
        covered = sum(math.prod(box.size) for box in tensor.boxes)
        if covered != math.prod(tensor.shape):
            raise DamagedCheckpoint(
                f"{where}/{MANIFEST} is damaged: the boxes of {name} hold {covered} of "
                f"{math.prod(tensor.shape)} elements."
            )


def _check_layouts(manifest: Manifest) -> None:
    """Check that the boxes of a tensor are those of its layout. Together they have the tensor's
    size, so they cover it without overlap. Raises LayoutError."""
    layouts = layouts_of(manifest)
    holds_once = [_is_partition(layout) for layout in layouts]
    # Layers repeat, so most lookups are cached.
    wanted: dict[tuple[int, tuple[int, ...], str], list[tuple[list[int], list[int]]]] = {}
    for name, tensor in manifest.tensors.items():
        if tensor.layout >= len(layouts):
            raise LayoutError(f"{name} has layout {tensor.layout}, and there are {len(layouts)}.")
        layout = layouts[tensor.layout]
        layout.check(tensor.shape)
        if tensor.boxes and not holds_once[tensor.layout]:
            raise LayoutError(
                f"{name} has by its layout {layout} elements that several files hold."
            )
        files: set[str] = set()
        for box in tensor.boxes:
            key = (tensor.layout, tuple(tensor.shape), box.file)
            if key not in wanted:
                boxes = layout.boxes(tensor.shape, box.file)
                wanted[key] = [(list(part.offset), list(part.size)) for part in boxes]
            if box.file in files or wanted[key] != [(box.offset, box.size)]:
                raise LayoutError(
                    f"{name} holds other boxes than its layout {layout} gives: {box.file} has the "
                    f"one at {box.offset} of size {box.size}."
                )
            files.add(box.file)


def _is_partition(layout: Layout) -> bool:
    """Return whether every element has exactly one holder."""
    splitting = {split.axis for splits in layout.splits.values() for split in splits}
    return all(size == 1 or axis in splitting for axis, size in enumerate(layout.mesh.shape))


def check_file(storage: Storage, path: str, boxes: list[tuple[str, BoxEntry]]) -> None:
    """Check that the file lies in the step's folder, every box within its file, and that no two
    overlap. Raises DamagedCheckpoint."""
    where = f"{storage.root}/{path}"
    _check_inside(storage, path)
    try:
        length = storage.size(path)
    except OSError as error:
        message = f"{where} is missing or cannot be read; it should hold {boxes[0][0]}"
        raise read_error(message, error) from None
    position = 0
    for name, box in boxes:
        first, end = box.bytes
        if first < position or end > length:
            raise DamagedCheckpoint(
                f"{where} is damaged: {name} should be in bytes {first} to {end}, but the file "
                f"has {length} bytes and those before {position} are taken."
            )
        position = end


def leaves_folder(storage: Storage, path: str) -> bool:
    """Return whether a file such as "step-5/manifest.json" lies outside of the step's folder,
    because it is a symbolic link or in one. The step's folder itself may be one."""
    if storage.folder is None:
        return False
    step = os.path.realpath(storage.folder / path.partition("/")[0])
    actual = os.path.realpath(storage.folder / path)
    return os.path.commonpath([step, actual]) != step


def _check_inside(storage: Storage, path: str) -> None:
    """Check that a file is not elsewhere, where it may be of another run, or no file at all. Raises
    DamagedCheckpoint."""
    if leaves_folder(storage, path):
        raise DamagedCheckpoint(
            f"{storage.root}/{path} is a symbolic link out of the folder of its step. Replace it "
            "by a copy of the file."
        )


def check_header(
    storage: Storage,
    path: str,
    boxes: Sequence[tuple[str, BoxEntry]],
    tensors: Mapping[str, TensorEntry],
) -> str:
    """Return why other safetensors readers do not find the same tensors in the same bytes; empty if
    they do. Raises OSError."""
    length = storage.size(path)
    start = _LENGTH_BYTES + int.from_bytes(storage.read(path, 0, _LENGTH_BYTES), "little")
    first, end = boxes[0][1].bytes[0], boxes[-1][1].bytes[1]
    if start != first or end != length:
        return f"the data should be in bytes {first} to {end}, and is in {start} to {length}"
    text = bytes(storage.read(path, _LENGTH_BYTES, start))
    try:
        header = json.loads(text, object_pairs_hook=_unique)
        header.pop("__metadata__", None)
    except (ValueError, AttributeError, RecursionError) as error:
        return f"its header cannot be read: {error}"
    entries = {
        name: {
            "dtype": tensors[name].dtype,
            "shape": box.size,
            "data_offsets": [box.bytes[0] - first, box.bytes[1] - first],
        }
        for name, box in boxes
    }
    # As texts: 1, 1.0 and true are equal numbers.
    if json.dumps(header, sort_keys=True) != json.dumps(entries, sort_keys=True):
        return "its header does not match the manifest"
    return ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises ValueError for a repeated name, of which each reader takes another
    value."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values
