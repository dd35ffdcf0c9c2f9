"""The command line of a run: `--config FILE [--section.key value ...]`, or `--help`.

Layer: above loading and reference.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from torchtitan_lite.config.loading import load_config
from torchtitan_lite.config.reference import help_text
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml_file import known_files
from torchtitan_lite.errors import ConfigError

_FILE_OPTIONS = ("--config", "--job.config_file", "--job.config-file")
_HELP_OPTIONS = ("-h", "--help")


def parse_command_line(argv: Sequence[str]) -> tuple[Config, Path]:
    """The configuration that the arguments after the program's name ask for, and its file.

    `--help` prints every key and leaves with SystemExit(0). Raises ConfigError with every problem.
    """
    if any(argument in _HELP_OPTIONS for argument in argv):
        # Under torchrun every rank comes here.
        if os.environ.get("RANK", "0") == "0":
            print(help_text(Config, shutil.get_terminal_size().columns))
        raise SystemExit(0)
    file, overrides = _split_file(argv)
    return load_config(file, overrides), file


def _split_file(argv: Sequence[str]) -> tuple[Path, list[str]]:
    files, rest, index = [], [], 0
    while index < len(argv):
        option, has_value, value = argv[index].partition("=")
        index += 1
        if option not in _FILE_OPTIONS:
            rest.append(argv[index - 1])
            continue
        if not has_value:
            value = argv[index] if index < len(argv) else ""
            index += 1
        if not value or value.startswith("--"):
            raise ConfigError(f"{option} needs a file, as {option} llama.toml. {known_files()}")
        files.append(value)
    if not files:
        raise ConfigError(f"No configuration given: add --config FILE. {known_files()}".rstrip())
    if len(files) > 1:
        raise ConfigError(f"{len(files)} configurations given, needed one: {', '.join(files)}.")
    return Path(files[0]), rest
