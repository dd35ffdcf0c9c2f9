"""Keys that a live run may change when it moves to another mesh."""

from collections.abc import Iterator, Sequence
from typing import Any

from torchtitan_lite.config.problems import config_error
from torchtitan_lite.config.schema import Config
from torchtitan_lite.core.errors import ConfigError


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
    problems = list(resize_problems(config, subject))
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
    flat: dict[tuple[str, ...], Any] = {}
    for section, values in config.model_dump().items():
        if isinstance(values, dict):
            flat |= {(section, key): value for key, value in values.items()}
        else:
            flat[section,] = values
    return flat


def _may_resize(section: str, key: str = "") -> bool:
    return section == "parallelism" or (section, key) == ("training", "local_batch_size")


def resize_problems(config: Config, subject: str) -> Iterator[str]:
    """Return what prevents `subject` from switching between meshes."""
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
