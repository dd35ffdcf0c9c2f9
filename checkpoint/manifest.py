"""The manifest of a checkpoint: what is in it and where, as validated plain data.

A checkpoint is a folder `step-N` with one safetensors file per rank and `manifest.json`, which
is written last: a folder without it is no checkpoint. Nothing in it can name a path outside of
its folder. Layer: above errors.
"""

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint

FORMAT = "torchtitan_lite.checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

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
    boxes: list[BoxEntry]


class Part(_Entry):
    """What one rank wrote; the leader joins all parts into the manifest."""

    tensors: dict[str, TensorEntry]
    rng: dict[str, Any]


class Manifest(_Entry):
    """The whole checkpoint."""

    format: Literal["torchtitan_lite.checkpoint"]
    version: int
    step: _Size
    model_only: bool
    mesh: dict[str, int]
    """Axis -> degree."""
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]
    """The state that is not tensors, by part: train_state, lr_scheduler, dataloader."""
    rng: dict[str, dict[str, Any]]
    """Rank -> its ambient generators."""
    config: dict[str, Any]
    versions: dict[str, str]
    xxh3: str = ""
    """Checksum of all the rest of the manifest."""

    def checksum(self) -> str:
        """xxh3 of the manifest without this very key, as JSON with sorted keys."""
        rest = self.model_dump(exclude={"xxh3"})
        return xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises DamagedCheckpoint when it is missing, is no manifest, or does not agree with the files
    beside it, and CheckpointError when another version of the format wrote it.
    """
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{folder} holds no {MANIFEST}, so it is no complete checkpoint."
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from None
    if isinstance(raw, dict) and raw.get("format") == FORMAT and raw.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {raw.get('version')}; this version reads {VERSION}. "
            "Install the version of torchtitan_lite that wrote it or a later one."
        )
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DamagedCheckpoint(f"{path} is damaged at {where}: {first['msg']}") from None
    if manifest.xxh3 != manifest.checksum():
        raise DamagedCheckpoint(f"{path} is damaged: its own checksum does not hold.")
    _check_bytes(manifest, folder)
    return manifest


def join_parts(parts: list[Part]) -> dict[str, TensorEntry]:
    """The tensors of all ranks' parts, with the boxes of each tensor together."""
    joined: dict[str, TensorEntry] = {}
    for part in parts:
        for name, entry in part.tensors.items():
            boxes = joined[name].boxes if name in joined else []
            joined[name] = entry.model_copy(update={"boxes": [*boxes, *entry.boxes]})
    return joined


_BYTES_PER_ELEMENT = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "F32": 4, "I64": 8, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def _check_bytes(manifest: Manifest, folder: Path) -> None:
    """Every box lies within its tensor and its file, and no two share bytes."""
    used: dict[str, list[tuple[int, int, str]]] = {}
    for name, tensor in manifest.tensors.items():
        for box in tensor.boxes:
            width = _BYTES_PER_ELEMENT.get(tensor.dtype)
            first, end = box.bytes
            inside = len(box.offset) == len(box.size) == len(tensor.shape) and all(
                offset + size <= length
                for offset, size, length in zip(box.offset, box.size, tensor.shape, strict=True)
            )
            if width is None or not inside or end - first != math.prod(box.size) * width:
                raise DamagedCheckpoint(
                    f"{folder / MANIFEST} is damaged: the box of {name} at {box.offset} of size "
                    f"{box.size} does not fit shape {tensor.shape}, {tensor.dtype} and its bytes."
                )
            used.setdefault(box.file, []).append((first, end, name))
        covered = sum(math.prod(box.size) for box in tensor.boxes)
        if covered != math.prod(tensor.shape) or _some_overlap(tensor.boxes):
            raise DamagedCheckpoint(
                f"{folder / MANIFEST} is damaged: the boxes of {name} hold {covered} of "
                f"{math.prod(tensor.shape)} elements, or some of them twice."
            )
    for file, ranges in used.items():
        path = folder / file
        length = path.stat().st_size if path.is_file() else 0
        ranges.sort()
        position = 0
        for first, end, name in ranges:
            if first < position or end > length:
                raise DamagedCheckpoint(
                    f"{path} is damaged: {name} should lie in bytes {first} to {end}, "
                    f"but the file has {length} bytes and those before {position} are taken."
                    if length
                    else f"{path} is missing; it should hold {name}."
                )
            position = end


def _some_overlap(boxes: list[BoxEntry]) -> bool:
    """Whether two boxes share an element; all pairs at once."""
    if len(boxes) < 2:
        return False
    first = np.array([box.offset for box in boxes])
    end = first + np.array([box.size for box in boxes])
    pairs = (first[:, None] < end[None]) & (first[None] < end[:, None])
    return bool(np.triu(pairs.all(-1), k=1).any())


_STEP = re.compile(r"^step-([0-9]{1,18})$")


def step_of(folder: Path) -> int | None:
    """The step that the folder's name gives, or None for another folder."""
    match = _STEP.match(folder.name)
    return int(match[1]) if match else None


def step_folders(root: Path) -> dict[int, Path]:
    """The checkpoints below `root` by step, oldest first; only those that were committed."""
    if not root.is_dir():
        return {}
    found = {step_of(path): path for path in root.iterdir() if (path / MANIFEST).is_file()}
    return {step: found[step] for step in sorted(s for s in found if s is not None)}
