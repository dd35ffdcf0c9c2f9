"""The manifest of a checkpoint: what is in it and where, as validated plain data.

A checkpoint is a folder `step-N` with one safetensors file per rank and `manifest.json`, which
is written last: a folder without it is no checkpoint. Nothing in it can name a path outside of
its folder. Layer: above storage.
"""

import json
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from torchtitan_lite.checkpoint.memory.description import BYTES_PER_ELEMENT
from torchtitan_lite.checkpoint.storage.manifest_json import FORMAT, MANIFEST, VERSION, checksum
from torchtitan_lite.checkpoint.storage.storage import Storage
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint
from torchtitan_lite.redistribute.box import Box, make_up

_Size = Annotated[int, Field(ge=0, lt=1 << 62)]
_FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{5}\.safetensors$")]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class BoxEntry(_Entry):
    """One box of a tensor, and the bytes that hold it."""

    offset: list[_Size]
    size: list[_Size]
    file: _FileName
    bytes: tuple[_Size, _Size] = Field(strict=False)
    """First byte in the file, and the one after the last."""
    xxh3: str


class TensorEntry(_Entry):
    """A tensor and the boxes that cover it."""

    dtype: str
    """As safetensors names it: F32, BF16, ..."""
    shape: list[_Size]
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
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]
    """The state that is not tensors, by part: train_state, lr_scheduler, dataloader."""
    rng: dict[str, dict[str, Any]]
    """Rank -> its ambient generators."""
    config: dict[str, Any]
    versions: dict[str, str]
    xxh3: str
    """Checksum of all the rest of the manifest."""


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """The manifest of the checkpoint in `folder` of `storage`.

    Raises DamagedCheckpoint when it is missing, is no manifest, or does not agree with the files
    beside it, and CheckpointError when another version of the format wrote it.
    """
    where = f"{storage.root}/{folder}"
    try:
        raw = json.loads(bytes(storage.read(f"{folder}/{MANIFEST}")))
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{where} holds no {MANIFEST}, so it is no complete checkpoint."
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where}/{MANIFEST} is damaged: {error}") from None
    if isinstance(raw, dict) and raw.get("format") == FORMAT and raw.get("version") != VERSION:
        raise CheckpointError(
            f"{where}/{MANIFEST} has format version {raw.get('version')}; this version of "
            f"torchtitan_lite reads {VERSION}. Load it with the version that wrote it."
        )
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise DamagedCheckpoint(f"{where}/{MANIFEST} is damaged at {at}: {first['msg']}") from None
    if manifest.xxh3 != checksum(raw):
        raise DamagedCheckpoint(f"{where}/{MANIFEST} is damaged: its own checksum does not hold.")
    _check_boxes(manifest, where)
    _check_files(manifest, storage, folder)
    return manifest


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
        boxes = [Box(tuple(box.offset), tuple(box.size)) for box in tensor.boxes]
        if not make_up(tensor.shape, boxes):
            covered = sum(math.prod(box.size) for box in tensor.boxes)
            raise DamagedCheckpoint(
                f"{where}/{MANIFEST} is damaged: the boxes of {name} hold {covered} of "
                f"{math.prod(tensor.shape)} elements, or some of them twice."
            )


def _check_files(manifest: Manifest, storage: Storage, folder: str) -> None:
    """Every box lies within its file, and no two share bytes."""
    used: dict[str, list[tuple[int, int, str]]] = {}
    for name, tensor in manifest.tensors.items():
        for box in tensor.boxes:
            used.setdefault(box.file, []).append((*box.bytes, name))
    for file, ranges in used.items():
        path = f"{storage.root}/{folder}/{file}"
        try:
            length = storage.size(f"{folder}/{file}")
        except OSError as error:
            raise DamagedCheckpoint(
                f"{path} is missing or cannot be read; it should hold {ranges[0][2]}: {error}"
            ) from None
        ranges.sort()
        position = 0
        for first, end, name in ranges:
            if first < position or end > length:
                raise DamagedCheckpoint(
                    f"{path} is damaged: {name} should lie in bytes {first} to {end}, but the "
                    f"file has {length} bytes and those before {position} are taken."
                )
            position = end
