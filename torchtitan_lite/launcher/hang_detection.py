"""Detection of stalled ranks, and of the rank that the others wait for. Without I/O except for the
flight records, which the ranks write. Layer: above heartbeat."""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.launcher.heartbeat import Heartbeat
from torchtitan_lite.phases import Phase

STOPPED = "T"
"""State in /proc of a process stopped by a signal. A process held by a debugger has another
state."""
_STATES = {
    STOPPED: "stopped",
    "D": "uninterruptible in the kernel",
    "t": "held by a debugger",
    "Z": "dead",
}
_MARGIN_S = 1.0
"""Minimum time for which a rank must be late: after a suspend of the machine all ranks are late for
a moment."""
_OWN_WORK = (Phase.DATA, Phase.COMPUTE)
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


@dataclass(frozen=True)
class RankStatus:
    """Process state and last heartbeat of a rank at one moment."""

    number: int
    pid: int
    heartbeat: Heartbeat | None
    state: str
    """State letter in /proc/PID/stat; empty if the process is gone."""


class StallDetector:
    """Detector of ranks without progress, over one attempt of a replica."""

    def __init__(self) -> None:
        self._stopped: dict[int, tuple[Heartbeat, float]] = {}
        self._late: dict[int, tuple[Heartbeat, float]] = {}

    def update(self, ranks: Sequence[RankStatus], now_s: float) -> set[int]:
        """Return the numbers of the ranks that have exceeded the time limit of their phase. A rank
        whose heartbeat cannot be read is never late."""
        known = [(one, one.heartbeat) for one in ranks if one.heartbeat is not None]
        stopped = [(one.number, heartbeat) for one, heartbeat in known if one.state == STOPPED]
        self._stopped = _since(self._stopped, stopped, now_s)
        late = [
            (one.number, heartbeat)
            for one, heartbeat in known
            if now_s - heartbeat.since_s > heartbeat.limit_s
            or self._stopped_for_s(one.number, now_s) > heartbeat.hang_timeout_s
        ]
        self._late = _since(self._late, late, now_s)
        return {one for one, (_, since_s) in self._late.items() if now_s - since_s >= _MARGIN_S}

    def _stopped_for_s(self, number: int, now_s: float) -> float:
        return now_s - self._stopped[number][1] if number in self._stopped else 0.0


def blocking_ranks(
    ranks: Sequence[RankStatus], late: Set[int], flight_records: Mapping[int, FlightRecord]
) -> list[RankStatus]:
    """Return the ranks that block the others, by the best evidence available, in this order:
    stopped ranks; ranks that have not entered a collective in which others wait; ranks that compute
    or load data and wait in no collective; ranks that compute or load data; all late ranks.
    `flight_records` holds the collectives of ranks, where known."""
    awaited = {
        number
        for flight in flight_records.values()
        for call in flight.pending
        for number, other in flight_records.items()
        if 0 <= other.newest.get(call.counter, -1) < call.number
    }
    overdue = [one for one in ranks if one.number in late]
    own = [one for one in overdue if one.heartbeat is not None and one.heartbeat.phase in _OWN_WORK]
    free = [
        one
        for one in own
        if one.number in flight_records and not flight_records[one.number].pending
    ]
    for found in (
        [one for one in ranks if one.state == STOPPED],
        [one for one in ranks if one.number in awaited],
        free,
        own,
    ):
        if found:
            return found
    return overdue


def hang_reason(
    ranks: Sequence[RankStatus],
    late: Set[int],
    flight_records: Mapping[int, FlightRecord],
    now_s: float,
) -> str:
    """Return why a replica is ended, in one line: the ranks without progress, and the collectives
    in which others wait."""
    blocking = blocking_ranks(ranks, late, flight_records)
    text = "; ".join(f"rank {one.number}: no progress {describe(one, now_s)}" for one in blocking)
    waits = [
        f"rank {one.number} waits in {flight_records[one.number].pending[0].description}"
        for one in ranks
        if one not in blocking
        and one.number in flight_records
        and flight_records[one.number].pending
    ]
    return "; ".join([text, *waits[:3]])


def describe(seen: RankStatus, now_s: float) -> str:
    """Describe the phase of a rank and its duration."""
    state = f" ({_STATES[seen.state]})" if seen.state in _STATES else ""
    if seen.heartbeat is None:
        return f"known{state}"
    phase, step = seen.heartbeat.phase.value, seen.heartbeat.step
    return f"for {now_s - seen.heartbeat.since_s:.1f} s in {phase} after step {step}{state}"


def rank_named_in(text: str) -> int | None:
    """Return the first rank named in a reason."""
    found = re.match(r"rank (\d{1,9}):", text)
    return None if found is None else int(found[1])


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
    return FlightRecord([call for call, retired in calls if retired is False], newest)


def _since(
    before: Mapping[int, tuple[Heartbeat, float]],
    found: Sequence[tuple[int, Heartbeat]],
    now_s: float,
) -> dict[int, tuple[Heartbeat, float]]:
    """Return, by rank, its heartbeat and the time since which that heartbeat is unchanged."""
    known = ((number, heartbeat, before.get(number)) for number, heartbeat in found)
    return {
        number: (heartbeat, now_s) if then is None or then[0] != heartbeat else then
        for number, heartbeat, then in known
    }


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
