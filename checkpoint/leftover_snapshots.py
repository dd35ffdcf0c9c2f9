"""Snapshots that ended processes left in shared memory, their own or copies for other machines, and
the search for the newest common step.

Two gathers suffice even for thousands of ranks: first, once per machine, the steps of its regions;
then, once per tensor, its layout.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from torchtitan_lite.checkpoint.history.lineage import SnapshotLineage
from torchtitan_lite.checkpoint.history.snapshot_index import (
    HeldPart,
    HeldRegion,
    Position,
    SnapshotIndex,
    newest_common,
)
from torchtitan_lite.checkpoint.shared_memory.description import HeldTensor, RegionDescription
from torchtitan_lite.checkpoint.shared_memory.folder import (
    COPY,
    OWN,
    SHARED_MEMORY,
    existing_run_folder,
    machine_number,
    region_files,
)
from torchtitan_lite.checkpoint.shared_memory.region import Region, SlotHeader, SlotState
from torchtitan_lite.checkpoint.snapshots import SavedValues, model_dims
from torchtitan_lite.checkpoint.tensors import DTYPES, tensor_from_bytes
from torchtitan_lite.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    DamagedSnapshot,
    LayoutError,
)
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.host_collectives import all_gather_bytes, all_gather_ints
from torchtitan_lite.distributed.redistribute import Layout, TensorSpec, layout_from_json
from torchtitan_lite.distributed.redistribute.planning.placements import Holder

_WRONG = (CheckpointError, LayoutError, LookupError, TypeError, ValueError)
"""Errors raised by inconsistent descriptions."""


@dataclass(frozen=True)
class SnapshotOrigin:
    """The snapshot in shared memory that a run resumes from."""

    generation_id: str
    """Generation of the run that took it."""
    step: int
    segment: int = 0
    """Segment of the run's history, see `lineage`."""
    copied_position: Position | None = None
    """Newest position, of any generation, of which each part exists twice: with its own rank and as
    a copy."""
    copied_generation_id: str | None = None
    """Generation of `copied_position`."""
    damaged: frozenset[HeldPart] = frozenset()
    """Parts found to be damaged before, which must not be used again."""

    @property
    def position(self) -> Position:
        """Position in the run's history."""
        return Position(self.segment, self.step)

    @property
    def generation_id_to_keep(self) -> str:
        """Generation that regions must still belong to when they are taken over: that of the
        copies, if there are any."""
        return self.copied_generation_id or self.generation_id


class LeftoverSnapshot:
    """A step in the shared memory of ended processes, or of this one."""

    def __init__(
        self,
        origin: SnapshotOrigin,
        saved: SavedValues,
        tensors: Mapping[str, TensorSpec],
        regions: Mapping[Holder, tuple[Region, int]],
        reach: Mapping[Holder, Sequence[int]],
        copies: Collection[int] = (),
    ) -> None:
        """The holders of `tensors` are `region_name`s; `regions` has those that this rank can open,
        as (region, slot). `saved` has the RNG state of this rank only; the parts of `copies` are
        read from buddy copies."""
        self.origin = origin
        self.where = f"step {saved.step} in shared memory"
        if copies:
            ranks = ", ".join(map(str, sorted(copies)))
            self.where += f", with the buddy copies of ranks {ranks}"
        self.saved, self.tensors = saved, tensors
        self._regions, self._reach = regions, reach
        self._contents: dict[Holder, _Content] = {}
        self._copies = {region_name(rank) for rank in copies}
        self.damaged: set[HeldPart] = set()
        """Parts that this rank has found to be damaged."""

    def check(self) -> None:
        """Raise DamagedCheckpoint if a region no longer holds the step: a second process of the
        same run is active and has overwritten it."""
        for region, slot in self._regions.values():
            if region.slots()[slot] != SlotHeader(self.origin.step, SlotState.COMPLETE):
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
        damage = ""
        if digest is None and holder in self._copies:
            damage = "has no checksum"
        elif digest is not None and xxhash.xxh3_64_hexdigest(raw) != digest:
            damage = f"in slot {content.slot}"
        if damage:
            is_copy = holder in self._copies
            saver = self._regions[holder][0].rank
            self.damaged.add(HeldPart(saver, is_copy, self.origin.position))
            raise DamagedCheckpoint(f"{content.path} is damaged: {name} {damage}.")
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


def newest_leftover(
    run_id: str,
    rank: int,
    lineage: SnapshotLineage,
    at_most: int | None = None,
    before: Position | None = None,
    excluded: Collection[HeldPart] = (),
) -> LeftoverSnapshot | None:
    """Return the newest step of a run's history, at most `at_most` and earlier than `before`, that
    all saving ranks completed, on any machines of this run, without the parts `excluded`; None if
    there is none. Every rank must call it."""
    machines = all_gather_ints(machine_number())
    regions = _regions(run_id)
    # All ranks of a machine see the same regions.
    is_reported = machines.index(machines[rank]) == rank
    held = [region.held(saver, is_copy) for (saver, is_copy), region in regions.items()]
    texts = all_gather_bytes(_encoded([held_region.to_json() for held_region in held], is_reported))
    seen = [
        [HeldRegion.from_json(held_region) for held_region in json.loads(text or "[]")]
        for text in texts
    ]
    index = newest_common(seen, machines, at_most, lineage.permitted(), before, excluded)
    if index is None:
        _close(regions)
        return None
    mine = {
        saver: region
        for (saver, is_copy), region in regions.items()
        if rank in index.reach[saver]
        and is_copy == (saver in index.copies)
        and index.generation_id in region.generation_ids
        and index.position in region.slots
    }
    kept = {id(region) for region in mine.values()}
    _close({key: region for key, region in regions.items() if id(region) not in kept})
    own: dict[str, Any] = {}
    try:
        report = _describe(index, mine, rank)
        own = _generators(index, mine, rank)
    except _WRONG as error:
        # Another process of the same run is active, or another version wrote them.
        report = {"problem": f"rank {rank}: {error!r}"}
    reports = [
        json.loads(text) for text in all_gather_bytes(_encoded(report, bool(report))) if text
    ]
    try:
        if problems := [report["problem"] for report in reports if "problem" in report]:
            raise DamagedSnapshot("; ".join(problems))
        return _snapshot(index, reports, mine, own, excluded)
    except _WRONG as error:
        # All ranks raise, because all have the same data.
        logger.warning("Snapshots in shared memory are not usable: %s", error)
        _close(mine)
        return None


@dataclass(frozen=True)
class _OpenRegion:
    """A region on this machine."""

    region: Region
    slots: Mapping[Position, int]
    """Position -> slot, for steps with intact values."""

    @property
    def generation_ids(self) -> list[str]:
        """Generations that the region belongs to: two while some ranks have taken their regions
        over and others have not."""
        return self.region.generation_ids

    def held(self, saver: int, is_copy: bool) -> HeldRegion:
        """Return the report of the region."""
        world_size = int(self.region.description.get("world_size", 0))
        return HeldRegion(saver, is_copy, self.generation_ids, world_size, list(self.slots))


def region_name(rank: Holder) -> Holder:
    """Return the holder name of a rank's region."""
    return f"memory of rank {rank}"


def _regions(run_id: str) -> dict[tuple[int, bool], _OpenRegion]:
    """Return the regions by saving rank and whether they are copies. Never raises, because the
    other ranks continue."""
    regions: dict[tuple[int, bool], _OpenRegion] = {}
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        return regions
    paths: dict[tuple[int, bool], Path] = {}
    try:
        folder = existing_run_folder(run_id)
        if folder is not None:
            for kind in (OWN, COPY):
                for rank, path in region_files(folder, kind).items():
                    paths[rank, kind == COPY] = path
    except (CheckpointError, OSError) as error:
        logger.warning("Shared memory cannot be listed: %s", error)
        return regions
    for key, path in paths.items():
        try:
            # Opened writable only because tensors on read-only memory would be copies.
            regions[key] = _seen(Region.open(path, writable=True), is_copy=key[1])
        except (DamagedSnapshot, OSError) as error:
            logger.warning("%s", error)
    return regions


def _seen(region: Region, *, is_copy: bool) -> _OpenRegion:
    slots = {}
    for slot, header in enumerate(region.slots()):
        if header.state != SlotState.COMPLETE:
            continue
        try:
            if is_copy and region.digests(slot) is None:
                # Its process was killed before it stored them.
                continue
            values = region.values(slot)
            if {"values", "rng"} <= values.keys():
                slots[Position(int(values.get("segment", 0)), header.step)] = slot
        except (DamagedSnapshot, TypeError, ValueError) as error:
            logger.warning("%s", error)
    return _OpenRegion(region, slots)


def _describe(index: SnapshotIndex, mine: Mapping[int, _OpenRegion], rank: int) -> dict[str, Any]:
    """Return this rank's report: each tensor whose first holder is a region it reports; the values,
    which are equal on all ranks, of the first region; and RNG states of ranks that cannot read
    their own. Empty if there is nothing."""
    report: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    for saver in sorted(index.reach):
        if index.reporter(saver) != rank:
            continue
        seen = mine[saver]
        region, slot = seen.region, seen.slots[index.position]
        about = RegionDescription.from_dict(region.description, slot_bytes=region.slot_bytes)
        texts = [
            json.dumps(layout) if layout_from_json(layout).mesh.holders[0] == saver else None
            for layout in about.layouts
        ]
        for held in about.tensors:
            if (text := texts[held.layout]) is not None:
                number = numbers.setdefault(text, len(numbers))
                report.setdefault("tensors", {})[held.name] = (number, held.shape, held.dtype)
        if saver == min(index.reach):
            values = region.values(slot)["values"]
            dims = dict(model_dims(about.config))
            report |= {"values": values, "mesh": dict(about.mesh), "dims": dims}
        if saver not in index.reach[saver]:
            report.setdefault("rng", {})[str(saver)] = region.values(slot)["rng"]
    if numbers:
        report["layouts"] = [json.loads(text) for text in numbers]
    return report


def _generators(index: SnapshotIndex, mine: Mapping[int, _OpenRegion], rank: int) -> dict[str, Any]:
    """Return the RNG state of this rank, if it can open its region."""
    if rank not in mine:
        return {}
    seen = mine[rank]
    return {str(rank): seen.region.values(seen.slots[index.position])["rng"]}


def _snapshot(
    index: SnapshotIndex,
    reports: Sequence[Mapping[str, Any]],
    mine: Mapping[int, _OpenRegion],
    own: Mapping[str, Any],
    excluded: Collection[HeldPart],
) -> LeftoverSnapshot:
    """Assemble the snapshot from the reports of all ranks."""
    tensors: dict[str, TensorSpec] = {}
    rng = dict(own)
    for report in reports:
        layouts = [_on_regions(layout_from_json(layout)) for layout in report.get("layouts", ())]
        for name, (layout, shape, dtype) in report.get("tensors", {}).items():
            tensors[name] = TensorSpec(layouts[layout], tuple(shape), DTYPES[dtype])
        rng |= report.get("rng", {})
    first = next(report for report in reports if "values" in report)
    step = index.position.step
    slots = {
        region_name(saver): (region.region, region.slots[index.position])
        for saver, region in mine.items()
    }
    return LeftoverSnapshot(
        SnapshotOrigin(
            index.generation_id,
            step,
            index.position.segment,
            index.copied_position,
            index.copied_generation_id,
            frozenset(excluded),
        ),
        SavedValues(
            step, first["values"], rng, first["mesh"], model_only=False, dims=first["dims"]
        ),
        tensors,
        slots,
        {region_name(saver): able for saver, able in index.reach.items()},
        index.copies,
    )


def _on_regions(layout: Layout) -> Layout:
    return layout.with_holders([region_name(rank) for rank in layout.mesh.holders])


def _encoded(report: Any, is_reported: bool) -> bytes:
    return json.dumps(report).encode() if is_reported else b""


def _close(regions: Mapping[Any, _OpenRegion]) -> None:
    for region in regions.values():
        region.region.close()
