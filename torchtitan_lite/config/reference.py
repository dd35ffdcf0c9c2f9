"""Every key with its meaning, type and default: as `--help`, and as Markdown.

Both come from the same walk over the schema.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pydantic import BaseModel

from torchtitan_lite.config.keys import Group, Key, groups, type_text, value_text
from torchtitan_lite.config.problems import unknown_key, unknown_section
from torchtitan_lite.config.torchtitan_keys import DEFAULTS, VERSION
from torchtitan_lite.core.errors import ConfigError

USAGE = """\
torchrun --nproc-per-node N train.py --config FILE [--section.key value ...]
torchtitan-lite train [--nproc N] --config FILE [--section.key value ...]
torchtitan-lite train --help [SECTION ...]"""

_FORMS = """\
Every key can be set in the file and on the command line, where --section.key value and \
--section.key=value are the same, --section.flag means true and --section.no_flag false, lists are \
separated by commas or written as TOML arrays, and none is null. In the file, where TOML has no \
null, leave the key out or write "none"."""


def help_text(
    schema: type[BaseModel], width: int, sections: Sequence[str] = (), *, usage: str = USAGE
) -> str:
    """Return the text of `--help`, wrapped to `width` columns: `usage` and all keys, or those of
    `sections`. Raises ConfigError for an unknown section."""
    shown = list(groups(schema))
    lines = [usage.rstrip(), "", *textwrap.wrap(_FORMS, width)]
    if sections:
        names = [name.strip("[]") for name in sections]
        for name in names:
            if not any(_is_in(group, [name]) for group in shown):
                *outer, _ = path = tuple(name.split("."))
                unknown = unknown_key(schema, path) if outer else unknown_section(schema, name)
                raise ConfigError(unknown)
        shown = [_only(group, names) for group in shown if _is_in(group, names)]
        lines = []
    for group in shown:
        lines += ["", group.header]
        lines += textwrap.wrap(group.meaning, width)
        for key in group.keys:
            lines += _wrapped(_signature(key, group), width, "  ", "      ")
            lines += _wrapped(key.meaning, width, "      ", "      ")
    return "\n".join(lines).lstrip("\n")


def _is_in(group: Group, names: Sequence[str]) -> bool:
    """Whether the table is one of `names`, is below one, or has a key in them."""
    path = ".".join(group.path)
    keys = {key.name for key in group.keys}
    return any(f"{path}.".startswith(f"{name}.") or name in keys for name in names)


def _only(group: Group, names: Sequence[str]) -> Group:
    """Return the table with all keys, or with those in `names`."""
    chosen = tuple(key for key in group.keys if key.name in names)
    return replace(group, keys=chosen) if chosen else group


def markdown(schema: type[BaseModel]) -> str:
    """Return the reference as a Markdown page."""
    return "\n".join(_markdown_lines(schema)) + "\n"


def _markdown_lines(schema: type[BaseModel]) -> Iterator[str]:
    yield "# Configuration reference"
    yield ""
    yield "<!-- Written by `python -m scripts.config_reference`; edit the docstrings instead. -->"
    yield ""
    yield "```"
    yield USAGE
    yield "```"
    yield ""
    yield _FORMS
    yield ""
    yield (
        f"Sections and keys are those of torchtitan {VERSION}, so its files load here; a key of a "
        "feature that is not supported is accepted while it is switched off. Where a default "
        "differs from torchtitan's, the table gives both; [from_torchtitan.md](from_torchtitan.md) "
        "lists what else differs."
    )
    for group in groups(schema):
        yield ""
        yield f"## {group.header}"
        yield ""
        yield group.meaning
        if not group.keys:
            continue
        yield ""
        yield "| key | type | default | meaning |"
        yield "|---|---|---|---|"
        for key in group.keys:
            default = f"`{value_text(key.default)}`"
            if key.name in DEFAULTS:
                default += f" (torchtitan: `{value_text(DEFAULTS[key.name])}`)"
            cells = (f"`{key.path[-1]}`", type_text(key.type), default, key.meaning)
            yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _signature(key: Key, group: Group) -> str:
    # The keys of a repeated table cannot be addressed one by one.
    name = key.path[-1] if group.repeated else f"--{key.name}"
    default = value_text(key.default)
    if key.name in DEFAULTS:
        default += f"; torchtitan {VERSION}: {value_text(DEFAULTS[key.name])}"
    return f"{name}  ({type_text(key.type)}; default {default})"


def _wrapped(text: str, width: int, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )
