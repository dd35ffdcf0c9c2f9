"""Snapshots that ended processes left in shared memory, and the search for the newest common step.

Two gathers suffice even for thousands of ranks: first, once per machine, the steps of its regions;
then, once per tensor, its layout. Layer: above snapshots.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from torchtitan_lite.checkpoint.shared_memory.description import HeldTensor, RegionDescription
from torchtitan_lite.checkpoint.shared_memory.folder import (
    SHARED_MEMORY,
    existing_run_folder,
    region_files,
)
from torchtitan_lite.checkpoint.shared_memory.region import Region
from torchtitan_lite.checkpoint.snapshots import SavedValues, model_dims
from torchtitan_lite.checkpoint.tensors import DTYPES, tensor_from_bytes
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint, DamagedSnapshot, LayoutError
from torchtitan_lite.host_collectives import all_gather_bytes, all_gather_ints
from torchtitan_lite.log import logger
from torchtitan_lite.redistribute import Layout, TensorSpec, layout_from_json
from torchtitan_lite.redistribute.placements import Holder

_WRONG = (CheckpointError, LayoutError, LookupError, TypeError, ValueError)
"""Errors raised by inconsistent descriptions."""


@dataclass(frozen=True)
class SnapshotOrigin:
    """The snapshot in shared memory that a run resumes from."""

    session: str
    """Session of the run that took it."""
    step: int


class LeftoverSnapshot:
    """A step in the shared memory of ended processes, or of this one."""

    def __init__(
        self,
        origin: SnapshotOrigin,
        saved: SavedValues,
        tensors: Mapping[str, TensorSpec],
        regions: Mapping[Holder, tuple[Region, int]],
        reach: Mapping[Holder, Sequence[int]],
    ) -> None:
        """The holders of `tensors` are `region_name`s; `regions` has those that this rank can open,
        as (region, slot). `saved` has the RNG state of this rank only."""
        self.origin = origin
        self.where = f"step {saved.step} in shared memory"
        self.saved, self.tensors = saved, tensors
        self._regions, self._reach = regions, reach
        self._contents: dict[Holder, _Content] = {}

    def check(self) -> None:
        """Raise DamagedCheckpoint if a region no longer holds the step: a second process of the
        same run is active and has overwritten it."""
        for region, slot in self._regions.values():
            if region.complete_slots().get(self.origin.step) != slot:
                raise DamagedCheckpoint(
                    f"{region.path} changed while it was read: the run is active twice."
                )

    def close(self) -> None:
        """Close the regions, whose memory is freed with their last mapping."""
        for region, _ in self._regions.values():
            region.close()

    def reach(self, holder: Holder) -> Sequence[int]:
        """Return the ranks on the machine of a region."""
        return self._reach.get(holder, ())

    def part(self, name: str, holder: Holder) -> torch.Tensor:
        content = self._content(holder)
        held = content.held.get(name)
        if held is None:
            raise DamagedCheckpoint(f"{content.path} is damaged: {name} is not described.")
        raw = content.data[held.offset : held.offset + held.bytes]
        digest = content.digests.get(name)
        if digest is not None and xxhash.xxh3_64_hexdigest(raw) != digest:
            raise DamagedCheckpoint(f"{content.path} is damaged: {name} in slot {content.slot}.")
        return tensor_from_bytes(raw, DTYPES[held.dtype], held.local_shape)

    def read_part(self, name: str, holder: Holder, into: torch.Tensor) -> None:
        into.copy_(self.part(name, holder))

    def _content(self, holder: Holder) -> "_Content":
        """Return the content of a region, opened on first access."""
        if holder not in self._contents:
            self._contents[holder] = _Content(*self._regions[holder])
        return self._contents[holder]


class _Content:
    """One slot of a region. Raises DamagedSnapshot for an invalid description."""

    def __init__(self, region: Region, slot: int) -> None:
        about = RegionDescription.from_dict(region.description, slot_bytes=region.slot_bytes)
        self.path, self.slot = region.path, slot
        self.data = region.data(slot)
        self.digests = region.digests(slot) or {}
        self.held: Mapping[str, HeldTensor] = {held.name: held for held in about.tensors}


def newest_leftover(run_id: str, rank: int, at_most: int | None = None) -> LeftoverSnapshot | None:
    """Return the newest step of a run, at most `at_most`, that all saving ranks completed, on any
    machines of this run; None if there is none. Every rank must call it."""
    machines = all_gather_ints(_machine())
    regions = _regions(run_id)
    # All ranks of a machine see the same regions.
    is_reported = machines.index(machines[rank]) == rank
    seen = all_gather_bytes(
        _encoded({saver: one.to_json() for saver, one in regions.items()}, is_reported)
    )
    found = newest_common([json.loads(text or "{}") for text in seen], machines, at_most)
    if found is None:
        _close(regions)
        return None
    mine = {
        saver: one
        for saver, one in regions.items()
        if rank in found.reach[saver] and found.session in one.sessions and found.step in one.slots
    }
    _close({saver: one for saver, one in regions.items() if saver not in mine})
    own: dict[str, Any] = {}
    try:
        report = _describe(found, mine, rank)
        own = _generators(found, mine, rank)
    except _WRONG as error:
        # Another process of the same run is active, or another version wrote them.
        report = {"problem": f"rank {rank}: {error!r}"}
    reports = [
        json.loads(text) for text in all_gather_bytes(_encoded(report, bool(report))) if text
    ]
    try:
        if problems := [one["problem"] for one in reports if "problem" in one]:
            raise DamagedSnapshot("; ".join(problems))
        return _snapshot(found, reports, mine, own)
    except _WRONG as error:
        # All ranks raise, because all have the same data.
        logger.warning("Snapshots in shared memory are not usable: %s", error)
        _close(mine)
        return None


@dataclass(frozen=True)
class SnapshotIndex:
    """The newest step that all ranks of a session have, and the ranks that can read it."""

    session: str
    step: int
    reach: Mapping[int, Sequence[int]]
    """Ranks that can open the region of each saving rank."""

    def reporter(self, saver: int) -> int:
        """Return the rank that reports a region: its own rank if possible."""
        able = self.reach[saver]
        return saver if saver in able else able[saver % len(able)]


def newest_common(
    seen: Sequence[Mapping[str, Any]], machines: Sequence[int], at_most: int | None = None
) -> SnapshotIndex | None:
    """Return the newest step, at most `at_most`, of the regions `seen` on the ranks' `machines`;
    one rank reports per machine. A machine that was reassigned to other ranks may still hold
    regions of an earlier session."""
    sessions = sorted(
        {s for by_saver in seen for one in by_saver.values() for s in one["sessions"]}
    )
    known = [
        found
        for session in sessions
        if (found := _newest_of_session(session, seen, machines, at_most))
    ]
    return max(known, key=lambda one: one.step, default=None)


@dataclass(frozen=True)
class _OpenRegion:
    """A region on this machine."""

    region: Region
    slots: Mapping[int, int]
    """Step -> slot, for steps with intact values."""

    @property
    def sessions(self) -> list[str]:
        """Sessions that the region belongs to: two while some ranks have taken their regions over
        and others have not."""
        return self.region.sessions

    def to_json(self) -> dict[str, Any]:
        return {
            "sessions": self.sessions,
            "world_size": self.region.description.get("world_size"),
            "steps": list(self.slots),
        }


def region_name(rank: Holder) -> Holder:
    """Return the holder name of a rank's region."""
    return f"memory of rank {rank}"


def _newest_of_session(
    session: str, seen: Sequence[Mapping[str, Any]], machines: Sequence[int], at_most: int | None
) -> SnapshotIndex | None:
    """Return None if a rank of the session is missing, its ranks disagree on the world size, or
    have no common step."""
    regions: dict[int, Mapping[str, Any]] = {}
    reach: dict[int, Sequence[int]] = {}
    for by_saver, machine in zip(seen, machines, strict=True):
        for saver, region in by_saver.items():
            if session in region["sessions"] and int(saver) not in regions:
                regions[int(saver)] = region
                reach[int(saver)] = [r for r, other in enumerate(machines) if other == machine]
    if {region["world_size"] for region in regions.values()} != {len(regions)}:
        return None
    common = set.intersection(*(set(region["steps"]) for region in regions.values()))
    step = max((step for step in common if at_most is None or step <= at_most), default=None)
    return None if step is None else SnapshotIndex(session, step, reach)


def _regions(run_id: str) -> dict[int, _OpenRegion]:
    """Return the regions by saving rank. Never raises, because the other ranks continue."""
    found: dict[int, _OpenRegion] = {}
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        return found
    try:
        folder = existing_run_folder(run_id)
        paths = {} if folder is None else region_files(folder)
    except (CheckpointError, OSError) as error:
        logger.warning("Shared memory cannot be listed: %s", error)
        return found
    for rank, path in paths.items():
        try:
            # Opened writable only because torch warns about read-only memory.
            found[rank] = _seen(Region.open(path, writable=True))
        except (DamagedSnapshot, OSError) as error:
            logger.warning("%s", error)
    return found


def _seen(region: Region) -> _OpenRegion:
    slots = {}
    for step, slot in region.complete_slots().items():
        try:
            if {"values", "rng"} <= region.values(slot).keys():
                slots[step] = slot
        except DamagedSnapshot as error:
            logger.warning("%s", error)
    return _OpenRegion(region, slots)


def _describe(found: SnapshotIndex, mine: Mapping[int, _OpenRegion], rank: int) -> dict[str, Any]:
    """Return this rank's report: each tensor whose first holder is a region it reports; the values,
    which are equal on all ranks, of the first region; and RNG states of ranks that cannot read
    their own. Empty if there is nothing."""
    report: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    for saver in sorted(found.reach):
        if found.reporter(saver) != rank:
            continue
        seen = mine[saver]
        region, slot = seen.region, seen.slots[found.step]
        about = RegionDescription.from_dict(region.description, slot_bytes=region.slot_bytes)
        texts = [
            json.dumps(given) if layout_from_json(given).mesh.holders[0] == saver else None
            for given in about.layouts
        ]
        for held in about.tensors:
            if (text := texts[held.layout]) is not None:
                number = numbers.setdefault(text, len(numbers))
                report.setdefault("tensors", {})[held.name] = (number, held.shape, held.dtype)
        if saver == min(found.reach):
            values = region.values(slot)["values"]
            dims = dict(model_dims(about.config))
            report |= {"values": values, "mesh": dict(about.mesh), "dims": dims}
        if saver not in found.reach[saver]:
            report.setdefault("rng", {})[str(saver)] = region.values(slot)["rng"]
    if numbers:
        report["layouts"] = [json.loads(text) for text in numbers]
    return report


def _generators(found: SnapshotIndex, mine: Mapping[int, _OpenRegion], rank: int) -> dict[str, Any]:
    """Return the RNG state of this rank, if it can open its region."""
    if rank not in mine:
        return {}
    seen = mine[rank]
    return {str(rank): seen.region.values(seen.slots[found.step])["rng"]}


def _snapshot(
    found: SnapshotIndex,
    reports: Sequence[Mapping[str, Any]],
    mine: Mapping[int, _OpenRegion],
    own: Mapping[str, Any],
) -> LeftoverSnapshot:
    """Assemble the snapshot from the reports of all ranks."""
    tensors: dict[str, TensorSpec] = {}
    rng = dict(own)
    for one in reports:
        layouts = [_on_regions(layout_from_json(given)) for given in one.get("layouts", ())]
        for name, (layout, shape, dtype) in one.get("tensors", {}).items():
            tensors[name] = TensorSpec(layouts[layout], tuple(shape), DTYPES[dtype])
        rng |= one.get("rng", {})
    first = next(one for one in reports if "values" in one)
    return LeftoverSnapshot(
        SnapshotOrigin(found.session, found.step),
        SavedValues(
            found.step, first["values"], rng, first["mesh"], model_only=False, dims=first["dims"]
        ),
        tensors,
        {region_name(saver): (one.region, one.slots[found.step]) for saver, one in mine.items()},
        {region_name(saver): able for saver, able in found.reach.items()},
    )


def _on_regions(layout: Layout) -> Layout:
    return layout.with_holders([region_name(rank) for rank in layout.mesh.holders])


def _encoded(report: Mapping[Any, Any], is_reported: bool) -> bytes:
    return json.dumps(report).encode() if is_reported else b""


def _close(regions: Mapping[int, _OpenRegion]) -> None:
    for one in regions.values():
        one.region.close()


def _machine() -> int:
    """Return a hash that is equal for processes that see the same shared memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    device = os.stat(SHARED_MEMORY).st_dev if SHARED_MEMORY.is_dir() else 0
    identity = f"{platform.node()}-{boot.read_text().strip() if boot.is_file() else ''}-{device}"
    return xxhash.xxh3_64_intdigest(identity.encode()) >> 1
