"""What the launcher needs to know of the arguments for train.py. Layer: above errors.

The rest of them is for the trainer to read and to refuse.
"""

from collections.abc import Sequence
from pathlib import Path

import tomli

from torchtitan_lite.errors import ConfigError

_DEFAULT_DUMP_FOLDER = "./outputs"
_OF_THE_LAUNCHER = ("enable", "no_enable", "replica_id", "group_size")


def dump_folder(arguments: Sequence[str]) -> Path:
    """`job.dump_folder` of the run that train.py would make of `arguments`. Raises ConfigError when
    there is no configuration, or the launcher itself has to set what they set."""
    given = _options(arguments)
    taken = [f"--fault_tolerance.{key}" for key in _OF_THE_LAUNCHER]
    for option, _ in given:
        if option in taken:
            raise ConfigError(
                f"{option} is given, and the launcher sets it for each replica: leave it out."
            )
    files = [value for option, value in given if option in ("--config", "--job.config_file")]
    if not files:
        raise ConfigError(
            "No configuration for train.py is given: end the command with -- --config FILE, such "
            "as -- --config configs/llama3_debug_ft.toml."
        )
    try:
        tables = tomli.loads(Path(files[-1]).read_text())
    except (OSError, tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {files[-1]} cannot be read: {error}") from None
    overrides = [value for option, value in given if option == "--job.dump_folder"]
    job = tables.get("job")
    in_file = job.get("dump_folder") if isinstance(job, dict) else None
    return Path(overrides[-1] if overrides else str(in_file or _DEFAULT_DUMP_FOLDER))


def _options(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Options with their values, "" where they have none; hyphens within names are underscores."""
    found = []
    for index, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, has_value, value = argument.partition("=")
            after = arguments[index + 1] if index + 1 < len(arguments) else "--"
            if not has_value and not after.startswith("--"):
                value = after
            found.append(("--" + name[2:].replace("-", "_"), value))
    return found
