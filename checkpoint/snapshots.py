"""A saved state, wherever it lies: what it holds, and the parts of its holders.

A checkpoint in files and one in shared memory are read in the same way, and whoever wants to serve
state to others (a replica that heals another) reads it from here. Layer: above manifest and memory.

Invariant: a part is given only if its checksum holds, where it has one; nothing is unpickled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash

from torchtitan_lite.checkpoint.dtypes import BY_NAME
from torchtitan_lite.checkpoint.manifest import BoxEntry, layouts_of, read_manifest
from torchtitan_lite.checkpoint.memory.description import Description, HeldTensor
from torchtitan_lite.checkpoint.memory.region import Region
from torchtitan_lite.checkpoint.storage.storage import Storage
from torchtitan_lite.checkpoint.tensor_bytes import as_tensor, bytes_of
from torchtitan_lite.errors import DamagedCheckpoint, DamagedSnapshot
from torchtitan_lite.redistribute import Placed, layout_from_json
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
            manifest.step, manifest.values, manifest.rng, manifest.mesh, manifest.model_only
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
        path, (first, end) = f"{self._folder}/{entry.file}", entry.bytes
        try:
            raw = self._storage.read(path, first, end)
        except OSError as error:
            raise self._unreadable(entry, error) from None
        if len(raw) != end - first or xxhash.xxh3_64_hexdigest(raw) != entry.xxh3:
            raise self._damaged(name, entry)
        return as_tensor(raw, placed.dtype, shape)

    def read_part(self, name: str, holder: Holder, into: torch.Tensor) -> None:
        entry = self._boxes.get((name, holder))
        if entry is None:
            return
        path, digest, target = f"{self._folder}/{entry.file}", xxhash.xxh3_64(), bytes_of(into)
        if len(target) != entry.bytes[1] - entry.bytes[0]:
            raise self._damaged(name, entry)
        try:
            self._storage.read_into(path, entry.bytes[0], target, digest.update)
        except OSError as error:
            raise self._unreadable(entry, error) from None
        if digest.hexdigest() != entry.xxh3:
            raise self._damaged(name, entry)

    def _unreadable(self, entry: BoxEntry, error: OSError) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self.where}/{entry.file} cannot be read: {error}")

    def _damaged(self, name: str, entry: BoxEntry) -> DamagedCheckpoint:
        first, end = entry.bytes
        return DamagedCheckpoint(
            f"{self.where}/{entry.file} is damaged: the checksum of {name} (bytes {first} to "
            f"{end}) does not hold."
        )


class RememberedSnapshot:
    """A step in the shared memory of processes that have ended, or of this one."""

    def __init__(
        self,
        step: int,
        regions: Mapping[int, tuple[Region, int]],
        told: Sequence[Mapping[str, Any]],
        reach: Mapping[Holder, Sequence[int]],
    ) -> None:
        """`regions` has (region, slot) of each saving rank that this one can open. `told` is what
        `tell` says of every saving rank, in their order."""
        self.where = f"step {step} in shared memory"
        self._regions = {region_name(rank): found for rank, found in regions.items()}
        self._digests = {
            holder: region.digests(slot) or {} for holder, (region, slot) in self._regions.items()
        }
        self._held: dict[tuple[str, Holder], HeldTensor] = {}
        self._reach = reach
        self.tensors: dict[str, Placed] = {}
        for one in told:
            live = map(layout_from_json, one["layouts"])
            layouts = [
                lay.held_by([region_name(rank) for rank in lay.mesh.holders]) for lay in live
            ]
            for name, (layout, shape, dtype) in one["tensors"].items():
                found = Placed(layouts[layout], tuple(shape), BY_NAME[dtype])
                self.tensors.setdefault(name, found)
        for holder, (region, _) in self._regions.items():
            about = Description.from_dict(region.description, slot_bytes=region.slot_bytes)
            self._held |= {(held.name, holder): held for held in about.tensors}
        self.saved = SavedValues(
            step,
            told[0]["values"],
            {str(rank): one["rng"] for rank, one in enumerate(told)},
            told[0]["mesh"],
            False,
        )

    def close(self) -> None:
        """Let go of the regions, whose memory is free once nobody maps it."""
        for region, _ in self._regions.values():
            region.close()

    def reach(self, holder: Holder) -> Sequence[int]:
        """Those on the machine of a region."""
        return self._reach.get(holder, ())

    def part(self, name: str, holder: Holder) -> torch.Tensor:
        region, slot = self._regions[holder]
        held = self._held[name, holder]
        raw = region.data(slot)[held.offset : held.offset + held.bytes]
        digest = self._digests[holder].get(name)
        if digest is not None and xxhash.xxh3_64_hexdigest(raw) != digest:
            raise DamagedCheckpoint(f"{region.path} is damaged: {name} in slot {slot}.")
        return as_tensor(raw, BY_NAME[held.dtype], held.local_shape)

    def read_part(self, name: str, holder: Holder, into: torch.Tensor) -> None:
        into.copy_(self.part(name, holder))


def tell(region: Region, slot: int) -> dict[str, Any]:
    """What the other ranks must know of a slot. Raises DamagedSnapshot."""
    about = Description.from_dict(region.description, slot_bytes=region.slot_bytes)
    values = region.values(slot)
    if not {"values", "rng"} <= values.keys():
        raise DamagedSnapshot(f"{region.path} is damaged: the values of slot {slot}.")
    return {
        "layouts": list(about.layouts),
        "tensors": {held.name: (held.layout, held.shape, held.dtype) for held in about.tensors},
        "values": values["values"],
        "rng": values["rng"],
        "mesh": dict(about.mesh),
    }


def region_name(rank: Holder) -> Holder:
    """The holder that a rank's region is."""
    return f"memory of rank {rank}"
