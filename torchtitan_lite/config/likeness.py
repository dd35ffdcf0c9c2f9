"""What all replicas of a run must have in common, in one word. Layer: above schema.

Everything counts that may change what is trained or what replicas do together, and a key that is
added later does by itself. What does not: paths, which machines have each their own; time limits;
what only saves time or memory; what is written and told.
"""

import hashlib
import json
from collections.abc import Iterator

from torchtitan_lite.config.schema import Config

_SECTIONS = (
    "model",
    "training",
    "optimizer",
    "lr_scheduler",
    "parallelism",
    "checkpoint",
    "fault_tolerance",
    "anomalies",
    "debug",
    "quantize",
)
_MAY_DIFFER = {
    "model": ("hf_assets_path", "print_after_conversion"),
    "training": (
        "dataset_path",
        "cache_folder",
        "dataloader",
        "gc_freq",
        "gc_debug",
    ),
    "parallelism": ("pipeline_parallel_schedule_csv",),
    "checkpoint": (
        "folder",
        "ram_interval",
        "snapshot_gib",
        "preemption_grace_s",
        "writer_nice",
        "writer_mib_per_s",
        "load_step",
        "initial_load_path",
        "export_dtype",
        "async_mode",
    ),
    "fault_tolerance": (
        "replica_id",
        "group_size",
        "process_group_timeout_ms",
        "quorum_timeout_s",
        "hang_timeout_s",
        "heal_interface",
        "heal_connections",
    ),
    "debug": (
        "sample_ledger",
        "explicit_redistribution",
        "trace_communication",
        "trace_communication_step",
    ),
}


def likeness(config: Config, num_ranks: int) -> str:
    """The same for replicas that may train together: the number of ranks, and some digits."""
    told = json.dumps(dict(_compared(config)), sort_keys=True, default=str)
    return f"{num_ranks}-{hashlib.blake2b(told.encode(), digest_size=6).hexdigest()}"


def _compared(config: Config) -> Iterator[tuple[str, object]]:
    values = config.model_dump()
    # Unset means 0.
    values["debug"]["seed"] = values["debug"]["seed"] or 0
    # What a user's module has added may change anything.
    added = sorted(type(config).model_fields.keys() - Config.model_fields.keys())
    for section in (*_SECTIONS, *added):
        for key, value in values[section].items():
            if key in _MAY_DIFFER.get(section, ()):
                continue
            if key == "corpora":
                value = [{k: v for k, v in one.items() if k != "dataset_path"} for one in value]
            yield f"{section}.{key}", value
