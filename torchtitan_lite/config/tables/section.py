"""The base class of every table.

The docstring under a field is its text in `--help` and in the generated reference.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of settings; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    source_class: ClassVar[type | None] = None
    """Class whose source has the field texts, for a section created at run time."""


@cache
def field_texts(section: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstring under each field, read from the source when needed: that takes some
    milliseconds per section."""
    texts: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if not issubclass(owner, Section) or owner is Section:
            continue
        written = owner.__dict__.get("source_class") or owner
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(written))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in pairwise(tree.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = inspect.cleandoc(text)
                case _:
                    pass
    return texts


class Unsupported(AfterValidator):
    """Marks a key of an unsupported feature."""


def only(value: Any, missing: str) -> Unsupported:
    """Accept a key of an unsupported feature only if it is off.

    `value` is the setting that means off; `missing` names the feature in the error.
    """

    def check(setting: Any) -> Any:
        if setting != value:
            raise ValueError(
                f"{missing} is not supported by this version; only {toml_literal(value)} "
                f"is accepted, got {toml_literal(setting)}"
            )
        return setting

    return Unsupported(check)


@dataclass(frozen=True)
class NoEffect:
    """Marks a key that is accepted without effect, because it is about speed or memory gained
    otherwise or not at all: results do not depend on it. A run logs it if it is set."""

    reason: str


class BuiltIn(tuple[str, ...]):
    """The values of a key that need no module of the user, which may register others."""


def at_least(minimum: float) -> AfterValidator:
    """Require at least `minimum`; the error has the value."""
    return _bounded(lambda value: value >= minimum, f"at least {minimum}")


def at_most(maximum: float) -> AfterValidator:
    """Require at most `maximum`; the error has the value."""
    return _bounded(lambda value: value <= maximum, f"at most {maximum}")


def above(minimum: float) -> AfterValidator:
    """Require more than `minimum`; the error has the value."""
    return _bounded(lambda value: value > minimum, f"greater than {minimum}")


def below(maximum: float) -> AfterValidator:
    """Require less than `maximum`; the error has the value."""
    return _bounded(lambda value: value < maximum, f"less than {maximum}")


def positive_or_minus_one() -> AfterValidator:
    """Require a positive number, or -1 for "the rest"."""
    return _bounded(lambda value: value == -1 or value > 0, "positive, or -1")


def between(low: float, high: float) -> AfterValidator:
    """Require a number in [low, high]; the error has the value."""
    return _bounded(lambda value: low <= value <= high, f"between {low} and {high}")


def _bounded(holds: Callable[[Any], bool], wanted: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"must be {wanted}, got {value}")
        return value

    return AfterValidator(check)


def toml_literal(value: Any) -> str:
    """Format `value` as TOML, for messages."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(map(toml_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml_literal(inner)}' for key, inner in value.items())}}}"
    return "none" if value is None else str(value)
