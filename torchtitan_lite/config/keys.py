"""The keys of a configuration, with their types as text.

`--help`, the reference, overrides and error messages all read the keys here, so that they agree.
"""

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from torchtitan_lite.config.tables.section import (
    BuiltIn,
    NoEffect,
    Section,
    Unsupported,
    field_texts,
    toml_literal,
)

_SectionType = type[BaseModel]


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a section."""

    path: tuple[str, ...]
    type: Any
    """Its annotation without constraints."""
    default: Any
    section: _SectionType
    """The section that it belongs to."""
    no_effect: str | None = None
    """Why the key has no effect, if so."""
    is_unsupported: bool = False
    """Whether it belongs to an unsupported feature, which it can only switch off."""
    choices: tuple[str, ...] = ()
    """Values that are known to be supported."""

    @property
    def meaning(self) -> str:
        """Its text in the reference and `--help`."""
        return _one_line(field_texts(self.section).get(self.path[-1]))

    @property
    def name(self) -> str:
        """The dotted name, such as `training.steps`."""
        return ".".join(self.path)


@dataclass(frozen=True, kw_only=True)
class Group:
    """A table of a TOML file."""

    path: tuple[str, ...]
    repeated: bool
    """Written as `[[path]]`, once per element of a list."""
    meaning: str
    keys: tuple[Key, ...]
    """Empty for a free-form table."""

    @property
    def header(self) -> str:
        """The header of the table in a TOML file."""
        name = ".".join(self.path)
        return f"[[{name}]]" if self.repeated else f"[{name}]"


def groups(
    section: type[BaseModel], path: tuple[str, ...] = (), *, repeated: bool = False
) -> Iterator[Group]:
    """Return every table of `section` in the order of its fields, outer ones first."""
    keys: list[Key] = []
    below: list[Group] = []
    for name, field in section.model_fields.items():
        here = (*path, name)
        type_ = without_constraints(field.annotation)
        inner, is_list = section_in(type_)
        if inner is not None:
            below += groups(inner, here, repeated=is_list)
        if get_origin(type_) is dict:
            meaning = _one_line(field_texts(section).get(name))
            below.append(Group(path=here, repeated=False, meaning=meaning, keys=()))
        elif inner is None or is_list:
            default = field.get_default(call_default_factory=True)
            why = next(
                (marker.reason for marker in field.metadata if isinstance(marker, NoEffect)), None
            )
            keys.append(
                Key(
                    path=here,
                    type=type_,
                    default=default,
                    section=section,
                    no_effect=why,
                    is_unsupported=any(
                        isinstance(marker, Unsupported) for marker in field.metadata
                    ),
                    choices=_choices(type_, field.metadata),
                )
            )
    if keys:
        own = _one_line(section.__doc__)
        yield Group(path=path, repeated=repeated, meaning=own, keys=tuple(keys))
    yield from below


def _choices(type_: Any, metadata: Iterable[Any]) -> tuple[str, ...]:
    kind, _ = split_none(type_)
    if kind is bool:
        return ("true", "false")
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((tuple(mark) for mark in metadata if isinstance(mark, BuiltIn)), ())


def all_keys(section: type[BaseModel]) -> dict[str, Key]:
    """Return every key by its dotted name."""
    return {key.name: key for group in groups(section) for key in group.keys}


def without_effect(config: BaseModel) -> Iterator[str]:
    """Yield one line per key that is set and has no effect, with the reason."""
    for key in all_keys(type(config)).values():
        if key.no_effect is None:
            continue
        value: Any = config
        for name in key.path:
            value = getattr(value, name)
        if value != key.default:
            yield f"{key.name} = {toml_literal(value)} has no effect here: {key.no_effect}."


def type_at(section: type[BaseModel], path: tuple[str | int, ...]) -> Any:
    """Return the type at `path`, where an integer selects an element of a list; None if unknown."""
    type_: Any = section
    for part in path:
        inner, is_list = section_in(type_)
        if isinstance(part, int):
            type_ = get_args(type_)[0] if get_origin(type_) is list else None
        elif inner is not None and not is_list and part in inner.model_fields:
            type_ = without_constraints(inner.model_fields[part].annotation)
        else:
            return None
    return type_


def without_constraints(annotation: Any) -> Any:
    """Return the annotation without `Annotated`, at any depth."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return without_constraints(arguments[0])
    if origin in (Union, types.UnionType):
        return Union[tuple(without_constraints(argument) for argument in arguments)]  # noqa: UP007
    if origin is list:
        return list[without_constraints(arguments[0])]
    return annotation


def section_in(type_: Any) -> tuple[type[Section] | None, bool]:
    """Return the section that `type_` is or lists, and whether it is a list."""
    is_list = get_origin(type_) is list
    inner = get_args(type_)[0] if is_list else type_
    if isinstance(inner, type) and issubclass(inner, Section):
        return inner, is_list
    return None, False


def split_none(type_: Any) -> tuple[Any, bool]:
    """Return the type without None, and whether it allowed None."""
    if get_origin(type_) not in (Union, types.UnionType):
        return type_, False
    rest = [argument for argument in get_args(type_) if argument is not type(None)]
    return Union[tuple(rest)], len(rest) < len(get_args(type_))  # noqa: UP007


def type_text(type_: Any) -> str:
    """Describe the type: `integer`, `one of "a", "b"`, `list of strings`."""
    type_, admits_none = split_none(type_)
    if get_origin(type_) is Literal:
        choices = ", ".join(f'"{choice}"' for choice in get_args(type_))
        text = choices if len(get_args(type_)) == 1 else f"one of {choices}"
    elif section_in(type_)[1]:
        text = "list of tables"
    elif get_origin(type_) is list:
        element = type_text(get_args(type_)[0])
        plural = f"{element}s" if element.isalpha() else element.replace("list of", "lists of", 1)
        text = f"list of {plural}"
    elif section_in(type_)[0] or get_origin(type_) is dict:
        text = "table"
    else:
        text = {bool: "true or false", int: "integer", float: "number", str: "string"}[type_]
    return f"{text} or none" if admits_none else text


def has_text(type_: Any) -> bool:
    """Whether `type_text` supports the type."""
    try:
        type_text(type_)
    except (KeyError, TypeError):
        return False
    return True


def text_at(tables: Mapping[str, Any], key: tuple[str, str]) -> str:
    """Return the text at `key` in the tables of a file; empty if there is none."""
    table = tables.get(key[0])
    value = table.get(key[1]) if isinstance(table, Mapping) else None
    return value if isinstance(value, str) else ""


def needed_text(type_: Any) -> str:
    """Describe the type with its article."""
    text = type_text(type_)
    if text.startswith(("one of", "true", '"')):
        return text
    return f"an {text}" if text[0] in "aeiou" else f"a {text}"


def given_text(value: Any) -> str:
    """Describe a TOML value with its type."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)} values"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return f"{value_text(value)} ({kinds.get(type(value), 'date or time')})"


def value_text(value: Any) -> str:
    """Format a value as TOML; null as `none`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(value_text(element) for element in value)}]"
    return "none" if value is None else str(value)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
