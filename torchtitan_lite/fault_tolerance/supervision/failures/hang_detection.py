"""Detection of stalled ranks, and of the rank that the others wait for. Without I/O."""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torchtitan_lite.core.diagnosis import Cause
from torchtitan_lite.core.phases import Phase
from torchtitan_lite.core.rank.heartbeat import Heartbeat
from torchtitan_lite.fault_tolerance.supervision.failures.flight_records import (
    CollectiveCall,
    FlightRecord,
    find_mismatch,
)

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
_ORDER = (
    Phase.START,
    Phase.CHECKPOINT,
    Phase.BETWEEN,
    Phase.QUORUM,
    Phase.HEALING,
    Phase.DATA,
    Phase.COMPUTE,
    Phase.COMMUNICATION,
    Phase.END,
)
"""Order of the phases between two commits."""
_FEWEST_VOTES = 3
"""Minimum number of ranks for a majority: of two ranks, either may have taken the wrong branch."""


@dataclass(frozen=True)
class RankStatus:
    """Process state and last heartbeat of a rank at one moment."""

    number: int
    pid: int
    heartbeat: Heartbeat | None
    state: str
    """State letter in /proc/PID/stat; empty if the process is gone."""


class StallDetector:
    """Detector of ranks without progress, over one generation of a replica."""

    def __init__(self) -> None:
        self._stopped: dict[int, tuple[Heartbeat, float]] = {}
        self._late: dict[int, tuple[Heartbeat, float]] = {}

    def update(self, ranks: Sequence[RankStatus], now_s: float) -> set[int]:
        """Return the numbers of the ranks that have exceeded the time limit of their phase. A rank
        whose heartbeat cannot be read is never late."""
        known = [(rank, rank.heartbeat) for rank in ranks if rank.heartbeat is not None]
        stopped = [(rank.number, heartbeat) for rank, heartbeat in known if rank.state == STOPPED]
        self._stopped = _since(self._stopped, stopped, now_s)
        late = [
            (rank.number, heartbeat)
            for rank, heartbeat in known
            if now_s - heartbeat.since_s > heartbeat.limit_s
            or self._stopped_for_s(rank.number, now_s) > heartbeat.hang_timeout_s
        ]
        self._late = _since(self._late, late, now_s)
        return {
            number for number, (_, since_s) in self._late.items() if now_s - since_s >= _MARGIN_S
        }

    def _stopped_for_s(self, number: int, now_s: float) -> float:
        return now_s - self._stopped[number][1] if number in self._stopped else 0.0


def blocking_ranks(
    ranks: Sequence[RankStatus], late: Set[int], flight_records: Mapping[int, FlightRecord]
) -> list[RankStatus]:
    """Return the ranks that block the others, by the best evidence available, in this order:
    stopped ranks; ranks that call other collectives than most, or none where most call one; ranks
    that have not entered a collective in which others wait; ranks that compute or load data and
    wait in no collective; ranks that compute or load data; all late ranks. `flight_records` holds
    the collectives of ranks, where known."""
    awaited = {
        number
        for flight in flight_records.values()
        for call in flight.pending
        for number, peer in flight_records.items()
        if 0 <= peer.newest.get(call.counter, -1) < call.number
    }
    strays = stray_ranks(ranks, flight_records)
    overdue = [rank for rank in ranks if rank.number in late]
    own = [
        rank for rank in overdue if rank.heartbeat is not None and rank.heartbeat.phase in _OWN_WORK
    ]
    free = [
        rank
        for rank in own
        if rank.number in flight_records and not flight_records[rank.number].pending
    ]
    mismatch = find_mismatch(flight_records)
    differing = () if mismatch is None else mismatch.ranks
    for blocking in (
        [rank for rank in ranks if rank.state == STOPPED],
        [rank for rank in ranks if rank.number in differing],
        [rank for rank in ranks if rank.number in strays],
        [rank for rank in ranks if rank.number in awaited],
        free,
        own,
    ):
        if blocking:
            return blocking
    return overdue


def stray_ranks(
    ranks: Sequence[RankStatus], flight_records: Mapping[int, FlightRecord]
) -> dict[int, CollectiveCall]:
    """Return the ranks that took another branch than most ranks of a group of three or more, each
    with the collective that shows it: they wait in one that the others have passed without calling
    it, or have passed one in which the others wait."""
    places = {rank.number: _place(rank.heartbeat) for rank in ranks if rank.heartbeat is not None}
    for call in (call for flight in flight_records.values() for call in flight.pending):
        newest = {
            number: flight.newest[call.counter]
            for number, flight in flight_records.items()
            if call.counter in flight.newest and call.group and number in places
        }
        inside = {number for number, last in newest.items() if last >= call.number}
        outside = newest.keys() - inside
        if not inside or not outside or len(newest) < _FEWEST_VOTES:
            continue
        has_passed = min(places[number] for number in outside) > max(
            places[number] for number in inside
        )
        if has_passed and len(inside) != len(outside):
            fewer = inside if len(inside) < len(outside) else outside
            return dict.fromkeys(sorted(fewer), call)
    return {}


def _place(heartbeat: Heartbeat) -> tuple[int, int]:
    """Return the place of a rank in the order of steps and phases."""
    return heartbeat.step, _ORDER.index(heartbeat.phase)


def hang_cause(
    ranks: Sequence[RankStatus], late: Set[int], flight_records: Mapping[int, FlightRecord]
) -> Cause | None:
    """Return why the ranks block, by the evidence of `blocking_ranks`; None if nothing
    distinguishes them from the others, as when a collective takes long for all."""
    if any(rank.state == STOPPED for rank in ranks):
        return Cause.STOPPED
    mismatch = find_mismatch(flight_records)
    if mismatch is not None:
        return mismatch.cause
    if stray_ranks(ranks, flight_records):
        return Cause.COLLECTIVE_MISMATCH
    has_evidence = len(ranks) == 1 or len(blocking_ranks(ranks, late, flight_records)) < len(ranks)
    return Cause.HANG if has_evidence else None


def hang_reason(
    ranks: Sequence[RankStatus],
    late: Set[int],
    flight_records: Mapping[int, FlightRecord],
    now_s: float,
) -> str:
    """Return why a replica is ended, in one line: the ranks without progress, and the collectives
    in which others wait."""
    blocking = blocking_ranks(ranks, late, flight_records)
    if not blocking:
        return "the ranks without progress have exited"
    text = "; ".join(
        f"rank {rank.number}: no progress {describe(rank, now_s)}" for rank in blocking
    )
    mismatch = find_mismatch(flight_records)
    if mismatch is not None and blocking[0].number in mismatch.ranks:
        text += f": {mismatch.description}"
    elif stray := stray_ranks(ranks, flight_records).get(blocking[0].number):
        text += f": it took another branch than the others at {stray.description}"
    waits = [
        f"rank {rank.number} waits in {flight_records[rank.number].pending[0].description}"
        for rank in ranks
        if rank not in blocking
        and rank.number in flight_records
        and flight_records[rank.number].pending
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
    match = re.match(r"rank (\d{1,9}):", text)
    return None if match is None else int(match[1])


def _since(
    before: Mapping[int, tuple[Heartbeat, float]],
    heartbeats: Sequence[tuple[int, Heartbeat]],
    now_s: float,
) -> dict[int, tuple[Heartbeat, float]]:
    """Return, by rank, its heartbeat and the time since which that heartbeat is unchanged."""
    known = ((number, heartbeat, before.get(number)) for number, heartbeat in heartbeats)
    return {
        number: (heartbeat, now_s) if then is None or then[0] != heartbeat else then
        for number, heartbeat, then in known
    }
