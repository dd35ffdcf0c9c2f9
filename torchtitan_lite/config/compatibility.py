"""Compatibility of replicas: the settings that all must share, and the numbers of ranks that a
config permits.

Layer: above constraints and schema.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from torchtitan_lite.config.problems import config_error
from torchtitan_lite.config.schema import Config
from torchtitan_lite.core.errors import ConfigError

_COMPARED_SECTIONS = (
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
    # Sections added by a user's module may change anything.
    added = sorted(type(config).model_fields.keys() - Config.model_fields.keys())
    converters = ("lora",) if config.model.uses_lora else ()
    for section in (*_COMPARED_SECTIONS, *converters, *added):
        for key, value in values[section].items():
            if key in _MAY_DIFFER.get(section, ()):
                continue
            if key == "corpora":
                value = [
                    {k: v for k, v in one.items() if k not in _MAY_DIFFER_OF_CORPUS}
                    for one in value
                ]
            yield f"{section}.{key}", value


def check_rank_counts(config: Config, numbers: Sequence[int]) -> None:
    """Raise ConfigError with every problem unless replicas can run on, and switch between, any of
    these numbers of ranks."""
    # Imports torch, which the fingerprint does not need.
    from torchtitan_lite.training.checks.constraints import check_against

    if len(numbers) == 1:
        check_against(config, numbers[0])
        return
    problems = list(
        _resize_problems(
            config,
            "Replicas that may have another number of ranks (--nproc-per-replica with several)",
        )
    )
    for number in numbers:
        try:
            check_against(config, number)
        except ConfigError as error:
            problems.append(f"With {number} rank{'s' if number > 1 else ''} each: {error}")
    if problems:
        raise config_error(problems)


def check_resize_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError if arguments of a request to resize may change more than the mesh. They
    come from a file: only afterwards may they be parsed, which imports modules that they name."""
    for word in arguments:
        section, _, key = word.partition("=")[0].removeprefix("--").partition(".")
        is_option = word.startswith("-") and not word[1:2].isdigit()
        if is_option and not _may_resize(section, key.replace("-", "_")):
            raise ConfigError(f"{word} is given, but {_RESIZABLE}")


def check_live_resize(config: Config, resized: Config, *, is_joint: bool) -> None:
    """Raise ConfigError unless a live run with `config` can continue with `resized`. `is_joint`:
    all replicas are resized together."""
    subject = "A run that is resized"
    problems = list(_resize_problems(config, subject))
    if config.fault_tolerance.enable and not is_joint:
        problems.append(
            "Replicas are resized together: name the output folder of the run, not that of a "
            "replica."
        )
    if config.fault_tolerance.semi_sync_method:
        problems.append(
            f"{subject}: between two averages, semi-synchronous replicas have different states, of "
            "which only one would be kept."
        )
    if not config.checkpoint.ram_interval or config.checkpoint.async_mode == "disabled":
        problems.append(
            f"{subject}: it resumes from snapshots in shared memory. Start it with "
            'checkpoint.ram_interval = 1 and checkpoint.async_mode = "async".'
        )
    before, after = _flat(config), _flat(resized)
    problems += [
        f"{'.'.join(key)} would change from {value!r} to {after[key]!r}, but {_RESIZABLE}"
        for key, value in before.items()
        if after[key] != value and not _may_resize(*key)
    ]
    if problems:
        raise config_error(problems)


_RESIZABLE = "a resize changes [parallelism] and training.local_batch_size only."


def _flat(config: Config) -> dict[tuple[str, ...], Any]:
    """Return the values by section and key; a key that an extension has added may have no
    section."""
    found: dict[tuple[str, ...], Any] = {}
    for section, values in config.model_dump().items():
        if isinstance(values, dict):
            found |= {(section, key): value for key, value in values.items()}
        else:
            found[section,] = values
    return found


def _may_resize(section: str, key: str = "") -> bool:
    return section == "parallelism" or (section, key) == ("training", "local_batch_size")


def _resize_problems(config: Config, subject: str) -> Iterator[str]:
    if config.training.global_batch_size == -1:
        yield (
            f"{subject}: the global batch must not depend on it, but training.global_batch_size "
            "= -1 follows the mesh. Set it to the samples per step."
        )
    checkpoint = config.checkpoint
    if not checkpoint.enable or checkpoint.load_only:
        yield (
            f"{subject}: it must resume from checkpoints. Set checkpoint.enable = true, without "
            "load_only."
        )
    if checkpoint.load_step >= 0 or checkpoint.exclude_from_loading:
        yield (
            f"{subject}: the newest state must be resumed, but checkpoint.load_step or "
            "exclude_from_loading selects another. Start the run with it once, with one number of "
            "ranks, then without."
        )
