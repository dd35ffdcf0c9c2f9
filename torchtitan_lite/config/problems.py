"""The text of each problem that a configuration can have, one line each.

A line names where the value comes from, the key, what was given, what is needed and the nearest
known name.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from torchtitan_lite.config.keys import (
    all_keys,
    given_text,
    groups,
    needed_text,
    section_in,
    split_none,
    type_at,
    value_text,
)
from torchtitan_lite.config.torchtitan_keys import (
    REMOVED_KEYS,
    RENAMED_KEYS,
    RENAMED_NOTES,
    RENAMED_SECTIONS,
    VALUE_NOTES,
)
from torchtitan_lite.core.errors import ConfigError

Path = tuple[str | int, ...]

_MANY_TABLES = 2
"""Do not suggest a key name that is in more tables than this (such as `enable`)."""


def config_error(problems: Iterable[str]) -> ConfigError:
    """Return one error with one line per problem."""
    lines = list(dict.fromkeys(problems))
    if len(lines) == 1:
        return ConfigError(lines[0])
    listed = "\n".join(f"  {line}" for line in lines)
    return ConfigError(f"The configuration has {len(lines)} problems:\n{listed}")


def dotted(path: Path) -> str:
    """Format a path as `training.corpora[0].weight`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def unknown_section(schema: type[BaseModel], name: str) -> str:
    """Describe an unknown section."""
    known = list(schema.model_fields)
    if name in RENAMED_SECTIONS:
        hint = f"It is a name of an earlier torchtitan, now [{RENAMED_SECTIONS[name]}]."
    elif nearest := get_close_matches(name, known, n=1):
        hint = f"Did you mean [{nearest[0]}]?"
    else:
        hint = f"Sections are {', '.join(known)}."
    return f"[{name}]: unknown section. {hint}"


def unknown_key(schema: type[BaseModel], path: Path) -> str:
    """Describe an unknown key of a section."""
    return f"{dotted(path)}: unknown key. {_meant(schema, path)}".rstrip()


def without_section(schema: type[BaseModel], name: str) -> str:
    """Describe a key outside any section."""
    holders = tables_with(schema, name)
    if 0 < len(holders) <= _MANY_TABLES:
        return f"{name}: a key without a section. Did you mean {_keys(holders, name)}?"
    return f"{name}: a key without a section."


def wrong_type(path: Path, actual: str, type_: Any) -> str:
    """Describe a value of the wrong type."""
    return (
        f"{dotted(path)}: given {actual}, needed {needed_text(type_)}{_hint(path, actual, type_)}"
    )


def from_validation(
    error: ValidationError, schema: type[BaseModel], where: Callable[[Path], str]
) -> list[str]:
    """Describe the problems of a validation; `where` returns the origin of a value."""
    lines = []
    for detail in error.errors(include_url=False):
        context = detail.get("ctx", {})
        path = detail["loc"] + ((context["key"],) if "key" in context else ())
        if detail["type"] in ("value_error", "unsupported"):
            message = context["error"] if detail["type"] == "value_error" else detail["msg"]
            text = f"{dotted(path)}: {message}"
        else:
            type_ = type_at(schema, path)
            # The one type that the schema does not know is that of a free-form table.
            needed = needed_text(type_) if type_ is not None else detail["msg"]
            actual = given_text(detail["input"])
            text = f"{dotted(path)}: given {actual}, needed {needed}"
            text += _hint(path, str(detail["input"]), type_)
        lines.append(f"{where(path)}: {text}")
    return lines


def _meant(schema: type[BaseModel], path: Path) -> str:
    name, outer, full = str(path[-1]), dotted(path[:-1]), dotted(path)
    if full in RENAMED_KEYS:
        note = f" ({RENAMED_NOTES[full]})" if full in RENAMED_NOTES else ""
        return f"It is a name of an earlier torchtitan, now {RENAMED_KEYS[full]}{note}."
    if full in REMOVED_KEYS:
        return f"It has no counterpart here: {REMOVED_KEYS[full]}."
    holders = tables_with(schema, name)
    if 0 < len(holders) <= _MANY_TABLES:
        return f"Did you mean {_keys(holders, name)}?"
    section, _ = section_in(type_at(schema, tuple(p for p in path[:-1] if isinstance(p, str))))
    siblings = list(section.model_fields) if section else []
    if nearest := get_close_matches(name, siblings, n=1):
        return f"Did you mean {outer}.{nearest[0]}?"
    everywhere = all_keys(schema)
    if nearest := get_close_matches(full, everywhere, n=1, cutoff=0.75):
        return f"Did you mean {nearest[0]}?"
    return f"Keys of [{outer}] are {', '.join(siblings)}." if siblings else ""


def _keys(tables: list[str], name: str) -> str:
    return " or ".join(f"{table}.{name}" for table in tables)


def tables_with(schema: type[BaseModel], name: str) -> list[str]:
    """Return the tables with a key of this name."""
    return [
        ".".join(group.path)
        for group in groups(schema)
        if group.path and name in (key.path[-1] for key in group.keys)
    ]


def _hint(path: Path, actual: str, type_: Any) -> str:
    """Suggest what the value may have meant."""
    notes = VALUE_NOTES.get(".".join(part for part in path if isinstance(part, str)), {})
    if note := notes.get(actual.strip('"')):
        return f". {note}"
    choices = [choice for choice in get_args(split_none(type_)[0]) if isinstance(choice, str)]
    nearest = get_close_matches(actual.strip('"'), choices, n=1)
    return f". Did you mean {value_text(nearest[0])}?" if nearest else ""
