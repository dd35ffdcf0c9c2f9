"""Snapshots in shared memory, which outlive the process that took them.

Standard library and xxhash only.
"""

from torchtitan_lite.checkpoint.shared_memory.description import HeldTensor, RegionDescription
from torchtitan_lite.checkpoint.shared_memory.folder import (
    COPY,
    OWN,
    PUBLISHED,
    SHARED_MEMORY,
    RankLock,
    SharedMemoryRun,
    existing_run_folder,
    free_run,
    list_runs,
    region_files,
    release_flock,
    remove_regions,
    remove_unpublished,
    shared_memory_folder,
    slot_lock_path,
    try_flock,
    unpublish,
    user_folder,
)
from torchtitan_lite.checkpoint.shared_memory.region import Region, SlotState

__all__ = [
    "COPY",
    "OWN",
    "PUBLISHED",
    "SHARED_MEMORY",
    "HeldTensor",
    "RankLock",
    "Region",
    "RegionDescription",
    "SharedMemoryRun",
    "SlotState",
    "existing_run_folder",
    "free_run",
    "list_runs",
    "region_files",
    "release_flock",
    "remove_regions",
    "remove_unpublished",
    "shared_memory_folder",
    "slot_lock_path",
    "try_flock",
    "unpublish",
    "user_folder",
]
