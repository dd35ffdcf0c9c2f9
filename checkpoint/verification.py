"""Verification of a checkpoint: reads all of it and compares checksums.

Invariant: one pass reports all damage, not only the first.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from torchtitan_lite.checkpoint.format import MANIFEST
from torchtitan_lite.checkpoint.manifest import (
    BoxEntry,
    Manifest,
    check_file,
    check_header,
    leaves_folder,
    read_manifest_alone,
)
from torchtitan_lite.checkpoint.storage.base import Storage, exists
from torchtitan_lite.core.errors import DamagedCheckpoint


@dataclass(frozen=True)
class Damage:
    """One damaged file or tensor."""

    file: str
    tensor: str | None
    """None if the whole file is affected."""
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {f'{self.tensor}: ' if self.tensor else ''}{self.problem}"


def verify(storage: Storage, folder: str, *, threads: int | None = None) -> list[Damage]:
    """Return all damage of the checkpoint in `folder`, by file and offset; empty if it is intact.
    `threads`: number of concurrent readers, by default one per core.

    Raises CheckpointError for another format version.
    """
    try:
        manifest = read_manifest_alone(storage, folder)
    except DamagedCheckpoint as error:
        return [Damage(MANIFEST, None, str(error))]
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        work = [
            (file, boxes, pool.submit(_check_header, storage, folder, file, boxes, manifest))
            for file, boxes in sorted(manifest.boxes_by_file.items())
        ]
        sums = [
            [
                pool.submit(_check_box, storage, manifest.path(folder, file), name, box)
                for name, box in boxes
            ]
            for file, boxes, _ in work
        ]
        damages = []
        for (file, _, header), checked in zip(work, sums, strict=True):
            damage = header.result()
            damages += [] if damage is None else [damage]
            # An unreadable file is reported once.
            if damage is None or exists(storage, manifest.path(folder, file)):
                damages += [box for check in checked if (box := check.result()) is not None]
    return damages


def _check_header(
    storage: Storage,
    folder: str,
    file: str,
    boxes: Sequence[tuple[str, BoxEntry]],
    manifest: Manifest,
) -> Damage | None:
    """Check that other safetensors readers find the same tensors in the same bytes."""
    path = manifest.path(folder, file)
    try:
        check_file(storage, path, list(boxes))
        problem = check_header(storage, path, boxes, manifest.tensors)
    except (DamagedCheckpoint, OSError, ValueError) as error:
        problem = str(error)
    return Damage(file, None, problem) if problem else None


def _check_box(storage: Storage, path: str, name: str, box: BoxEntry) -> Damage | None:
    first, end = box.bytes
    if leaves_folder(storage, path):
        # It is reported for the file, and may be no file.
        return None
    try:
        # Accessing mapped bytes past the end of the file would kill the process (SIGBUS).
        if end > storage.size(path):
            return Damage(box.file, name, f"the file ends before its bytes {first} to {end} do")
        raw = storage.read(path, first, end)
        if len(raw) == end - first and xxhash.xxh3_64_hexdigest(raw) == box.xxh3:
            return None
    except (OSError, ValueError) as error:
        return Damage(box.file, name, f"cannot be read: {error}")
    return Damage(box.file, name, f"the checksum of its bytes {first} to {end} does not match")
