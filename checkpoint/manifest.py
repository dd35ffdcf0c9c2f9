"""The manifest of a checkpoint: what is in it and where, as validated plain data.

A checkpoint is a folder `step-N` with one safetensors file per rank (in an object store below the
name of their attempt) and `manifest.json`, which is written last: without it there is none. Nothing
in it can name a path outside of its folder, and checking it takes time and memory in proportion to
its length. Layer: above storage and redistribute.
"""

import json
import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from torchtitan_lite.checkpoint.damage import unreadable
from torchtitan_lite.checkpoint.file_names import FILE_NAME
from torchtitan_lite.checkpoint.memory.description import BYTES_PER_ELEMENT
from torchtitan_lite.checkpoint.storage.manifest_json import (
    FORMAT,
    MANIFEST,
    READ_VERSIONS,
    is_signed,
    is_signed_as_2,
)
from torchtitan_lite.checkpoint.storage.names import ATTEMPT, step_of
from torchtitan_lite.checkpoint.storage.storage import Storage
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint, LayoutError
from torchtitan_lite.redistribute import Layout, layout_from_json

_MAX_AXES = 64
"""Of a mesh, and dims of a tensor: more than there are anywhere."""
_Size = Annotated[int, Field(ge=0, lt=1 << 62)]
_Sizes = Annotated[list[_Size], Field(max_length=_MAX_AXES)]
_FileName = Annotated[str, Field(pattern=rf"^{FILE_NAME.pattern}$")]
_DataName = Annotated[str, Field(pattern=rf"^{ATTEMPT.pattern}$")]


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"{name!a:.100} is needed to be a name that can be printed")
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
    """First byte in the file, and the one after the last."""
    xxh3: str


class TensorEntry(_Entry):
    """A tensor and the boxes that cover it."""

    dtype: str
    """As safetensors names it: F32, BF16, ..."""
    shape: _Sizes
    layout: _Size
    """Index into the manifest's `layouts`."""
    boxes: list[BoxEntry]


class Manifest(_Entry):
    """The whole checkpoint."""

    format: Literal["torchtitan_lite.checkpoint"]
    version: int
    step: _Size
    model_only: bool
    mesh: dict[str, int]
    """Axis -> degree."""
    layouts: list[dict[str, Any]]
    """How the files hold the tensors, each once."""
    tensors: dict[_Name, TensorEntry]
    data: _DataName | None = None
    """The folder of the files, in that of the step; None: they lie in that itself."""
    values: dict[str, Any]
    """The state that is not tensors, by part: train_state, lr_scheduler, dataloader."""
    rng: dict[str, dict[str, Any]]
    """Rank -> its ambient generators."""
    config: dict[str, Any]
    versions: dict[str, str]
    xxh3: str
    """Checksum of all that is before it."""

    def path(self, folder: str, file: str) -> str:
        """Where `file` lies, for the storage that has this manifest in `folder`."""
        return "/".join(part for part in (folder, self.data, file) if part is not None)


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """The manifest of the checkpoint in `folder` of `storage`.

    Raises DamagedCheckpoint when it is missing, is no manifest, or does not agree with the lengths
    of the files beside it, and CheckpointError when another version of the format wrote it.
    """
    manifest = read_manifest_alone(storage, folder)
    for file, boxes in boxes_by_file(manifest).items():
        check_file(storage, manifest.path(folder, file), boxes)
    return manifest


def read_manifest_alone(storage: Storage, folder: str) -> Manifest:
    """The same, without a look at the files."""
    where = f"{storage.root}/{folder}"
    try:
        text = bytes(storage.read(f"{folder}/{MANIFEST}"))
        raw = json.loads(text)
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{where} holds no {MANIFEST}, so it is no complete checkpoint."
        ) from None
    except OSError as error:
        raise unreadable(f"{where}/{MANIFEST} cannot be read", error) from None
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
    if not (is_signed(text) if manifest.version != 2 else is_signed_as_2(raw)):
        raise DamagedCheckpoint(f"{where}/{MANIFEST} is damaged: its own checksum does not hold.")
    if step_of(folder) not in (None, manifest.step):
        raise DamagedCheckpoint(f"{where}/{MANIFEST} is of step {manifest.step}.")
    _check_boxes(manifest, where)
    try:
        _check_layouts(manifest)
    except LayoutError as error:
        raise DamagedCheckpoint(f"{where}/{MANIFEST} is damaged: {error}") from None
    return manifest


def layouts_of(manifest: Manifest) -> list[Layout]:
    """How the files hold the tensors. Raises LayoutError for what cannot be a layout of files."""
    return [_layout(number, given) for number, given in enumerate(manifest.layouts)]


def _layout(number: int, given: dict[str, Any]) -> Layout:
    axes = given.get("placements")
    if isinstance(axes, list) and len(axes) > _MAX_AXES:
        raise LayoutError(f"layout {number} has {len(axes)} axes, and at most {_MAX_AXES} may be.")
    try:
        layout = layout_from_json(given)
    except LayoutError as error:
        raise LayoutError(f"layout {number}: {error!s:.500}") from None
    for holder in layout.mesh.holders:
        # A tensor without elements lies in no file, and its layout may have the ranks' numbers.
        if isinstance(holder, str) and not FILE_NAME.fullmatch(holder):
            raise LayoutError(f"layout {number} names {holder!r:.100}, which is no file's name.")
    if any(cut.split > 1 for cuts in layout.cuts.values() for cut in cuts):
        raise LayoutError(f"layout {number} has strided shards, and a file holds one box.")
    return layout


def _check_boxes(manifest: Manifest, where: str) -> None:
    """Every box lies within its tensor and has its bytes, and the boxes of a tensor make it up."""
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
    """The boxes of a tensor are those that its layout gives to their files. Since they are as large
    as the tensor together, that makes it up without an overlap. Raises LayoutError."""
    layouts = layouts_of(manifest)
    holds_once = [_holds_once(layout) for layout in layouts]
    # Blocks are alike, so that most of these have been asked for before.
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
                wanted[key] = [(list(found.offset), list(found.size)) for found in boxes]
            if box.file in files or wanted[key] != [(box.offset, box.size)]:
                raise LayoutError(
                    f"{name} holds other boxes than its layout {layout} gives: {box.file} has the "
                    f"one at {box.offset} of size {box.size}."
                )
            files.add(box.file)


def _holds_once(layout: Layout) -> bool:
    """Whether every element has one holder."""
    cutting = {cut.axis for cuts in layout.cuts.values() for cut in cuts}
    return all(size == 1 or axis in cutting for axis, size in enumerate(layout.mesh.shape))


def boxes_by_file(manifest: Manifest) -> dict[str, list[tuple[str, BoxEntry]]]:
    """File -> (tensor, box) for each box that it holds, in the order of its bytes."""
    found: dict[str, list[tuple[str, BoxEntry]]] = {}
    for name, tensor in manifest.tensors.items():
        for box in tensor.boxes:
            found.setdefault(box.file, []).append((name, box))
    return {
        file: sorted(boxes, key=lambda one: (one[1].bytes, one[0])) for file, boxes in found.items()
    }


def check_file(storage: Storage, path: str, boxes: list[tuple[str, BoxEntry]]) -> None:
    """Every box lies within its file, and no two share bytes. Raises DamagedCheckpoint."""
    where = f"{storage.root}/{path}"
    try:
        length = storage.size(path)
    except OSError as error:
        message = f"{where} is missing or cannot be read; it should hold {boxes[0][0]}"
        raise unreadable(message, error) from None
    position = 0
    for name, box in boxes:
        first, end = box.bytes
        if first < position or end > length:
            raise DamagedCheckpoint(
                f"{where} is damaged: {name} should lie in bytes {first} to {end}, but the file "
                f"has {length} bytes and those before {position} are taken."
            )
        position = end
