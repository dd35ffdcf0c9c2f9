"""Snapshots in shared memory, which outlive the process that took them.

Layer: above errors. Standard library and xxhash only.
"""

from torchtitan_lite.checkpoint.shared_memory.description import HeldTensor, RegionDescription
from torchtitan_lite.checkpoint.shared_memory.folder import (
    PUBLISHED,
    SHARED_MEMORY,
    SharedMemoryRun,
    existing_run_folder,
    free_run,
    list_runs,
    region_files,
    remove_regions,
    run_folder,
    try_flock,
)
from torchtitan_lite.checkpoint.shared_memory.region import Region, SlotState

__all__ = [
    "PUBLISHED",
    "SHARED_MEMORY",
    "HeldTensor",
    "Region",
    "RegionDescription",
    "SharedMemoryRun",
    "SlotState",
    "existing_run_folder",
    "free_run",
    "list_runs",
    "region_files",
    "remove_regions",
    "run_folder",
    "try_flock",
]
