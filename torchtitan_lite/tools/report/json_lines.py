"""Reading JSON Lines of a run, whatever they contain, and the problems that they have."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

_LARGEST_NUMBER = 1e100
"""Limit below which sums and multiples are finite. float32 values are at most 3.4e38."""
_MAX_DEPTH = 32
"""Maximum nesting of JSON and TOML values."""
_MAX_PROBLEMS = 200


def encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by question marks."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


class Problems:
    """Problems in the files."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._more = 0

    def add(self, text: str) -> None:
        if len(self._texts) < _MAX_PROBLEMS:
            self._texts.append(encodable(text))
        else:
            self._more += 1

    def first(self) -> str:
        return f" First problem: {self._texts[0]}" if self._texts else ""

    def listed(self) -> list[str]:
        more = [f"and {self._more} more problems"] if self._more else []
        return [*self._texts, *more]


def json_lines(path: Path, problems: Problems) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON Lines file, as `cleaned` returns them, each with FILE:LINE."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                if not line.strip():
                    continue
                try:
                    values = json.loads(line.decode("utf-8"), parse_constant=reject_constant)
                    if not isinstance(values, dict):
                        raise ValueError(f"a JSON {type(values).__name__}, not an object")
                except (ValueError, RecursionError) as error:
                    what = "" if line.endswith(b"\n") else " (the last line is incomplete)"
                    problems.add(f"{where}: not a JSON object{what}: {error}; the line is skipped")
                    continue
                try:
                    checked = cleaned("the object", values)
                except ValueError as error:
                    problems.add(f"{where}: {error}; the line is skipped")
                    continue
                yield where, checked
    except OSError as error:
        problems.add(f"{path} cannot be read: {error}")


def reject_constant(constant: str) -> NoReturn:
    """Raise ValueError for NaN and infinity, which Python reads though they are not JSON."""
    raise ValueError(f"{constant} is not JSON")


def cleaned(name: str, value: Any, *, is_json: bool = True, depth: int = 0) -> Any:
    """Return a value of JSON or TOML without lone surrogates. Raises ValueError for numbers that
    are too large and for deep nesting. Floats of TOML are not limited: `inf` is valid there."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"more than {_MAX_DEPTH} levels of nesting")
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        prefix = f"{name}." if depth else ""
        return {
            encodable(key): cleaned(f"{prefix}{key}", element, is_json=is_json, depth=depth + 1)
            for key, element in value.items()
        }
    if isinstance(value, list):
        return [cleaned(name, element, is_json=is_json, depth=depth + 1) for element in value]
    is_limited = isinstance(value, int) or (is_json and isinstance(value, float))
    if is_limited and not abs(value) < _LARGEST_NUMBER:
        raise ValueError(f"{name} is too large: {shortened(value)}")
    return value


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_of(name: str, value: Any) -> float | None:
    """Return a value that `cleaned` has returned as a float. Raises ValueError if it is not a
    number."""
    if value is None:
        return None
    if not is_number(value):
        raise ValueError(f"{name} must be a number or null, got {shortened(value)}")
    return float(value)


def shortened(value: Any) -> str:
    """Format a value for an error message."""
    if isinstance(value, int) and abs(value) >= _LARGEST_NUMBER:
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
