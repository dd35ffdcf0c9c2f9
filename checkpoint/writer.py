"""Write a checkpoint so that it is seen whole or not at all. Layer: above redistribute and mesh.

Each rank writes the boxes that it is the first to hold into a temporary folder, with a part of
the manifest. When all have, the leader joins the parts, makes everything durable, and renames the
folder. A crash before the rename leaves only a temporary folder, which the next save removes.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save, save_file

from torchtitan_lite import __version__, rng
from torchtitan_lite.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    BoxEntry,
    Manifest,
    Part,
    TensorEntry,
    join_parts,
)
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.redistribute import is_first_holder, local_box

_TEMPORARY_PREFIX = ".writing-"
_REPLACED_PREFIX = ".replaced-"


def write_checkpoint(
    root: Path,
    *,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    config: Mapping[str, Any],
    mesh: Mesh,
    model_only: bool = False,
) -> Path:
    """Write `root/step-N`, replacing one of the same step. Every rank must call it.

    Returns the folder. Raises CheckpointError on all ranks when one of them cannot write; what
    was written so far is removed, and older checkpoints stay as they are.
    """
    temporary = root / f"{_TEMPORARY_PREFIX}step-{step}"
    problem = _attempt(mesh.is_leader, lambda: _make_empty(temporary))
    if not mesh.any(problem is not None):
        problem = _attempt(True, lambda: _write_part(temporary, tensors, mesh))
    failed = mesh.any(problem is not None)
    final = root / f"step-{step}"
    if not failed:

        def commit() -> None:
            _write_manifest(temporary, step, values, config, mesh, model_only)
            replaced = root / f"{_REPLACED_PREFIX}{final.name}"
            shutil.rmtree(replaced, ignore_errors=True)
            if final.exists():
                os.rename(final, replaced)
            try:
                os.rename(temporary, final)
            except OSError:
                recover(root)
                raise
            _sync_folder(root)
            shutil.rmtree(replaced, ignore_errors=True)

        problem = _attempt(mesh.is_leader, commit)
        failed = mesh.any(problem is not None)
    if failed:
        if mesh.is_leader:
            shutil.rmtree(temporary, ignore_errors=True)
        cause = problem or "another rank could not write"
        raise CheckpointError(f"The checkpoint of step {step} was not saved in {root}: {cause}")
    return final


def recover(root: Path) -> None:
    """Put back a checkpoint whose replacement was killed between its two renames, and remove one
    that was replaced. For the leader, before anything is read. What cannot be mended is left."""
    for replaced in root.glob(f"{_REPLACED_PREFIX}*"):
        final = root / replaced.name.removeprefix(_REPLACED_PREFIX)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.rename(replaced, final)


def _attempt(mine: bool, action: Any) -> str | None:
    """Run `action` if it is this rank's to run; the error's text instead of the error, since all
    ranks must reach the next collective."""
    try:
        if mine:
            action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _make_empty(folder: Path) -> None:
    """An empty folder; leavings of saves that were killed are removed."""
    missing = [folder.parent, *folder.parent.parents]
    missing = missing[: [path.exists() for path in missing].index(True)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    for made in missing:
        _sync_folder(made.parent)
    for left in folder.parent.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(left)
    folder.mkdir()


def _write_part(folder: Path, tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> None:
    """This rank's safetensors file, made durable, and its part of the manifest."""
    held = {}
    entries: dict[str, TensorEntry] = {}
    for name, tensor in tensors.items():
        box = local_box(tensor)
        if tensor.numel() == 0 and mesh.is_first_of_stage:
            dtype = json.loads(save({name: torch.empty(0, dtype=tensor.dtype)})[8:])[name]["dtype"]
            entries[name] = TensorEntry(dtype=dtype, shape=list(tensor.shape), boxes=[])
        if is_first_holder(tensor, mesh.is_first_of_stage) and not box.is_empty:
            local = getattr(tensor, "to_local", lambda tensor=tensor: tensor)()
            held[name] = (tensor, box, local.detach().cpu().contiguous())
    path = folder / f"rank-{mesh.rank:05d}.safetensors"
    if held:
        save_file({name: local for name, (_, _, local) in held.items()}, path)
        header, data_start = _header(path)
        for name, (tensor, box, local) in held.items():
            first, end = header[name]["data_offsets"]
            digest = xxhash.xxh3_64_hexdigest(local.reshape(-1).view(torch.uint8).numpy().data)
            entries[name] = TensorEntry(
                dtype=header[name]["dtype"],
                shape=list(tensor.shape),
                boxes=[
                    BoxEntry(
                        offset=list(box.offset),
                        size=list(box.size),
                        file=path.name,
                        bytes=(data_start + first, data_start + end),
                        xxh3=digest,
                    )
                ],
            )
        _sync_file(path)
    part = Part(tensors=entries, rng=rng.capture())
    (folder / f"rank-{mesh.rank:05d}.json").write_text(part.model_dump_json())


def _write_manifest(
    folder: Path,
    step: int,
    values: Mapping[str, Any],
    config: Mapping[str, Any],
    mesh: Mesh,
    model_only: bool,
) -> None:
    """Join the ranks' parts into the manifest and make the folder durable."""
    paths = [folder / f"rank-{rank:05d}.json" for rank in range(mesh.world_size)]
    parts = [Part.model_validate_json(path.read_text()) for path in paths]
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        step=step,
        model_only=model_only,
        mesh=asdict(mesh.degrees),
        tensors=join_parts(parts),
        values=dict(values),
        rng={} if model_only else {str(rank): part.rng for rank, part in enumerate(parts)},
        config=dict(config),
        versions={"torchtitan_lite": __version__, "torch": torch.__version__},
    )
    manifest = manifest.model_copy(update={"xxh3": manifest.checksum()})
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest.model_dump(), indent=1))
    _sync_file(path)
    for part_path in paths:
        part_path.unlink()
    _sync_folder(folder)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's header, and the byte at which its data starts."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
