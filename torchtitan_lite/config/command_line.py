"""The command line of a run: `--config FILE [--section.key value ...]`, or `--help [SECTION]`.

Layer: above loading and reference.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from torchtitan_lite.config.extending import schema_for
from torchtitan_lite.config.loading import load_config
from torchtitan_lite.config.reference import help_text
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml_file import known_files, read_toml
from torchtitan_lite.errors import ConfigError

_FILE_OPTIONS = ("--config", "--job.config_file", "--job.config-file")
_HELP_OPTIONS = ("-h", "--help")


def parse_command_line(argv: Sequence[str]) -> tuple[Config, Path]:
    """The configuration that the arguments after the program's name ask for, and its file.

    `--help` prints every key, `--help SECTION` those of one section; both leave with
    SystemExit(0). Raises ConfigError with every problem.
    """
    for index, argument in enumerate(argv):
        if argument in _HELP_OPTIONS:
            others = [*argv[:index], *argv[index + 1 :]]
            is_file = [option.partition("=")[0] in _FILE_OPTIONS for option in argv]
            sections = [
                name
                for place, name in enumerate(argv[index + 1 :], index + 1)
                if not name.startswith("-") and not is_file[place - 1]
            ]
            _print_help(_schema_of(others), sections)
            raise SystemExit(0)
    file, overrides = _split_file(argv)
    return load_config(file, overrides), file


def _schema_of(argv: Sequence[str]) -> type[Config]:
    """The schema of the file that `argv` names, with what its modules add; else `Config`."""
    if not any(argument.partition("=")[0] in _FILE_OPTIONS for argument in argv):
        return Config
    file, _ = _split_file(argv)
    return schema_for(read_toml(file))


def _print_help(schema: type[Config], sections: Sequence[str]) -> None:
    text = help_text(schema, shutil.get_terminal_size().columns, sections)
    # Under torchrun every rank comes here.
    if os.environ.get("RANK", "0") == "0":
        print(text)


def _split_file(argv: Sequence[str]) -> tuple[Path, list[str]]:
    files, rest, index = [], [], 0
    while index < len(argv):
        option, has_value, value = argv[index].partition("=")
        index += 1
        if option not in _FILE_OPTIONS:
            if option.endswith(".toml") and not argv[max(0, index - 2)].startswith("--"):
                raise ConfigError(f"{option} is given without an option: write --config {option}.")
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
