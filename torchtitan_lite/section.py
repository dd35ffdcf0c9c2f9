"""The base of every config section. Layer: imports nothing of the project.

Each owner of a feature defines its section beside its code; `config/` composes them. The
docstring under a field is its text in `--help` and in the generated reference.
"""

from collections.abc import Callable
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


def only(value: Any, missing: str) -> AfterValidator:
    """Accept a key of the schema whose feature does not exist here, while it is switched off.

    `value` is the setting that means off; `missing` names the feature in the error.
    """

    def check(given: Any) -> Any:
        if given != value:
            raise ValueError(
                f"{missing} is not supported by this version; only {toml_literal(value)} "
                f"is accepted, got {toml_literal(given)}"
            )
        return given

    return AfterValidator(check)


def at_least(minimum: float) -> AfterValidator:
    """A number not below `minimum`, with the value in the error."""
    return _bounded(lambda given: given >= minimum, f"at least {minimum}")


def at_most(maximum: float) -> AfterValidator:
    """A number not above `maximum`, with the value in the error."""
    return _bounded(lambda given: given <= maximum, f"at most {maximum}")


def above(minimum: float) -> AfterValidator:
    """A number greater than `minimum`, with the value in the error."""
    return _bounded(lambda given: given > minimum, f"greater than {minimum}")


def below(maximum: float) -> AfterValidator:
    """A number less than `maximum`, with the value in the error."""
    return _bounded(lambda given: given < maximum, f"less than {maximum}")


def positive_or_minus_one() -> AfterValidator:
    """A positive number, or -1 for "what is left"."""
    return _bounded(lambda given: given == -1 or given > 0, "positive, or -1")


def between(low: float, high: float) -> AfterValidator:
    """A number in [low, high], with the value in the error."""
    return _bounded(lambda given: low <= given <= high, f"between {low} and {high}")


def _bounded(holds: Callable[[Any], bool], wanted: str) -> AfterValidator:
    def check(given: Any) -> Any:
        if not holds(given):
            raise ValueError(f"must be {wanted}, got {given}")
        return given

    return AfterValidator(check)


def toml_literal(value: Any) -> str:
    """`value` as it would be written in a TOML file, for messages."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(map(toml_literal, value))}]"
    return "none" if value is None else str(value)
