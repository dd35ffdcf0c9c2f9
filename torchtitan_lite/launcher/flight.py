"""The collectives of a rank, from the flight recorder of torch, which the rank has written. Layer:
imports nothing of the project.

Entries keep torch's names; the file is JSON, of which only what makes sense is taken.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Call:
    """A collective that a rank has called."""

    group: str
    number: int
    """Of the collectives of this group, the same on all of its ranks."""
    name: str
    sizes: str
    """Of what goes in."""

    @property
    def in_words(self) -> str:
        return f"{self.name} number {self.number} of group {self.group} ({self.sizes})"


@dataclass(frozen=True)
class Flight:
    """What the recorder of a rank tells."""

    pending: Sequence[Call] = ()
    """Those that have not come back, the oldest first."""
    newest: Mapping[str, int] = field(default_factory=dict)
    """By group: the number of the last that was called."""


def flight_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its recorder."""
    return folder / f"flight_recorder_{rank}.json"


def read_flight(path: Path) -> Flight | None:
    """What a rank has written; None where there is nothing to be understood."""
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_MOST_BYTES))
        entries = record["entries"]
        calls = [(_call(entry), entry["retired"]) for entry in entries if not entry["is_p2p"]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    newest: dict[str, int] = {}
    for call, _ in calls:
        newest[call.group] = max(call.number, newest.get(call.group, 0))
    return Flight([call for call, retired in calls if retired is False], newest)


def _call(entry: Mapping[str, Any]) -> Call:
    name, description = entry["process_group"]
    group = f"{description} ({name})" if description else name
    shapes = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    sizes = ", ".join(f"{dtype} {list(map(int, size))}" for dtype, size in shapes)
    number, called = int(entry["collective_seq_id"]), _text(entry["profiling_name"])
    return Call(_text(group), number, called, _text(sizes))


def _text(value: Any) -> str:
    """For people: of one line, and not endless."""
    text = "".join(letter for letter in str(value) if letter.isprintable())
    return text if len(text) <= 80 else text[:77] + "..."
