"""Snapshots in shared memory, which outlive the process that took them.

Layer: above errors. Standard library and xxhash only.
"""

from torchtitan_lite.checkpoint.shared_memory.folder import (
    SHARED_MEMORY,
    SharedMemoryRun,
    free_run,
    list_runs,
    region_files,
    remove_regions,
)
from torchtitan_lite.checkpoint.shared_memory.region import Region, SlotState

__all__ = [
    "SHARED_MEMORY",
    "Region",
    "SharedMemoryRun",
    "SlotState",
    "free_run",
    "list_runs",
    "region_files",
    "remove_regions",
]
