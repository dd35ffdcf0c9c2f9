"""Read a checkpoint back into live tensors. Layer: above redistribute and mesh.

Invariant: nothing is taken from a file whose checksum does not hold, and no tensor is touched
before every file that this rank reads was found to fit.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.manifest import BoxEntry, Manifest
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint
from torchtitan_lite.redistribute import Box, local_box

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "F32": torch.float32,
    "I64": torch.int64, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def check_fit(manifest: Manifest, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError listing every tensor that is missing, misshapen, or cut otherwise
    than this mesh cuts it."""
    problems = []
    cut_differently = []
    for name, tensor in tensors.items():
        entry = manifest.tensors.get(name)
        if entry is None:
            problems.append(f"{name} is not in the checkpoint")
        elif list(tensor.shape) != entry.shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, saved {entry.shape}")
        elif not local_box(tensor).is_empty and _find(entry.boxes, local_box(tensor)) is None:
            cut_differently.append(name)
    if problems:
        raise CheckpointError(
            f"{folder} does not fit this model: " + "; ".join(problems) + ". Use the [model] "
            "section that it was saved with (see `config` in its manifest.json)."
        )
    if cut_differently:
        saved = " x ".join(f"{axis} {degree}" for axis, degree in manifest.mesh.items())
        raise CheckpointError(
            f"{folder} was saved on another mesh ({saved}): {len(cut_differently)} of "
            f"{len(tensors)} tensors are cut differently here, such as {cut_differently[0]}. "
            "This version resumes on the same degrees of parallelism only."
        )


def read_boxes(
    manifest: Manifest, folder: Path, tensors: Mapping[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's boxes of `tensors`, each with its saved values mapped from the files and their
    checksums verified. Call `check_fit` first; nothing is loaded yet.

    Raises DamagedCheckpoint naming the file and the tensor when a checksum does not hold.
    """
    maps: dict[str, np.ndarray] = {}
    found = []
    for name, tensor in tensors.items():
        box = local_box(tensor)
        entry = manifest.tensors[name]
        saved = _find(entry.boxes, box)
        if box.is_empty or saved is None:
            continue
        path = folder / saved.file
        if saved.file not in maps:
            # Copy on write: torch wants writable memory, and nothing may reach the file.
            maps[saved.file] = np.memmap(path, np.uint8, mode="c")
        first, end = saved.bytes
        data = maps[saved.file][first:end]
        if xxhash.xxh3_64_hexdigest(data.data) != saved.xxh3:
            raise DamagedCheckpoint(
                f"{path} is damaged: the checksum of {name} (bytes {first} to {end}) does not hold."
            )
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        values = torch.from_numpy(data).view(_DTYPES[entry.dtype]).reshape(local.shape)
        found.append((local, values))
    return found


@torch.no_grad()
def fill(boxes: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the saved values into the live boxes; converts the dtype where it differs."""
    for local, values in boxes:
        local.copy_(values)


def _find(boxes: list[BoxEntry], wanted: Box) -> BoxEntry | None:
    return next(
        (
            entry
            for entry in boxes
            if tuple(entry.offset) == wanted.offset and tuple(entry.size) == wanted.size
        ),
        None,
    )
