"""Finds the newest step that processes which have ended left whole in shared memory.

Layer: above snapshots.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.memory.folder import SHARED_MEMORY, regions_in, run_folder
from torchtitan_lite.checkpoint.memory.region import Region
from torchtitan_lite.checkpoint.snapshots import RememberedSnapshot, region_name, tell
from torchtitan_lite.errors import CheckpointError, DamagedSnapshot, LayoutError
from torchtitan_lite.log import logger
from torchtitan_lite.messages import gather_texts
from torchtitan_lite.redistribute.holder_mesh import Holder


def newest_remembered(
    run_id: str, rank: int, at_most: int | None = None
) -> RememberedSnapshot | None:
    """The newest step of a run, not above `at_most`, that all the ranks that were saving have
    complete, on whatever machines of this run; None where there is none. Every rank must call
    it."""
    regions = _regions(run_id)
    told = [json.loads(text) for text in gather_texts(json.dumps(_told(regions)).encode())]
    found = newest_of(told, at_most)
    if found is None:
        return None
    mine = told[rank]["regions"]
    try:
        return RememberedSnapshot(
            found.step,
            {
                saver: (region, slots[found.step])
                for saver, (region, slots) in regions.items()
                if mine[str(saver)]["start"] == found.start and found.step in slots
            },
            found.told,
            found.reach,
        )
    except (CheckpointError, LayoutError, LookupError, TypeError, ValueError) as error:
        logger.warning("The snapshots in shared memory cannot be used: %s", error)
        return None


@dataclass(frozen=True)
class Known:
    """The newest step that all ranks of a start have."""

    start: str
    step: int
    told: Sequence[Mapping[str, Any]]
    """What `tell` says of each saving rank, in their order."""
    reach: Mapping[Holder, Sequence[int]]


def newest_of(told: Sequence[Mapping[str, Any]], at_most: int | None = None) -> Known | None:
    """The newest step, not above `at_most`, of what the ranks have `told` of the regions that they
    see. A machine that was given other ranks since still has those of an earlier start."""
    starts = sorted({one["start"] for by_rank in told for one in by_rank["regions"].values()})
    known = [found for start in starts if (found := _of_start(start, told, at_most))]
    return max(known, key=lambda one: one.step, default=None)


def _of_start(start: str, told: Sequence[Mapping[str, Any]], at_most: int | None) -> Known | None:
    """None where a rank of the start is missing, or where its ranks speak of different numbers of
    ranks, or have no step in common."""
    machines = [one["machine"] for one in told]
    # Ranks of one machine see the same; what each saving rank has is taken from who sees it first.
    seen: dict[int, Mapping[str, Any]] = {}
    reach: dict[Holder, Sequence[int]] = {}
    for number, one in enumerate(told):
        for saver, region in one["regions"].items():
            if region["start"] == start and int(saver) not in seen:
                seen[int(saver)] = region
                able = [r for r, machine in enumerate(machines) if machine == machines[number]]
                reach[region_name(int(saver))] = able
    if {region["world_size"] for region in seen.values()} != {len(seen)}:
        return None
    common = map(int, set.intersection(*(set(region["steps"]) for region in seen.values())))
    step = max((step for step in common if at_most is None or step <= at_most), default=None)
    if step is None:
        return None
    return Known(start, step, [seen[saver]["steps"][str(step)] for saver in sorted(seen)], reach)


def _regions(run_id: str) -> dict[int, tuple[Region, dict[int, int]]]:
    """By saving rank: its region on this machine, and step -> slot."""
    found = {}
    try:
        paths = regions_in(run_folder(run_id)) if _has_shared_memory() else {}
    except CheckpointError as error:
        logger.warning("%s", error)
        return {}
    for rank, path in paths.items():
        try:
            region = Region.open(path, writable=True)
        except DamagedSnapshot as error:
            logger.warning("%s", error)
            continue
        found[rank] = (region, region.complete_slots())
    return found


def _has_shared_memory() -> bool:
    return SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)


def _told(regions: Mapping[int, tuple[Region, Mapping[int, int]]]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for rank, (region, slots) in regions.items():
        steps = {}
        for step, slot in slots.items():
            try:
                steps[str(step)] = tell(region, slot)
            except DamagedSnapshot as error:
                logger.warning("%s", error)
        told[str(rank)] = {
            "start": str(region.description.get("session", "")),
            "world_size": region.description["world_size"],
            "steps": steps,
        }
    return {"machine": _machine(), "regions": told}


def _machine() -> str:
    """The same for processes that see the same shared memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    device = os.stat(SHARED_MEMORY).st_dev if SHARED_MEMORY.is_dir() else 0
    return f"{platform.node()}-{boot.read_text().strip() if boot.is_file() else ''}-{device}"
