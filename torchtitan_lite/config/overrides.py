"""Overrides of the command line: `--section.key value`.

Forms: `--section.key value`, `--section.key=value`, `--section.flag` for true, `--section.no_flag`
for false; hyphens stand for underscores; lists are separated by commas or written as TOML arrays;
`none` is null. A value is read by the type of its key. Layer: above keys and problems.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import tomli
from pydantic import BaseModel, TypeAdapter, ValidationError

from torchtitan_lite.config.keys import section_in, split_none, type_at
from torchtitan_lite.config.problems import (
    unknown_key,
    unknown_section,
    without_section,
    wrong_type,
)

COMMAND_LINE = "command line"


@dataclass(frozen=True, kw_only=True)
class Override:
    """One key with the value that the command line gives it."""

    path: tuple[str, ...]
    value: Any
    """As a TOML file would give it; null where `problem` says that it could not be read."""
    problem: str | None = None


def parse_overrides(arguments: Sequence[str], schema: type[BaseModel]) -> list[Override]:
    """Every override in `arguments`, with those that cannot be read carrying their problem."""
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
        given = value if has_value else None
        if given is None and index < len(arguments) and not arguments[index].startswith("--"):
            given = arguments[index]
            index += 1
        overrides.append(_override(tuple(name.replace("-", "_").split(".")), given, schema))
    return overrides


def _override(path: tuple[str, ...], given: str | None, schema: type[BaseModel]) -> Override:
    negated = (*path[:-1], path[-1].removeprefix("no_"))
    type_ = type_at(schema, path)
    if type_ is None and negated != path and type_at(schema, negated) is bool:
        if given is not None:
            return _refused(negated, f"--{'.'.join(path)} takes no value, given {given!r}")
        return Override(path=negated, value=False)
    if type_ is None and get_origin(type_at(schema, path[:1])) is dict and len(path) > 1:
        return Override(path=path, value=_free_form(given))
    if type_ is None:
        return _refused(path, _unknown(path, schema))
    section, is_list = section_in(type_)
    if section is not None and not is_list:
        example = f"{'.'.join(path)}.{next(iter(section.model_fields))}"
        return _refused(path, f"{'.'.join(path)}: a section; set one of its keys, as --{example}")
    if given is None:
        if type_ is bool:
            return Override(path=path, value=True)
        return _refused(path, wrong_type(path, "no value", type_))
    try:
        return Override(path=path, value=_value(given, type_))
    except (ValidationError, tomli.TOMLDecodeError):
        return _refused(path, wrong_type(path, f'"{given}"', type_))


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


def _free_form(given: str | None) -> Any:
    """A value of a table without a schema: TOML if it is, else text."""
    if given is None:
        return True
    try:
        return _toml_value(given)
    except tomli.TOMLDecodeError:
        return given


def _unknown(path: tuple[str, ...], schema: type[BaseModel]) -> str:
    if len(path) == 1:
        return without_section(schema, path[0])
    if path[0] in schema.model_fields:
        return unknown_key(schema, path)
    return unknown_section(schema, path[0])


def _refused(path: tuple[str, ...], problem: str) -> Override:
    return Override(path=path, value=None, problem=f"{COMMAND_LINE}: {problem}")
