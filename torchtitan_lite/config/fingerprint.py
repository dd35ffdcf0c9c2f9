"""The settings that all replicas must share, as a digest."""

import hashlib
import json
from collections.abc import Iterator

from torchtitan_lite.config.schema import Config

_SECTIONS_THAT_MAY_DIFFER = {
    *("job", "validation", "activation_checkpoint", "compile", "publish", "comm", "metrics"),
    *("profiling", "memory_estimation", "experimental"),
    # Compared if the model uses it.
    "lora",
}
"""All others are compared, those of a new table too, and those that a user's module adds."""
_MAY_DIFFER_OF_CORPUS = ("dataset_path", "max_unusable_fraction")
_MAY_DIFFER = {
    "model": ("hf_assets_path", "print_after_conversion"),
    "training": (
        *_MAY_DIFFER_OF_CORPUS,
        "cache_folder",
        "dataloader",
        "gc_freq",
        "gc_debug",
    ),
    "parallelism": ("pipeline_parallel_schedule_csv",),
    "checkpoint": (
        "folder",
        "ram_interval",
        "buddy_interval",
        "buddy_mib_per_s",
        "snapshot_gib",
        "preemption_grace_s",
        "writer_nice",
        "writer_mib_per_s",
        "load_step",
        "initial_load_path",
        "export_dtype",
        "export_file_gb",
        "async_mode",
    ),
    "fault_tolerance": (
        "replica_id",
        "group_size",
        "process_group_timeout_ms",
        "quorum_timeout_s",
        "join_timeout_s",
        "hang_timeout_s",
        "lighthouse",
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


def config_fingerprint(config: Config, num_ranks: int) -> str:
    """Return a digest that is equal for replicas that may train together: the number of ranks, and
    a hash of every setting that may change what is trained or what replicas do together. Excluded
    are paths, time limits, and what only saves time or memory or is only displayed."""
    text = json.dumps(dict(_compared(config)), sort_keys=True, default=str)
    return f"{num_ranks}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def _compared(config: Config) -> Iterator[tuple[str, object]]:
    values = config.model_dump()
    # Unset means 0.
    values["debug"]["seed"] = values["debug"]["seed"] or 0
    converters = {"lora"} if config.model.uses_lora else set[str]()
    sections = values.keys() - _SECTIONS_THAT_MAY_DIFFER | converters
    for section in sorted(sections):
        for key, value in values[section].items():
            if key in _MAY_DIFFER.get(section, ()):
                continue
            if key == "corpora":
                value = [
                    {k: v for k, v in corpus.items() if k not in _MAY_DIFFER_OF_CORPUS}
                    for corpus in value
                ]
            yield f"{section}.{key}", value
