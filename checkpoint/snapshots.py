"""A saved state, in storage or shared memory: its tensors, values, and the parts of its holders.

Checkpoints in files and snapshots in memory have the same interface.

Invariant: a part is returned only if its checksum matches, if it has one; nothing is unpickled.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import xxhash

from torchtitan_lite.checkpoint.manifest import (
    BoxEntry,
    check_header,
    layouts_of,
    read_manifest,
)
from torchtitan_lite.checkpoint.storage.base import Storage, read_error
from torchtitan_lite.checkpoint.tensors import DTYPE_NAMES, DTYPES, tensor_bytes, tensor_from_bytes
from torchtitan_lite.core.errors import CheckpointError, DamagedCheckpoint
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.redistribute import Layout, TensorSpec
from torchtitan_lite.distributed.redistribute.execution.read_plan import held_blocks
from torchtitan_lite.distributed.redistribute.planning.placements import Holder

_HERE = Layout.on_holder(0)


@dataclass(frozen=True)
class SavedValues:
    """Non-tensor state."""

    step: int
    values: Mapping[str, Any]
    """Values by part."""
    rng: Mapping[str, Mapping[str, Any]]
    """Rank -> its RNG states."""
    mesh: Mapping[str, int]
    model_only: bool
    dims: Mapping[str, Any] = field(default_factory=dict)
    """Recorded dimensions of the model; empty if not recorded."""


def model_dims(run_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the model dimensions in a recorded configuration; empty if there are none."""
    model = run_config.get("model")
    dims = model.get("dims") if isinstance(model, Mapping) else None
    return dims if isinstance(dims, Mapping) else {}


class Snapshot(Protocol):
    """State of one step, held by files or by regions of shared memory."""

    @property
    def where(self) -> str:
        """Location, for messages."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Tensors and their layouts over named holders."""
        ...

    @property
    def saved(self) -> SavedValues: ...

    def reach(self, holder: Holder) -> Sequence[int] | None:
        """Return the ranks that can open a holder; None for all."""
        ...

    def part(self, name: str, holder: Holder) -> torch.Tensor:
        """Return a holder's part of a tensor: contiguous, on the CPU, read-only. Raises
        DamagedCheckpoint, with location and tensor, if its checksum does not match."""
        ...

    def read_part(self, name: str, holder: Holder, into: torch.Tensor) -> None:
        """Read a holder's part into a contiguous CPU tensor of its dtype and shape. Thread-safe. On
        errors the content of `into` is undefined."""
        ...


class WeightsSnapshot(Snapshot, Protocol):
    """A snapshot in files."""

    def fingerprint(self) -> str:
        """Return a digest of the weights as they are stored: equal for copies, and in practice
        different for other weights."""
        ...


class StoredSnapshot:
    """A checkpoint in files."""

    def __init__(self, storage: Storage, folder: str, *, ema: bool = False) -> None:
        """With `ema`, the moving averages of the weights are in place of the weights. Raises
        DamagedCheckpoint if it is visibly incomplete without reading all of it, and CheckpointError
        for another format version, or if there are no averages."""
        self._storage, self._folder, self.ema = storage, folder, ema
        self.where = f"{storage.root}/{folder}"
        self.manifest = manifest = read_manifest(storage, folder)
        self._opened: set[str] = set()
        """Files whose header was checked."""
        self._boxes: dict[tuple[str, Holder], BoxEntry] = {}
        self.tensors: dict[str, TensorSpec] = {}
        layouts = layouts_of(manifest)
        for name, entry in manifest.tensors.items():
            layout, dtype = layouts[entry.layout], DTYPES[entry.dtype]
            self.tensors[name] = TensorSpec(layout, tuple(entry.shape), dtype)
            self._boxes |= {(name, box.file): box for box in entry.boxes}
        if ema:
            self._use_averages()
        self.saved = SavedValues(
            manifest.step,
            manifest.values,
            manifest.rng,
            manifest.mesh,
            manifest.model_only,
            model_dims(manifest.config),
        )

    def _use_averages(self) -> None:
        prefix, suffix = "optimizer.", ".ema"
        averages = {
            name: f"model.{name.removeprefix(prefix).removesuffix(suffix)}"
            for name in self.tensors
            if name.startswith(prefix) and name.endswith(suffix)
        }
        if not averages:
            why = (
                "it has weights only"
                if self.manifest.model_only
                else "its run had optimizer.ema_decay = 0"
            )
            raise CheckpointError(f"{self.where} has no moving average of the weights: {why}.")
        self.tensors |= {name: self.tensors.pop(average) for average, name in averages.items()}
        self._boxes |= {
            (averages[name], file): self._boxes[name, file]
            for name, file in list(self._boxes)
            if name in averages
        }

    def fingerprint(self) -> str:
        """Return a digest of the checksums of all boxes of the weights."""
        boxes: dict[str, list[Any]] = {}
        for (name, _), box in self._boxes.items():
            boxes.setdefault(name, []).append([box.offset, box.size, box.xxh3])
        described = [
            [name, DTYPE_NAMES[placed.dtype], placed.shape, sorted(boxes.get(name, []))]
            for name, placed in sorted(self.tensors.items())
            if name.startswith("model.")
        ]
        return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()

    def reach(self, holder: Holder) -> None:
        """Return None: every rank can read the storage."""
        return None

    def part(self, name: str, holder: Holder) -> torch.Tensor:
        placed = self.tensors[name]
        shape = placed.layout.local_shape(placed.shape, holder)
        entry = self._boxes.get((name, holder))
        if entry is None:
            return torch.empty(shape, dtype=placed.dtype)
        first, end = entry.bytes
        try:
            raw = self._storage.read(self._path(entry), first, end)
        except OSError as error:
            raise self._read_error(entry, error) from None
        if len(raw) != end - first or xxhash.xxh3_64_hexdigest(raw) != entry.xxh3:
            raise self._damaged(name, entry)
        self._warn_of_header(entry.file)
        return tensor_from_bytes(raw, placed.dtype, shape)

    def read_part(self, name: str, holder: Holder, into: torch.Tensor) -> None:
        entry = self._boxes.get((name, holder))
        if entry is None:
            return
        digest, target = xxhash.xxh3_64(), tensor_bytes(into)
        if len(target) != entry.bytes[1] - entry.bytes[0]:
            raise self._damaged(name, entry)
        try:
            self._storage.read_into(self._path(entry), entry.bytes[0], target, digest.update)
        except OSError as error:
            raise self._read_error(entry, error) from None
        if digest.hexdigest() != entry.xxh3:
            raise self._damaged(name, entry)
        self._warn_of_header(entry.file)

    def _warn_of_header(self, file: str) -> None:
        """Warn once if other readers would not find the tensors of a file, one of which has been
        read by the manifest and is intact."""
        if file in self._opened:
            return
        self._opened.add(file)
        path = self.manifest.path(self._folder, file)
        boxes = self.manifest.boxes_by_file[file]
        try:
            problem = check_header(self._storage, path, boxes, self.manifest.tensors)
        except OSError:
            # Reading its tensors reports it.
            return
        if problem:
            logger.warning(
                "%s/%s is damaged beside its tensors, whose checksums are compared as they are "
                "read: %s. Other programs may not read it.",
                self._storage.root,
                path,
                problem,
            )

    def _path(self, entry: BoxEntry) -> str:
        return self.manifest.path(self._folder, entry.file)

    def _file(self, entry: BoxEntry) -> str:
        """Return the file's location, for messages."""
        return f"{self._storage.root}/{self._path(entry)}"

    def _read_error(self, entry: BoxEntry, error: OSError) -> CheckpointError:
        return read_error(f"{self._file(entry)} cannot be read", error)

    def _damaged(self, name: str, entry: BoxEntry) -> DamagedCheckpoint:
        first, end = entry.bytes
        return DamagedCheckpoint(
            f"{self._file(entry)} is damaged: the checksum of {name} (bytes {first} to "
            f"{end}) does not match."
        )


def read_tensor(source: Snapshot, name: str, slices: Sequence[slice] | None = None) -> torch.Tensor:
    """Assemble a tensor, or the elements in `slices`, one per dim with a start and a stop, from the
    parts of its holders. Parts without any of them are not read. Thread-safe, and not
    collective."""
    placed = source.tensors[name]
    holders = placed.layout.mesh.holders
    if len(holders) == 1 and slices is None:
        tensor = torch.empty(placed.shape, dtype=placed.dtype)
        source.read_part(name, holders[0], tensor)
        return tensor
    if slices is None:
        slices = [slice(0, size) for size in placed.shape]
    size = [wanted.stop - wanted.start for wanted in slices]
    tensor = torch.empty(size, dtype=placed.dtype)
    parts: dict[Holder, torch.Tensor] = {}
    for block in held_blocks(placed.layout, _HERE, placed.shape, 0):
        within = [_within(*each) for each in zip(block.target, slices, strict=True)]
        if any(length <= 0 for _, _, length in within):
            continue
        holder = block.holders[0]
        if holder not in parts:
            # Read, not mapped: mapped memory lives as long as its file is open.
            shape = placed.layout.local_shape(placed.shape, holder)
            parts[holder] = torch.empty(shape, dtype=placed.dtype)
            source.read_part(name, holder, parts[holder])
        target = tuple(slice(first, first + length) for _, first, length in within)
        in_part = tuple(
            slice(whole.start + skipped, whole.start + skipped + length)
            for whole, (skipped, _, length) in zip(block.source, within, strict=True)
        )
        tensor[target] = parts[holder][in_part]
    return tensor


def _within(block: slice, wanted: slice) -> tuple[int, int, int]:
    """Return, in one dim, how many elements of a block are before the wanted ones, where the others
    begin in those, and how many it has of them; 0 or less if it has none."""
    first, end = max(block.start, wanted.start), min(block.stop, wanted.stop)
    return first - block.start, first - wanted.start, end - first
