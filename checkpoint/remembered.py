"""Finds the newest step that processes which have ended left whole in shared memory.

Layer: above snapshots.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.memory.folder import SHARED_MEMORY, regions_in, run_folder
from torchtitan_lite.checkpoint.memory.region import Region
from torchtitan_lite.checkpoint.snapshots import RememberedSnapshot, region_name, tell
from torchtitan_lite.errors import CheckpointError, DamagedSnapshot, LayoutError
from torchtitan_lite.log import logger
from torchtitan_lite.messages import gather_texts
from torchtitan_lite.redistribute.holder_mesh import Holder


def newest_remembered(run_id: str, rank: int) -> RememberedSnapshot | None:
    """The newest step of a run that all the ranks that were saving have complete, on whatever
    machines of this run; None where there is none. Every rank must call it."""
    regions = _regions(run_id)
    told = [json.loads(text) for text in gather_texts(json.dumps(_told(regions)).encode())]
    machines = [one["machine"] for one in told]
    # Ranks of one machine see the same; what each saving rank has is taken from who sees it first.
    seen: dict[int, dict[str, Any]] = {}
    reach: dict[Holder, Sequence[int]] = {}
    for number, one in enumerate(told):
        for saver, steps in one["regions"].items():
            if int(saver) not in seen:
                seen[int(saver)] = steps
                able = [r for r, machine in enumerate(machines) if machine == machines[number]]
                reach[region_name(int(saver))] = able
    step = _common_step(seen)
    if step is None:
        return None
    try:
        return RememberedSnapshot(
            step,
            {r: (region, slots[step]) for r, (region, slots) in regions.items() if step in slots},
            [seen[saver]["steps"][str(step)] for saver in sorted(seen)],
            reach,
        )
    except (CheckpointError, LayoutError, LookupError, TypeError, ValueError) as error:
        logger.warning("The snapshots in shared memory cannot be used: %s", error)
        return None


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
        told[str(rank)] = {"world_size": region.description["world_size"], "steps": steps}
    return {"machine": _machine(), "regions": told}


def _machine() -> str:
    """The same for processes that see the same shared memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    device = os.stat(SHARED_MEMORY).st_dev if SHARED_MEMORY.is_dir() else 0
    return f"{platform.node()}-{boot.read_text().strip() if boot.is_file() else ''}-{device}"


def _common_step(seen: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The newest step that every saving rank has; None where one is missing, or where ranks speak
    of different numbers of ranks."""
    if not seen or {one["world_size"] for one in seen.values()} != {len(seen)}:
        return None
    common = set.intersection(*(set(one["steps"]) for one in seen.values()))
    return max(map(int, common), default=None)
