"""The base of config sections and its checks."""

from typing import Annotated

import pytest
from pydantic import ValidationError

from torchtitan_lite.config.tables.section import (
    Section,
    above,
    at_least,
    below,
    between,
    field_texts,
    only,
    positive_or_minus_one,
    toml_literal,
)


class _Example(Section):
    low: Annotated[int, at_least(2)] = 2
    high: Annotated[float, below(1)] = 0.5
    strictly: Annotated[float, above(0)] = 0.5
    degree: Annotated[int, positive_or_minus_one()] = -1
    share: Annotated[float, between(0, 1)] = 0.0
    feature: Annotated[bool, only(False, "time travel")] = False
    """Go back."""


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("low", 1, "must be at least 2, got 1"),
        ("high", 1.0, "must be less than 1, got 1.0"),
        ("strictly", 0.0, "must be greater than 0, got 0.0"),
        ("degree", 0, "must be positive, or -1, got 0"),
        ("degree", -2, "must be positive, or -1, got -2"),
        ("share", 1.1, "must be between 0 and 1, got 1.1"),
        ("share", float("nan"), "must be between 0 and 1, got nan"),
        ("feature", True, "time travel is not supported by this version; only false is accepted, "
         "got true"),
        ("low", "3", "valid integer"),
        ("low", True, "valid integer"),
        ("unknown", 1, "Extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_is_rejected_with_the_bounds(
    key: str, value: object, message: str
) -> None:
    with pytest.raises(ValidationError) as error:
        _Example.model_validate({key: value})
    assert message in str(error.value)


def test_values_at_the_bounds_are_accepted() -> None:
    edges = {"low": 2, "high": 0.99, "strictly": 1e-9, "degree": 1, "share": 1.0}
    example = _Example.model_validate(edges)
    assert example.model_dump() == edges | {"feature": False}


def test_a_section_is_frozen_and_its_docstrings_are_its_help() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        _Example().low = 3
    assert field_texts(_Example) == {"feature": "Go back."}


@pytest.mark.parametrize(
    ("value", "text"), [(True, "true"), ("a", '"a"'), (None, "none"), (3, "3"), (0.5, "0.5")]
)
def test_literals_are_written_as_in_toml(value: object, text: str) -> None:
    assert toml_literal(value) == text
