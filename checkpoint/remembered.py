"""Finds the newest step that processes which have ended left whole in shared memory.

Ranks tell each other little, so that a restart of a thousand is no matter of minutes: first, once
for each machine, which steps its regions hold; then, once for each tensor, where it lies.
Layer: above snapshots.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from torchtitan_lite.checkpoint.dtypes import BY_NAME
from torchtitan_lite.checkpoint.memory.description import Description
from torchtitan_lite.checkpoint.memory.folder import SHARED_MEMORY, known_folder, regions_in
from torchtitan_lite.checkpoint.memory.region import Region
from torchtitan_lite.checkpoint.snapshots import (
    Origin,
    RememberedSnapshot,
    SavedValues,
    model_dims,
    region_name,
)
from torchtitan_lite.errors import CheckpointError, DamagedSnapshot, LayoutError
from torchtitan_lite.log import logger
from torchtitan_lite.messages import gather_numbers, gather_texts
from torchtitan_lite.redistribute import Layout, Placed, layout_from_json

_WRONG = (CheckpointError, LayoutError, LookupError, TypeError, ValueError)
"""What descriptions that do not fit together raise."""


def newest_remembered(
    run_id: str, rank: int, at_most: int | None = None
) -> RememberedSnapshot | None:
    """The newest step of a run, not above `at_most`, that all the ranks that were saving have
    complete, on whatever machines of this run; None where there is none. Every rank must call
    it."""
    machines = gather_numbers(_machine())
    regions = _regions(run_id)
    # Ranks of a machine see the same.
    speaks = machines.index(machines[rank]) == rank
    seen = gather_texts(_encoded({saver: one.told() for saver, one in regions.items()}, speaks))
    found = newest_of([json.loads(text or "{}") for text in seen], machines, at_most)
    if found is None:
        _close(regions)
        return None
    mine = {
        saver: one
        for saver, one in regions.items()
        if rank in found.reach[saver] and found.start in one.starts and found.step in one.slots
    }
    _close({saver: one for saver, one in regions.items() if saver not in mine})
    own: dict[str, Any] = {}
    try:
        told = _described(found, mine, rank)
        own = _generators(found, mine, rank)
    except _WRONG as error:
        # A run of the same name is under way, or another version has written them.
        told = {"problem": f"rank {rank}: {error!r}"}
    said = [json.loads(text) for text in gather_texts(_encoded(told, bool(told))) if text]
    try:
        if problems := [one["problem"] for one in said if "problem" in one]:
            raise DamagedSnapshot("; ".join(problems))
        return _snapshot(found, said, mine, own)
    except _WRONG as error:
        # On all ranks alike, since it comes from what all were told.
        logger.warning("The snapshots in shared memory cannot be used: %s", error)
        _close(mine)
        return None


@dataclass(frozen=True)
class Known:
    """The newest step that all ranks of a start have."""

    start: str
    step: int
    reach: Mapping[int, Sequence[int]]
    """The ranks that can open the region of each rank that was saving."""

    def speaker(self, saver: int) -> int:
        """The rank that tells the others of a region: its own, if it can."""
        able = self.reach[saver]
        return saver if saver in able else able[saver % len(able)]


def newest_of(
    seen: Sequence[Mapping[str, Any]], machines: Sequence[int], at_most: int | None = None
) -> Known | None:
    """The newest step, not above `at_most`, of the regions that were `seen` on the `machines` of
    the ranks; where several ranks are on one, one of them speaks for all. A machine that was given
    other ranks since still has the regions of an earlier start."""
    starts = sorted({s for by_saver in seen for one in by_saver.values() for s in one["starts"]})
    known = [found for start in starts if (found := _of_start(start, seen, machines, at_most))]
    return max(known, key=lambda one: one.step, default=None)


def _of_start(
    start: str, seen: Sequence[Mapping[str, Any]], machines: Sequence[int], at_most: int | None
) -> Known | None:
    """None where a rank of the start is missing, or where its ranks speak of different numbers of
    ranks, or have no step in common."""
    regions: dict[int, Mapping[str, Any]] = {}
    reach: dict[int, Sequence[int]] = {}
    for by_saver, machine in zip(seen, machines, strict=True):
        for saver, region in by_saver.items():
            if start in region["starts"] and int(saver) not in regions:
                regions[int(saver)] = region
                reach[int(saver)] = [r for r, other in enumerate(machines) if other == machine]
    if {region["world_size"] for region in regions.values()} != {len(regions)}:
        return None
    common = set.intersection(*(set(region["steps"]) for region in regions.values()))
    step = max((step for step in common if at_most is None or step <= at_most), default=None)
    return None if step is None else Known(start, step, reach)


@dataclass(frozen=True)
class _Seen:
    """A region on this machine."""

    region: Region
    slots: Mapping[int, int]
    """Step -> slot, for those whose values are whole."""

    @property
    def starts(self) -> list[str]:
        """While a later start takes the regions over, some ranks may have come so far and others
        not: then these are of both."""
        return self.region.starts

    def told(self) -> dict[str, Any]:
        return {
            "starts": self.starts,
            "world_size": self.region.description.get("world_size"),
            "steps": list(self.slots),
        }


def _regions(run_id: str) -> dict[int, _Seen]:
    """By the rank that was saving. Raises nothing: the other ranks go on."""
    found: dict[int, _Seen] = {}
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        return found
    try:
        folder = known_folder(run_id)
        paths = {} if folder is None else regions_in(folder)
    except (CheckpointError, OSError) as error:
        logger.warning("Shared memory cannot be looked at: %s", error)
        return found
    for rank, path in paths.items():
        try:
            # Writable, or torch warns of each tensor on it; nothing is written.
            found[rank] = _seen(Region.open(path, writable=True))
        except (DamagedSnapshot, OSError) as error:
            logger.warning("%s", error)
    return found


def _seen(region: Region) -> _Seen:
    slots = {}
    for step, slot in region.complete_slots().items():
        try:
            if {"values", "rng"} <= region.values(slot).keys():
                slots[step] = slot
        except DamagedSnapshot as error:
            logger.warning("%s", error)
    return _Seen(region, slots)


def _described(found: Known, mine: Mapping[int, _Seen], rank: int) -> dict[str, Any]:
    """What this rank tells the others of the regions that it speaks for: each tensor that lies
    first in one of them; the values, which are the same on all, of the first; and the generators of
    ranks that cannot look themselves. Empty where that is nothing."""
    told: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    for saver in sorted(found.reach):
        if found.speaker(saver) != rank:
            continue
        seen = mine[saver]
        region, slot = seen.region, seen.slots[found.step]
        about = Description.from_dict(region.description, slot_bytes=region.slot_bytes)
        texts = [
            json.dumps(given) if layout_from_json(given).mesh.holders[0] == saver else None
            for given in about.layouts
        ]
        for held in about.tensors:
            if (text := texts[held.layout]) is not None:
                number = numbers.setdefault(text, len(numbers))
                told.setdefault("tensors", {})[held.name] = (number, held.shape, held.dtype)
        if saver == min(found.reach):
            values = region.values(slot)["values"]
            dims = dict(model_dims(about.config))
            told |= {"values": values, "mesh": dict(about.mesh), "dims": dims}
        if saver not in found.reach[saver]:
            told.setdefault("rng", {})[str(saver)] = region.values(slot)["rng"]
    if numbers:
        told["layouts"] = [json.loads(text) for text in numbers]
    return told


def _generators(found: Known, mine: Mapping[int, _Seen], rank: int) -> dict[str, Any]:
    """Those of this rank, where it can look itself."""
    if rank not in mine:
        return {}
    seen = mine[rank]
    return {str(rank): seen.region.values(seen.slots[found.step])["rng"]}


def _snapshot(
    found: Known,
    said: Sequence[Mapping[str, Any]],
    mine: Mapping[int, _Seen],
    own: Mapping[str, Any],
) -> RememberedSnapshot:
    """Put together of what all ranks have said."""
    tensors: dict[str, Placed] = {}
    rng = dict(own)
    for one in said:
        layouts = [_on_regions(layout_from_json(given)) for given in one.get("layouts", ())]
        for name, (layout, shape, dtype) in one.get("tensors", {}).items():
            tensors[name] = Placed(layouts[layout], tuple(shape), BY_NAME[dtype])
        rng |= one.get("rng", {})
    first = next(one for one in said if "values" in one)
    return RememberedSnapshot(
        Origin(found.start, found.step),
        SavedValues(
            found.step, first["values"], rng, first["mesh"], model_only=False, dims=first["dims"]
        ),
        tensors,
        {region_name(saver): (one.region, one.slots[found.step]) for saver, one in mine.items()},
        {region_name(saver): able for saver, able in found.reach.items()},
    )


def _on_regions(layout: Layout) -> Layout:
    return layout.held_by([region_name(rank) for rank in layout.mesh.holders])


def _encoded(told: Mapping[Any, Any], speaks: bool) -> bytes:
    return json.dumps(told).encode() if speaks else b""


def _close(regions: Mapping[int, _Seen]) -> None:
    for one in regions.values():
        one.region.close()


def _machine() -> int:
    """The same for processes that see the same shared memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    device = os.stat(SHARED_MEMORY).st_dev if SHARED_MEMORY.is_dir() else 0
    told = f"{platform.node()}-{boot.read_text().strip() if boot.is_file() else ''}-{device}"
    return xxhash.xxh3_64_intdigest(told.encode()) >> 1
