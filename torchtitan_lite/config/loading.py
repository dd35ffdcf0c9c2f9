"""Load a configuration: the TOML file, then the command line over it, then validation.

All problems of both are reported at once. Overrides are `--section.key value`,
`--section.key=value`, `--section.flag` for true and `--section.no_flag` for false; hyphens stand
for underscores; lists are separated by commas or written as TOML arrays; `none` is null. A value is
parsed by the type of its key.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli
from pydantic import BaseModel, TypeAdapter, ValidationError

from torchtitan_lite.config import problems
from torchtitan_lite.config.custom_tables import schema_for
from torchtitan_lite.config.keys import section_in, split_none, type_at, without_constraints
from torchtitan_lite.config.problems import (
    unknown_key,
    unknown_section,
    without_section,
    wrong_type,
)
from torchtitan_lite.config.reference import USAGE, help_text
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml_file import known_files, read_toml
from torchtitan_lite.config.torchtitan_keys import unsupported_feature
from torchtitan_lite.core.errors import ConfigError

COMMAND_LINE = "command line"
_FILE_OPTIONS = ("--config", "--job.config_file", "--job.config-file")
_HELP_OPTIONS = ("-h", "--help")


@dataclass(frozen=True, kw_only=True)
class Override:
    """A key and its value on the command line."""

    path: tuple[str, ...]
    value: Any
    """Value as from a TOML file; None if `problem` is set."""
    problem: str | None = None


Complete = Callable[[dict[str, Any]], str | None]
"""Completes the tables that a user gave before they are checked. Returns a problem, if any."""


def parse_completed_command_line(
    argv: Sequence[str], usage: Callable[[], str] | None, *, complete: Complete
) -> tuple[Config, Path]:
    """Parse the arguments after the program's name. Returns the configuration and its file.

    `--help` prints `usage` and every key, `--help SECTION` the keys of one section; both raise
    SystemExit(0). Raises ConfigError with every problem.
    """
    for index, argument in enumerate(argv):
        if argument in _HELP_OPTIONS:
            remaining = [*argv[:index], *argv[index + 1 :]]
            is_file = [option.partition("=")[0] in _FILE_OPTIONS for option in argv]
            sections = [
                name
                for place, name in enumerate(argv[index + 1 :], index + 1)
                if not name.startswith("-") and not is_file[place - 1]
            ]
            _print_help(_schema_of(remaining), sections, usage)
            raise SystemExit(0)
    file, overrides = _split_file(argv)
    return load_completed_config(file, overrides, complete=complete), file


def _schema_of(argv: Sequence[str]) -> type[Config]:
    """Return the schema of the file in `argv` with the keys of its modules; without a file
    `Config`."""
    if not any(argument.partition("=")[0] in _FILE_OPTIONS for argument in argv):
        return Config
    file, _ = _split_file(argv)
    return schema_for(read_toml(file))


def _print_help(
    schema: type[Config], sections: Sequence[str], usage: Callable[[], str] | None
) -> None:
    own = usage() if usage is not None else USAGE
    text = help_text(schema, shutil.get_terminal_size().columns, sections, usage=own)
    # Under torchrun every rank runs this.
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


def load_completed_config(
    path: str | Path, overrides: Sequence[str], *, complete: Complete
) -> Config:
    """Load the TOML file at `path` and apply command-line `overrides`.

    Raises ConfigError with every problem: unknown keys and sections, values of a wrong type or out
    of range, and unsupported features.
    """
    return completed_config_from(read_toml(Path(path)), str(path), overrides, complete=complete)


def completed_config_from(
    values: dict[str, Any], source: str, overrides: Sequence[str], *, complete: Complete
) -> Config:
    """Validate the tables `values` from `source` and apply command-line `overrides`. Raises as
    `load_completed_config` does; a file for an unsupported feature of torchtitan is one problem,
    however many unknown keys it has."""
    early = _with_overrides(values, overrides)
    schema = Config if unsupported_feature(early) else schema_for(early)
    messages: list[str] = []
    tables = _known(values, schema, schema, (), source, messages)
    parsed = parse_overrides(overrides, schema)
    messages += [override.problem for override in parsed if override.problem]
    for override in parsed:
        _put(tables, override, schema)
    overridden = [override.path for override in parsed if override.path]

    def where(key: problems.Path) -> str:
        names = tuple(part for part in key if isinstance(part, str))
        if any(names[: len(path)] == path for path in overridden):
            return COMMAND_LINE
        below = any(path[: len(names)] == names for path in overridden)
        return f"{source} and {COMMAND_LINE}" if below else source

    if feature := unsupported_feature(tables):
        path, problem = feature
        raise problems.config_error([f"{where(path)}: {problem}"])
    if problem := complete(tables):
        messages.append(f"{where(('model',))}: model: {problem}")
    try:
        config = schema.model_validate(tables)
    except ValidationError as error:
        messages += problems.from_validation(error, schema, where)
        raise problems.config_error(messages) from None
    if messages:
        raise problems.config_error(messages)
    return config


def _with_overrides(source_tables: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of the tables with the overrides of built-in keys. Other keys may belong to the
    modules that these name."""
    tables = {name: dict(table) for name, table in source_tables.items() if isinstance(table, dict)}
    for override in parse_overrides(overrides, Config):
        if override.problem is None:
            _put(tables, override, Config)
    return tables


def _known(
    table: dict[str, Any],
    schema: type[Config],
    section: type[BaseModel],
    path: problems.Path,
    where: str,
    messages: list[str],
) -> dict[str, Any]:
    """Return `table` without unknown names; each is a problem in `messages`."""
    kept: dict[str, Any] = {}
    for name, value in table.items():
        here = (*path, name)
        field = section.model_fields.get(name)
        if field is None:
            messages.append(f"{where}: {_unknown(here, value, schema)}")
            continue
        type_ = without_constraints(field.annotation)
        inner, is_list = section_in(type_)
        if inner is not None and not is_list and isinstance(value, dict):
            kept[name] = _known(value, schema, inner, here, where, messages)
        elif inner is not None and is_list and isinstance(value, list):
            kept[name] = [
                _known(element, schema, inner, (*here, index), where, messages)
                if isinstance(element, dict)
                else element
                for index, element in enumerate(value)
            ]
        else:
            # TOML has no null, and for some keys null is not the default.
            is_null = value == "none" and split_none(type_)[1]
            kept[name] = None if is_null else value
    return kept


def _unknown(path: problems.Path, value: Any, schema: type[Config]) -> str:
    *outer, name = path
    if outer:
        return problems.unknown_key(schema, path)
    name = str(name)
    is_repeated = isinstance(value, list) and any(isinstance(element, dict) for element in value)
    if isinstance(value, dict) or is_repeated:
        return problems.unknown_section(schema, name)
    return problems.without_section(schema, name)


def _put(tables: dict[str, Any], override: Override, schema: type[Config]) -> None:
    """Write the override into `tables`. An invalid one removes the file's value, so that the key is
    reported once, and creates no table, which would be reported too."""
    if not override.path:
        return
    *outer, name = override.path
    for part in outer:
        inner = tables.setdefault(part, {}) if override.problem is None else tables.get(part)
        if not isinstance(inner, dict):
            return
        tables = inner
    if override.problem is None:
        tables[name] = override.value
    elif type_at(schema, override.path) is not None and not isinstance(tables.get(name), dict):
        tables.pop(name, None)


def parse_overrides(arguments: Sequence[str], schema: type[BaseModel]) -> list[Override]:
    """Parse all overrides in `arguments`; an invalid one has `problem` set."""
    overrides, index = [], 0
    while index < len(arguments):
        argument = arguments[index]
        index += 1
        if not argument.startswith("--"):
            overrides.append(_refused((), f"unexpected {argument!r}; write --section.key value"))
            continue
        name, has_value, value = argument[2:].partition("=")
        if not name:
            overrides.append(_refused((), f"{argument!r} names no key; write --section.key value"))
            continue
        text = value if has_value else None
        if text is None and index < len(arguments) and not arguments[index].startswith("--"):
            text = arguments[index]
            index += 1
        overrides.append(_override(tuple(name.replace("-", "_").split(".")), text, schema))
    return overrides


def _override(path: tuple[str, ...], text: str | None, schema: type[BaseModel]) -> Override:
    negated = (*path[:-1], path[-1].removeprefix("no_"))
    type_ = type_at(schema, path)
    if type_ is None and negated != path and type_at(schema, negated) is bool:
        if text is not None:
            return _refused(negated, f"--{'.'.join(path)} takes no value, given {text!r}")
        return Override(path=negated, value=False)
    if type_ is None and get_origin(type_at(schema, path[:1])) is dict and len(path) > 1:
        return Override(path=path, value=_free_form(text))
    if type_ is None:
        return _refused(path, _unknown_override(path, schema))
    section, is_list = section_in(type_)
    if section is not None and not is_list:
        example = f"{'.'.join(path)}.{next(iter(section.model_fields))}"
        return _refused(path, f"{'.'.join(path)}: a section; set one of its keys, as --{example}")
    if text is None:
        if type_ is bool:
            return Override(path=path, value=True)
        return _refused(path, wrong_type(path, "no value", type_))
    try:
        return Override(path=path, value=_value(text, type_))
    except (ValidationError, tomli.TOMLDecodeError):
        return _refused(path, wrong_type(path, f'"{text}"', type_))


def _value(text: str, type_: Any) -> Any:
    type_, admits_none = split_none(type_)
    if admits_none and text.lower() == "none":
        return None
    if get_origin(type_) is list:
        if text.lstrip().startswith("["):
            return _toml_value(text)
        element = get_args(type_)[0]
        parts = [part.strip() for part in text.split(",")] if text else []
        return [TypeAdapter(element).validate_strings(part) for part in parts]
    if get_origin(type_) is dict:
        return _toml_value(text)
    return TypeAdapter(type_).validate_strings(text)


def _toml_value(text: str) -> Any:
    return tomli.loads(f"value = {text}")["value"]


def _free_form(text: str | None) -> Any:
    """Parse a value of a table without a schema: as TOML if it is valid, else as text."""
    if text is None:
        return True
    try:
        return _toml_value(text)
    except tomli.TOMLDecodeError:
        return text


def _unknown_override(path: tuple[str, ...], schema: type[BaseModel]) -> str:
    if len(path) == 1:
        return without_section(schema, path[0])
    if path[0] in schema.model_fields:
        return unknown_key(schema, path)
    return unknown_section(schema, path[0])


def _refused(path: tuple[str, ...], problem: str) -> Override:
    return Override(path=path, value=None, problem=f"{COMMAND_LINE}: {problem}")
