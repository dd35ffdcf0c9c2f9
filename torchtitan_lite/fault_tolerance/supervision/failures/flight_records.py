"""Flight records: the collectives that each rank has called, which the ranks write and the launcher
compares."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.core.diagnosis import Cause

_FEWEST_VOTES = 3
"""Minimum number of ranks for a majority: of two ranks, either may call the wrong collective."""
_UNEVEN = re.compile(r"all_?to_?all|:gather|:scatter|:barrier")
"""Collectives whose inputs may differ between ranks."""
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class CollectiveCall:
    """Collective that a rank has called."""

    group: str
    number: int
    """Sequence number in the process group, the same on all of its ranks."""
    name: str
    sizes: str
    """Dtypes and shapes of the inputs."""

    @property
    def counter(self) -> str:
        """The group and the backend that counted the call."""
        return f"{self.group} {self.name.partition(':')[0]}"

    @property
    def description(self) -> str:
        return f"{self.name} number {self.number} of group {self.group} ({self.sizes})"


@dataclass(frozen=True)
class FlightRecord:
    """Collectives in torch's flight recorder of one rank."""

    pending: Sequence[CollectiveCall] = ()
    """Collectives that have not completed, the oldest first."""
    newest: Mapping[str, int] = field(default_factory=dict)
    """Number of the last collective called, by process group and backend: gloo and NCCL count the
    calls of one group separately."""
    calls: Sequence[CollectiveCall] = ()
    """All recorded collectives."""


@dataclass(frozen=True)
class Mismatch:
    """Collective that some ranks called differently from most ranks of the group."""

    ranks: tuple[int, ...]
    call: CollectiveCall
    """Call of these ranks."""
    expected: CollectiveCall
    """Call of the others, with the same number."""

    @property
    def cause(self) -> Cause:
        is_same = self.call.name == self.expected.name
        return Cause.SHAPE_MISMATCH if is_same else Cause.COLLECTIVE_MISMATCH

    @property
    def description(self) -> str:
        return (
            f"calls {self.call.description}, the others {self.expected.name} "
            f"({self.expected.sizes})"
        )


def flight_record_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's flight record."""
    return folder / f"flight_recorder_{rank}.json"


def read_flight_record(path: Path) -> FlightRecord | None:
    """Read a rank's flight record. Return None if it is missing or malformed."""
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_MOST_BYTES))
        entries = record["entries"]
        calls = [(_call(entry), entry["retired"]) for entry in entries if not entry["is_p2p"]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    newest: dict[str, int] = {}
    for call, _ in calls:
        newest[call.counter] = max(call.number, newest.get(call.counter, 0))
    pending = [call for call, retired in calls if retired is False]
    return FlightRecord(pending, newest, [call for call, _ in calls])


def find_mismatch(flight_records: Mapping[int, FlightRecord]) -> Mismatch | None:
    """Return the first collective that fewer than half of the ranks called differently; None if
    there is none. `flight_records` are those of ranks, by number."""
    called: dict[tuple[str, int], dict[int, CollectiveCall]] = {}
    for rank, flight in flight_records.items():
        for call in flight.calls:
            # The group of a rank with other replicas has no name, and other members on each rank.
            if call.group:
                called.setdefault((call.counter, call.number), {})[rank] = call
    for _, by_rank in sorted(called.items(), key=lambda entry: entry[0][1]):
        votes = Counter(map(_signature, by_rank.values()))
        signature, count = votes.most_common(1)[0]
        if len(by_rank) < _FEWEST_VOTES or len(votes) == 1 or 2 * count <= len(by_rank):
            continue
        expected = next(call for call in by_rank.values() if _signature(call) == signature)
        differing = [rank for rank, call in by_rank.items() if _signature(call) != signature]
        return Mismatch(tuple(sorted(differing)), by_rank[differing[0]], expected)
    return None


def _signature(call: CollectiveCall) -> tuple[str, str]:
    return call.name, "" if _UNEVEN.search(call.name) else call.sizes


def _call(entry: Mapping[str, Any]) -> CollectiveCall:
    name, description = entry["process_group"]
    group = f"{description} ({name})" if description else name
    shapes = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    sizes = ", ".join(f"{dtype} {list(map(int, size))}" for dtype, size in shapes)
    number, called = int(entry["collective_seq_id"]), _text(entry["profiling_name"])
    return CollectiveCall(_text(group), number, called, _text(sizes))


def _text(value: Any) -> str:
    """Return a printable line of at most 80 characters."""
    text = "".join(letter for letter in str(value) if letter.isprintable())
    return text if len(text) <= 80 else text[:77] + "..."
