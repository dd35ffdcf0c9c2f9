"""A saved state, wherever it lies: what it holds, and the parts of its holders.

A checkpoint in files and one in shared memory are read in the same way, and whoever wants to serve
state to others (a replica that heals another) reads it from here. Layer: above manifest and memory.

Invariant: a part is given only if its checksum holds, where it has one; nothing is unpickled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import xxhash

from torchtitan_lite.checkpoint.damage import unreadable
from torchtitan_lite.checkpoint.dtypes import BY_NAME
from torchtitan_lite.checkpoint.manifest import BoxEntry, layouts_of, read_manifest
from torchtitan_lite.checkpoint.memory.description import Description, HeldTensor
from torchtitan_lite.checkpoint.memory.region import Region
from torchtitan_lite.checkpoint.storage.storage import Storage
from torchtitan_lite.checkpoint.tensor_bytes import as_tensor, bytes_of
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint
from torchtitan_lite.redistribute import Placed
from torchtitan_lite.redistribute.holder_mesh import Holder


@dataclass(frozen=True)
class SavedValues:
    """The state that is not tensors."""

    step: int
    values: Mapping[str, Any]
    """By part."""
    rng: Mapping[str, Mapping[str, Any]]
    """Rank -> its ambient generators."""
    mesh: Mapping[str, int]
    model_only: bool
    dims: Mapping[str, Any] = field(default_factory=dict)
    """Of the model, as its configuration was recorded; empty if it was recorded without."""


def model_dims(run_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The dimensions of the model in a recorded configuration; empty if there are none."""
    model = run_config.get("model")
    dims = model.get("dims") if isinstance(model, Mapping) else None
    return dims if isinstance(dims, Mapping) else {}


class Snapshot(Protocol):
    """One step's state, held by files or by regions of shared memory."""

    @property
    def where(self) -> str:
        """For messages."""
        ...

    @property
    def tensors(self) -> Mapping[str, Placed]:
        """On holders that are named by texts."""
        ...

    @property
    def saved(self) -> SavedValues: ...

    def reach(self, holder: Holder) -> Sequence[int] | None:
        """The ranks that can open a holder; None for all."""
        ...

    def part(self, name: str, holder: Holder) -> torch.Tensor:
        """What a holder has of a tensor, contiguous, on the CPU, not to be written to. Raises
        DamagedCheckpoint, naming where it lies and the tensor, when it is not what was saved."""
        ...

    def read_part(self, name: str, holder: Holder, into: torch.Tensor) -> None:
        """The same into a contiguous tensor on the CPU, of this part's dtype and shape, by any
        thread. When it raises, `into` may hold anything."""
        ...


class StoredSnapshot:
    """A checkpoint in files."""

    def __init__(self, storage: Storage, folder: str) -> None:
        """Raises DamagedCheckpoint where it is not whole, as far as that is seen without reading
        it all, and CheckpointError where another version wrote it."""
        self._storage, self._folder = storage, folder
        self.where = f"{storage.root}/{folder}"
        self.manifest = manifest = read_manifest(storage, folder)
        self._boxes: dict[tuple[str, Holder], BoxEntry] = {}
        self.tensors: dict[str, Placed] = {}
        layouts = layouts_of(manifest)
        for name, entry in manifest.tensors.items():
            layout, dtype = layouts[entry.layout], BY_NAME[entry.dtype]
            self.tensors[name] = Placed(layout, tuple(entry.shape), dtype)
            self._boxes |= {(name, box.file): box for box in entry.boxes}
        self.saved = SavedValues(
            manifest.step,
            manifest.values,
            manifest.rng,
            manifest.mesh,
            manifest.model_only,
            model_dims(manifest.config),
        )

    def reach(self, holder: Holder) -> None:
        """All see the storage."""
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
            raise self._unreadable(entry, error) from None
        if len(raw) != end - first or xxhash.xxh3_64_hexdigest(raw) != entry.xxh3:
            raise self._damaged(name, entry)
        return as_tensor(raw, placed.dtype, shape)

    def read_part(self, name: str, holder: Holder, into: torch.Tensor) -> None:
        entry = self._boxes.get((name, holder))
        if entry is None:
            return
        digest, target = xxhash.xxh3_64(), bytes_of(into)
        if len(target) != entry.bytes[1] - entry.bytes[0]:
            raise self._damaged(name, entry)
        try:
            self._storage.read_into(self._path(entry), entry.bytes[0], target, digest.update)
        except OSError as error:
            raise self._unreadable(entry, error) from None
        if digest.hexdigest() != entry.xxh3:
            raise self._damaged(name, entry)

    def _path(self, entry: BoxEntry) -> str:
        return self.manifest.path(self._folder, entry.file)

    def _file(self, entry: BoxEntry) -> str:
        """For messages."""
        return f"{self._storage.root}/{self._path(entry)}"

    def _unreadable(self, entry: BoxEntry, error: OSError) -> CheckpointError:
        return unreadable(f"{self._file(entry)} cannot be read", error)

    def _damaged(self, name: str, entry: BoxEntry) -> DamagedCheckpoint:
        first, end = entry.bytes
        return DamagedCheckpoint(
            f"{self._file(entry)} is damaged: the checksum of {name} (bytes {first} to "
            f"{end}) does not hold."
        )


@dataclass(frozen=True)
class Origin:
    """The snapshot in shared memory that a run goes on from."""

    start: str
    """Of the run, in which it was taken."""
    step: int


class RememberedSnapshot:
    """A step in the shared memory of processes that have ended, or of this one."""

    def __init__(
        self,
        origin: Origin,
        saved: SavedValues,
        tensors: Mapping[str, Placed],
        regions: Mapping[Holder, tuple[Region, int]],
        reach: Mapping[Holder, Sequence[int]],
    ) -> None:
        """`tensors` lie on `region_name`s, of which `regions` has those that this rank can open, as
        (region, slot). Of generators, `saved` has this rank's alone."""
        self.origin = origin
        self.where = f"step {saved.step} in shared memory"
        self.saved, self.tensors = saved, tensors
        self._regions, self._reach = regions, reach
        self._contents: dict[Holder, _Content] = {}

    def check(self) -> None:
        """Raise DamagedCheckpoint where a region does not hold the step any more: a run of the same
        name is under way, and has filled it with another one while this was read."""
        for region, slot in self._regions.values():
            if region.complete_slots().get(self.origin.step) != slot:
                raise DamagedCheckpoint(
                    f"{region.path} has changed while it was read: the run is under way twice."
                )

    def close(self) -> None:
        """Let go of the regions, whose memory is free once nobody maps it."""
        for region, _ in self._regions.values():
            region.close()

    def reach(self, holder: Holder) -> Sequence[int]:
        """Those on the machine of a region."""
        return self._reach.get(holder, ())

    def part(self, name: str, holder: Holder) -> torch.Tensor:
        content = self._content(holder)
        held = content.held.get(name)
        if held is None:
            raise DamagedCheckpoint(f"{content.path} is damaged: it does not describe {name}.")
        raw = content.data[held.offset : held.offset + held.bytes]
        digest = content.digests.get(name)
        if digest is not None and xxhash.xxh3_64_hexdigest(raw) != digest:
            raise DamagedCheckpoint(f"{content.path} is damaged: {name} in slot {content.slot}.")
        return as_tensor(raw, BY_NAME[held.dtype], held.local_shape)

    def read_part(self, name: str, holder: Holder, into: torch.Tensor) -> None:
        into.copy_(self.part(name, holder))

    def _content(self, holder: Holder) -> "_Content":
        """What a region says of itself, read when something of it is asked for."""
        if holder not in self._contents:
            self._contents[holder] = _Content(*self._regions[holder])
        return self._contents[holder]


class _Content:
    """A slot of a region. Raises DamagedSnapshot where the region's description is wrong."""

    def __init__(self, region: Region, slot: int) -> None:
        about = Description.from_dict(region.description, slot_bytes=region.slot_bytes)
        self.path, self.slot = region.path, slot
        self.data = region.data(slot)
        self.digests = region.digests(slot) or {}
        self.held: Mapping[str, HeldTensor] = {held.name: held for held in about.tensors}


def region_name(rank: Holder) -> Holder:
    """The holder that a rank's region is."""
    return f"memory of rank {rank}"
