"""The Jinja environment of chat templates, as transformers sets it up.

Only `chat_template` imports it, when a template is compiled. Invariant: a template gets Jinja's
immutable sandbox and a few functions without effects.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, Undefined, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from torchtitan_lite.core.errors import DataError


class Generation(Extension):
    """The block `{% generation %} ... {% endgeneration %}`, which marks the assistant's text."""

    tags = {"generation"}
    is_used = False
    """Whether the template has such a block."""
    marks = ("", "")

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse one block."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        """Render one block between two marks."""
        begin, end = self.marks
        return f"{begin}{caller()}{end}"


@dataclass(frozen=True, kw_only=True)
class CompiledTemplate:
    """A compiled template with its assistant blocks."""

    template: Template
    generation: Generation
    variables: frozenset[str]
    """Names that the template reads and does not set."""
    undefined: set[str]
    """Undefined values that renders have written, as nothing."""


def compile_template(name: str, source: str, today: datetime) -> CompiledTemplate:
    """Compile the template in `source`; `name` is for messages. Raises DataError."""
    written: set[str] = set()
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=_recorded_in(written),
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = today.strftime
    try:
        template = environment.from_string(source)
        variables = meta.find_undeclared_variables(environment.parse(source))
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise DataError(
            f"{name} is not a chat template that can be read: {error.message}"
            f"{'' if line is None else f' (line {line} of the template)'}."
        ) from error
    (generation,) = (e for e in environment.extensions.values() if isinstance(e, Generation))
    return CompiledTemplate(
        template=template,
        generation=generation,
        variables=frozenset(variables - environment.globals.keys()),
        undefined=written,
    )


def _recorded_in(written: set[str]) -> type[Undefined]:
    """Return a type of undefined values that adds those that a template writes to `written`."""

    class Recorded(Undefined):
        def __str__(self) -> str:
            name = self._undefined_name
            written.add(str(name) if self._undefined_obj is missing else f".{name}")
            return ""

    return Recorded


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize as JSON; unlike Jinja's own filter without HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
