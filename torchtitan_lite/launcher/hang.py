"""Which rank of a replica hangs, and which only wait for it. Pure: it is told what was seen. Layer:
above flight and pulse.
"""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torchtitan_lite.launcher.flight import Flight
from torchtitan_lite.launcher.pulse import Pulse
from torchtitan_lite.phases import Phase

STOPPED = "T"
"""The state in /proc of a process that a signal has stopped. One under a debugger has another."""
_STATES = {
    STOPPED: "stopped",
    "D": "waiting in the kernel, not to be interrupted",
    "t": "held by a debugger",
    "Z": "dead",
}
_MARGIN_S = 1.0
"""For which a rank has to be seen late: all are, for a moment, when a machine has slept."""
_OWN_WORK = (Phase.DATA, Phase.COMPUTE)


@dataclass(frozen=True)
class Seen:
    """A rank, at a look at it."""

    number: int
    pid: int
    pulse: Pulse | None
    state: str
    """A letter, as in /proc/PID/stat; empty when it is gone."""


class Lateness:
    """Since when ranks of an attempt are late."""

    def __init__(self) -> None:
        self._stopped: dict[int, tuple[Pulse, float]] = {}
        self._late: dict[int, tuple[Pulse, float]] = {}

    def look(self, ranks: Sequence[Seen], now_s: float) -> set[int]:
        """The numbers of those that have made no progress for longer than they may. One whose
        pulse cannot be read is not judged."""
        known = [(one, one.pulse) for one in ranks if one.pulse is not None]
        stopped = [(one.number, pulse) for one, pulse in known if one.state == STOPPED]
        self._stopped = _since(self._stopped, stopped, now_s)
        late = [
            (one.number, pulse)
            for one, pulse in known
            if now_s - pulse.since_s > pulse.limit_s
            or self._stopped_for_s(one.number, now_s) > pulse.hang_timeout_s
        ]
        self._late = _since(self._late, late, now_s)
        return {one for one, (_, since_s) in self._late.items() if now_s - since_s >= _MARGIN_S}

    def _stopped_for_s(self, number: int, now_s: float) -> float:
        return now_s - self._stopped[number][1] if number in self._stopped else 0.0


def _since(
    before: Mapping[int, tuple[Pulse, float]], found: Sequence[tuple[int, Pulse]], now_s: float
) -> dict[int, tuple[Pulse, float]]:
    """By rank: its pulse, and since when it is found with that same one."""
    known = ((number, pulse, before.get(number)) for number, pulse in found)
    return {
        number: (pulse, now_s) if then is None or then[0] != pulse else then
        for number, pulse, then in known
    }


def culprits(ranks: Sequence[Seen], late: Set[int], flights: Mapping[int, Flight]) -> list[Seen]:
    """Those for whom the others wait, by the best evidence that there is: who is stopped; who has
    not come to a collective in which others wait; who does work of its own and waits in none; who
    does work of its own; who is late. `flights` are the collectives of ranks, where known."""
    awaited = {
        number
        for flight in flights.values()
        for call in flight.pending
        for number, other in flights.items()
        if 0 <= other.newest.get(call.group, -1) < call.number
    }
    overdue = [one for one in ranks if one.number in late]
    own = [one for one in overdue if one.pulse is not None and one.pulse.phase in _OWN_WORK]
    free = [one for one in own if one.number in flights and not flights[one.number].pending]
    for found in (
        [one for one in ranks if one.state == STOPPED],
        [one for one in ranks if one.number in awaited],
        free,
        own,
    ):
        if found:
            return found
    return overdue


def reason(
    ranks: Sequence[Seen], late: Set[int], flights: Mapping[int, Flight], now_s: float
) -> str:
    """Why a replica is ended, in a line: who made no progress, and who waits for it in what."""
    guilty = culprits(ranks, late, flights)
    told = "; ".join(f"rank {one.number}: no progress {in_words(one, now_s)}" for one in guilty)
    waits = [
        f"rank {one.number} waits in {flights[one.number].pending[0].in_words}"
        for one in ranks
        if one not in guilty and one.number in flights and flights[one.number].pending
    ]
    return "; ".join([told, *waits[:3]])


def rank_in(told: str) -> int | None:
    """The rank that a reason names first."""
    found = re.match(r"rank (\d{1,9}):", told)
    return None if found is None else int(found[1])


def in_words(seen: Seen, now_s: float) -> str:
    """What a rank does, and for how long."""
    state = f" ({_STATES[seen.state]})" if seen.state in _STATES else ""
    if seen.pulse is None:
        return f"known{state}"
    phase, step = seen.pulse.phase.value, seen.pulse.step
    return f"for {now_s - seen.pulse.since_s:.1f} s in {phase} after step {step}{state}"
